"""The agent as a process, on the fake driver and against a service: killed at every step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tests.agent.conftest import MachineMaker
from tests.agent.service import TOKEN, TinyService, serving

from slicewise.agent.wanted import Evicted
from slicewise.fakedriver import Machine

PATIENCE = 60.0
"""Far beyond what anything takes: a test that waits so long has failed."""
HEAVY = {"numpy", "typer", "rich", "httpx", "msgspec", "starlette", "sqlalchemy"}


@dataclass
class Stage:
    """A machine, a service, and agents that come and go."""

    folder: Path
    machine: Machine
    service: TinyService
    library: Path
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def agent(self, *words: str) -> subprocess.Popen[str]:
        token = self.folder / "token"
        token.write_text(TOKEN)
        state, cdi = self.folder / "state", self.folder / "cdi"
        environment = {**os.environ, **self.machine.environment(self.library)}
        process = subprocess.Popen(
            [sys.executable, "-m", "slicewise.agent", "--server", self.service.url,
             "--token-file", str(token), "--state", str(state), "--cdi", str(cdi), *words],
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def until(self, done: Callable[[], bool]) -> None:
        """Wait for something the service is told; agents that were killed are started again."""
        end = time.monotonic() + PATIENCE
        while True:
            with self.service.changed:
                if done():
                    return
                self.service.changed.wait(0.05)
            assert time.monotonic() < end, self.service.office
            process = self.processes[-1]
            if process.poll() == -signal.SIGKILL:
                self.agent()
            else:
                assert process.poll() is None, process.stderr.read() if process.stderr else ""

    @property
    def deaths(self) -> int:
        return sum(process.poll() == -signal.SIGKILL for process in self.processes)

    def uuid(self, allocation: str) -> str:
        item = self.service.office.wanted.get((allocation, 0))
        return "" if item is None else item.uuid

    def life(self) -> None:
        """An instance is made and goes."""
        gpu = self.machine.gpus[0].uuid
        with self.service.changing() as office:
            office.released.clear()
            office.place("a", gpu, "2g.35gb", 4, 2)
        self.until(lambda: bool(self.uuid("a")))
        (made,) = [i for i in self.machine.instances() if i.start == 4]
        assert made.computes[0].uuid == self.uuid("a")
        with self.service.changing() as office:
            office.release("a")
        self.until(lambda: ("a", 0) in self.service.office.released)

    def end(self) -> int:
        process = self.processes[-1]
        process.send_signal(signal.SIGTERM)
        return process.wait(PATIENCE)


@pytest.fixture
def stage(
    tmp_path: Path, machine_of: MachineMaker, library: Path
) -> Iterator[Stage]:  # fmt: skip
    with serving(TinyService()) as service:
        made = Stage(tmp_path, machine_of(gpus=2), service, library)
        yield made
        for process in made.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stderr is not None:
                process.stderr.close()


def test_from_hello_to_the_end(stage: Stage) -> None:
    """What is told: the node, its phases, a stranger's instance; and an end in order."""
    stranger = stage.machine.create_instance(1, "1g.18gb", 0)
    stage.agent()
    stage.life()
    (hello,) = stage.service.hellos
    assert hello["model"] == "H200-141GB"
    assert hello["disagreements"] == []
    assert hello["boot"] == stage.machine.boot_id
    gpus = hello["gpus"]
    assert gpus == [{"uuid": g.uuid, "mig": True, "problem": ""} for g in stage.machine.gpus]
    foreign = stage.service.office.told["foreign"]
    assert foreign == [
        {"gpu": stranger.gpu_uuid, "uuid": stranger.computes[0].uuid, "profile": "1g.18gb",
         "start": 0, "size": 1, "why": "foreign"}
    ]  # fmt: skip
    with stage.service.changing() as office:
        office.place("b", stage.machine.gpus[0].uuid, "3g.71gb", 0, 4)
    stage.until(lambda: bool(stage.uuid("b")))
    (file,) = (stage.folder / "cdi").iterdir()
    spec = json.loads(file.read_text())
    assert spec["devices"][0]["name"] == stage.uuid("b")
    assert stage.end() == 0
    assert len(stage.machine.instances()) == 2, "instances stay when the agent ends"
    # Another one finds its instance again, and has nothing to do.
    before = stage.machine.calls()
    count = len(stage.service.hellos)
    stage.agent()
    stage.until(
        lambda: (
            len(stage.service.hellos) > count
            and stage.service.office.told.get("instances") not in ([], None)
        )
    )
    after = stage.machine.calls()
    for name in after:
        if "Destroy" in name or ("Create" in name and "EventSet" not in name):
            assert before[name] == after[name], name
    told = stage.service.office.told["instances"]
    assert isinstance(told, list)
    assert [(one["phase"], one["uuid"]) for one in told] == [("active", stage.uuid("b"))]


def test_killed_at_every_step(stage: Stage) -> None:
    """-9 before, in the middle of and after every call that changes something, and in readings."""
    stranger = stage.machine.create_instance(0, "1g.18gb", 1)
    points = [
        (name, moment)
        for name in (
            "nvmlDeviceCreateGpuInstanceWithPlacement",
            "nvmlGpuInstanceCreateComputeInstance",
            "nvmlComputeInstanceDestroy",
            "nvmlGpuInstanceDestroy",
        )
        for moment in ("before", "during", "after")
    ]
    points += [(name, "after") for name in ("nvmlDeviceGetGpuInstanceById",
                                            "nvmlGpuInstanceGetComputeInstanceById")]  # fmt: skip
    stage.agent()
    for number, (name, moment) in enumerate(points):
        fault = stage.machine.kill(name, moment)
        stage.life()
        assert stage.machine.struck(fault) == 1, f"{name} was not killed {moment}"
        assert stage.deaths == number + 1
        assert stage.machine.instances() == (stranger,), f"killed {moment} {name}"
        stage.machine.heal()
    print(f"{stage.deaths} agents killed (-9), each life came to its end")
    assert stage.service.office.failures == {}


def test_evicted_and_adopted_by_name(stage: Stage) -> None:
    first = stage.machine.create_instance(0, "1g.18gb", 1)
    second = stage.machine.create_instance(0, "1g.18gb", 2)
    stage.agent()
    stage.until(lambda: bool(stage.service.office.told.get("foreign")))
    gpu = stage.machine.gpus[0].uuid
    fault = stage.machine.kill("nvmlComputeInstanceDestroy", "after")
    with stage.service.changing() as office:
        office.evict.append(Evicted(gpu, "1g.18gb", 1, first.computes[0].uuid))
    stage.until(lambda: not stage.service.office.evict)
    assert stage.machine.struck(fault) == 1
    assert stage.machine.instances() == (second,)
    with stage.service.changing() as office:
        office.place("a", gpu, "1g.18gb", 2, 1)
        office.wanted["a", 0] = replace(office.wanted["a", 0], uuid=second.computes[0].uuid)
    stage.until(lambda: stage.service.office.told.get("foreign") == [])
    assert stage.machine.instances() == (second,)
    with stage.service.changing() as office:
        office.release("a")
    stage.until(lambda: ("a", 0) in stage.service.office.released)
    assert stage.machine.instances() == ()


def test_another_agent_supersedes_and_two_on_a_node_are_refused(stage: Stage) -> None:
    first = stage.agent()
    stage.until(lambda: bool(stage.service.reports))
    second = stage.agent()
    assert second.wait(PATIENCE) == 2
    assert second.stderr is not None
    assert f"process {first.pid} holds" in second.stderr.read()
    third = stage.agent("--state", str(stage.folder / "another"))
    assert third.wait(PATIENCE) == 2
    assert third.stderr is not None
    assert f"process {first.pid} holds" in third.stderr.read()
    with stage.service.changing():
        stage.service.session = "somebody else's"
    assert first.wait(PATIENCE) == 3
    assert first.stderr is not None
    assert "another agent has taken over this node" in first.stderr.read().splitlines()[-1]


def test_it_ends_while_the_driver_hangs(stage: Stage) -> None:
    process = stage.agent("--json-logs")
    stage.until(lambda: bool(stage.service.reports))
    stage.machine.delay("nvmlDeviceCreateGpuInstanceWithPlacement", 600_000)
    with stage.service.changing() as office:
        office.place("a", stage.machine.gpus[0].uuid, "1g.18gb", 0, 1)
    stage.until(lambda: stage.service.office.phases.get(("a", 0), {}).get("phase") == "creating")
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0
    assert process.stderr is not None
    events = [json.loads(line)["event"] for line in process.stderr.read().splitlines()]
    assert "a call to the driver is still under way and is left behind" in events


def test_after_a_reboot_the_record_is_over(stage: Stage) -> None:
    stage.agent()
    with stage.service.changing() as office:
        office.place("a", stage.machine.gpus[0].uuid, "1g.18gb", 0, 1)
    stage.until(lambda: bool(stage.uuid("a")))
    before = stage.uuid("a")
    stage.end()
    stage.machine.reboot()
    uuids = [gpu.uuid for gpu in stage.machine.gpus]
    stage.agent("--enable-mig", uuids[0])
    stage.until(lambda: stage.uuid("a") not in ("", before))
    assert [gpu.mig for gpu in stage.machine.gpus] == [True, False], "only the one that was named"
    assert [i.start for i in stage.machine.instances()] == [0]


@pytest.mark.parametrize("words", [["--help"], ["--discover"], ["--discover", "--json"]])
def test_nothing_heavy_is_imported(
    words: list[str], machine_of: MachineMaker, library: Path
) -> None:
    machine = machine_of()
    code = (
        f"import runpy, sys; sys.argv = ['agent', *{words!r}]\n"
        "try: runpy.run_module('slicewise.agent', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end: assert not end.code\n"
        f"print('heavy:', sorted({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **machine.environment(library)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "heavy: []"
    assert len(done.stdout.splitlines()) > 5


def test_a_gpu_that_does_not_answer_is_not_called_none(
    machine_of: MachineMaker, library: Path, tmp_path: Path
) -> None:
    machine = machine_of()
    machine.lose(0)
    token = tmp_path / "token"
    token.write_text("secret")
    done = subprocess.run(
        [sys.executable, "-m", "slicewise.agent", "--server", "http://127.0.0.1:9", "--token-file",
         str(token), "--state", str(tmp_path / "state")],
        env={**os.environ, **machine.environment(library)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "the GPU is lost" in done.stderr.splitlines()[-1]


def test_an_agent_sees_the_processes_of_its_machine(
    machine_of: MachineMaker, library: Path, tmp_path: Path
) -> None:
    """And no others: a manager that runs on the host of the tests is none of its business."""
    machine = machine_of()
    assert [path.name for path in (machine.root / "proc").iterdir()] == ["sys"]
    process = machine.root / "proc" / "7"
    process.mkdir()
    (process / "comm").write_text("gpu-kubelet-plu\n")
    token = tmp_path / "token"
    token.write_text("secret")
    done = subprocess.run(
        [sys.executable, "-m", "slicewise.agent", "--server", "http://127.0.0.1:9", "--token-file",
         str(token), "--state", str(tmp_path / "state")],
        env={**os.environ, **machine.environment(library)},
        capture_output=True, text=True, check=False, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 2
    assert "gpu-kubelet-plugin (NVIDIA's DRA driver for Kubernetes: process 7)" in done.stderr


def test_the_command_as_it_is_started(machine_of: MachineMaker, library: Path) -> None:
    machine = machine_of(gpus=2, mig=False)
    machine.set_mig(1, True)
    machine.create_instance(1, "3g.71gb", 4)
    before = machine.instances(), machine.gpus
    environment = {**os.environ, **machine.environment(library)}
    done = subprocess.run(
        [sys.executable, "-m", "slicewise.agent", "--discover", "--json"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    told = json.loads(done.stdout)
    assert [gpu["mig"] for gpu in told["gpus"]] == [False, True]
    assert told["gpus"][1]["instances"][0]["uuids"] == [before[0][0].computes[0].uuid]
    assert (machine.instances(), machine.gpus) == before
    for name, count in machine.calls().items():
        assert not (count and ("Set" in name or "Create" in name or "Destroy" in name)), name
