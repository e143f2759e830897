"""The agent as a process, with the fake driver and a minimal service."""

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

from slicewise.agent.desired_state import Eviction
from slicewise.fakedriver import Machine

TIMEOUT = 60.0
"""Far longer than any condition takes."""
HEAVY = {"numpy", "typer", "rich", "httpx", "msgspec", "starlette", "sqlalchemy"}


@dataclass
class AgentRunner:
    """A machine, a service, and agent processes."""

    folder: Path
    machine: Machine
    service: TinyService
    library: Path
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def agent(self, *arguments: str) -> subprocess.Popen[str]:
        token = self.folder / "token"
        token.write_text(TOKEN)
        state, cdi = self.folder / "state", self.folder / "cdi"
        environment = {**os.environ, **self.machine.environment(self.library)}
        process = subprocess.Popen(
            [sys.executable, "-m", "slicewise.agent", "--server", self.service.url,
             "--token-file", str(token), "--state", str(state), "--cdi", str(cdi), *arguments],
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def until(self, done: Callable[[], bool]) -> None:
        """Wait for a condition; restart agents that were killed."""
        end = time.monotonic() + TIMEOUT
        while True:
            with self.service.changed:
                if done():
                    return
                self.service.changed.wait(0.05)
            assert time.monotonic() < end, self.service.state
            process = self.processes[-1]
            if process.poll() == -signal.SIGKILL:
                self.agent()
            else:
                assert process.poll() is None, process.stderr.read() if process.stderr else ""

    @property
    def kills(self) -> int:
        return sum(process.poll() == -signal.SIGKILL for process in self.processes)

    def uuid(self, allocation: str) -> str:
        item = self.service.state.instances.get((allocation, 0))
        return "" if item is None else item.uuid

    def create_and_release(self) -> None:
        """Create and release an instance."""
        gpu = self.machine.gpus[0].uuid
        with self.service.changing() as state:
            state.released.clear()
            state.place("a", gpu, "2g.35gb", 4, 2)
        self.until(lambda: bool(self.uuid("a")))
        (made,) = [i for i in self.machine.instances() if i.start == 4]
        assert made.computes[0].uuid == self.uuid("a")
        with self.service.changing() as state:
            state.release("a")
        self.until(lambda: ("a", 0) in self.service.state.released)

    def stop(self) -> int:
        process = self.processes[-1]
        process.send_signal(signal.SIGTERM)
        return process.wait(TIMEOUT)


@pytest.fixture
def runner(
    tmp_path: Path, machine_of: MachineMaker, library: Path
) -> Iterator[AgentRunner]:  # fmt: skip
    with serving(TinyService()) as service:
        made = AgentRunner(tmp_path, machine_of(gpus=2), service, library)
        yield made
        for process in made.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stderr is not None:
                process.stderr.close()


def test_from_hello_to_exit(runner: AgentRunner) -> None:
    """The first report and its phases, a foreign instance, and a clean exit."""
    foreign = runner.machine.create_instance(1, "1g.18gb", 0)
    runner.agent()
    runner.create_and_release()
    (hello,) = runner.service.hellos
    assert hello["model"] == "H200-141GB"
    assert hello["disagreements"] == []
    assert hello["boot"] == runner.machine.boot_id
    gpus = hello["gpus"]
    assert gpus == [{"uuid": g.uuid, "mig": True, "problem": ""} for g in runner.machine.gpus]
    assert runner.service.state.last_report["foreign"] == [
        {"gpu": foreign.gpu_uuid, "uuid": foreign.computes[0].uuid, "profile": "1g.18gb",
         "start": 0, "size": 1, "why": "foreign"}
    ]  # fmt: skip
    with runner.service.changing() as state:
        state.place("b", runner.machine.gpus[0].uuid, "3g.71gb", 0, 4)
    runner.until(lambda: bool(runner.uuid("b")))
    (file,) = (runner.folder / "cdi").iterdir()
    spec = json.loads(file.read_text())
    assert spec["devices"][0]["name"] == runner.uuid("b")
    assert runner.stop() == 0
    assert len(runner.machine.instances()) == 2, "instances stay when the agent exits"
    # The next agent recognizes its instance and changes nothing.
    before = runner.machine.calls()
    count = len(runner.service.hellos)
    runner.agent()
    runner.until(
        lambda: (
            len(runner.service.hellos) > count
            and runner.service.state.last_report.get("instances") not in ([], None)
        )
    )
    after = runner.machine.calls()
    for name in after:
        if "Destroy" in name or ("Create" in name and "EventSet" not in name):
            assert before[name] == after[name], name
    reported = runner.service.state.last_report["instances"]
    assert isinstance(reported, list)
    assert [(one["phase"], one["uuid"]) for one in reported] == [("active", runner.uuid("b"))]


def test_killed_at_every_step(runner: AgentRunner) -> None:
    """Kill (-9) before, during and after each call that changes state, and in reading calls."""
    foreign = runner.machine.create_instance(0, "1g.18gb", 1)
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
    runner.agent()
    for number, (name, moment) in enumerate(points):
        fault = runner.machine.kill(name, moment)
        runner.create_and_release()
        assert runner.machine.hits(fault) == 1, f"{name} was not killed {moment}"
        assert runner.kills == number + 1
        assert runner.machine.instances() == (foreign,), f"killed {moment} {name}"
        runner.machine.clear_faults()
    print(f"{runner.kills} agents killed (-9), each recovered")
    assert runner.service.state.failures == {}


def test_eviction_and_adoption(runner: AgentRunner) -> None:
    first = runner.machine.create_instance(0, "1g.18gb", 1)
    second = runner.machine.create_instance(0, "1g.18gb", 2)
    runner.agent()
    runner.until(lambda: bool(runner.service.state.last_report.get("foreign")))
    gpu = runner.machine.gpus[0].uuid
    fault = runner.machine.kill("nvmlComputeInstanceDestroy", "after")
    with runner.service.changing() as state:
        state.evict.append(Eviction(gpu, "1g.18gb", 1, first.computes[0].uuid))
    runner.until(lambda: not runner.service.state.evict)
    assert runner.machine.hits(fault) == 1
    assert runner.machine.instances() == (second,)
    with runner.service.changing() as state:
        state.place("a", gpu, "1g.18gb", 2, 1)
        state.instances["a", 0] = replace(state.instances["a", 0], uuid=second.computes[0].uuid)
    runner.until(lambda: runner.service.state.last_report.get("foreign") == [])
    assert runner.machine.instances() == (second,)
    with runner.service.changing() as state:
        state.release("a")
    runner.until(lambda: ("a", 0) in runner.service.state.released)
    assert runner.machine.instances() == ()


def test_second_agent_is_refused_and_another_host_supersedes(runner: AgentRunner) -> None:
    first = runner.agent()
    runner.until(lambda: bool(runner.service.reports))
    second = runner.agent()
    assert second.wait(TIMEOUT) == 2
    assert second.stderr is not None
    assert f"process {first.pid} holds" in second.stderr.read()
    third = runner.agent("--state", str(runner.folder / "another"))
    assert third.wait(TIMEOUT) == 2
    assert third.stderr is not None
    assert f"process {first.pid} holds" in third.stderr.read()
    with runner.service.changing():
        runner.service.session = "another"
    assert first.wait(TIMEOUT) == 3
    assert first.stderr is not None
    assert "another agent has taken over this node" in first.stderr.read().splitlines()[-1]


def test_stops_while_a_driver_call_hangs(runner: AgentRunner) -> None:
    process = runner.agent("--json-logs")
    runner.until(lambda: bool(runner.service.reports))
    runner.machine.delay("nvmlDeviceCreateGpuInstanceWithPlacement", 600_000)
    with runner.service.changing() as state:
        state.place("a", runner.machine.gpus[0].uuid, "1g.18gb", 0, 1)
    runner.until(lambda: runner.service.state.phases.get(("a", 0), {}).get("phase") == "creating")
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT) == 0
    assert process.stderr is not None
    events = [json.loads(line)["event"] for line in process.stderr.read().splitlines()]
    assert "exiting while a driver call is still running" in events


def test_reboot(runner: AgentRunner) -> None:
    runner.agent()
    with runner.service.changing() as state:
        state.place("a", runner.machine.gpus[0].uuid, "1g.18gb", 0, 1)
    runner.until(lambda: bool(runner.uuid("a")))
    before = runner.uuid("a")
    runner.stop()
    runner.machine.reboot()
    uuids = [gpu.uuid for gpu in runner.machine.gpus]
    runner.agent("--enable-mig", uuids[0])
    runner.until(lambda: runner.uuid("a") not in ("", before))
    assert [gpu.mig for gpu in runner.machine.gpus] == [True, False], "only on the named GPU"
    assert [i.start for i in runner.machine.instances()] == [0]


@pytest.mark.parametrize("words", [["--help"], ["--discover"], ["--discover", "--json"]])
def test_no_heavy_packages_are_imported(
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


def test_lost_gpu_is_reported_at_start(
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


def test_agent_sees_only_processes_of_its_machine(
    machine_of: MachineMaker, library: Path, tmp_path: Path
) -> None:
    """A MIG manager on the host of the tests does not affect it."""
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
        capture_output=True, text=True, check=False, timeout=TIMEOUT,
    )  # fmt: skip
    assert done.returncode == 2
    assert "gpu-kubelet-plugin (NVIDIA's DRA driver for Kubernetes: process 7)" in done.stderr


def test_discover_as_json(machine_of: MachineMaker, library: Path) -> None:
    machine = machine_of(gpus=2, mig=False)
    machine.set_mig(1, True)
    machine.create_instance(1, "3g.71gb", 4)
    before = machine.instances(), machine.gpus
    environment = {**os.environ, **machine.environment(library)}
    done = subprocess.run(
        [sys.executable, "-m", "slicewise.agent", "--discover", "--json"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    reported = json.loads(done.stdout)
    assert [gpu["mig"] for gpu in reported["gpus"]] == [False, True]
    assert reported["gpus"][1]["instances"][0]["uuids"] == [before[0][0].computes[0].uuid]
    assert (machine.instances(), machine.gpus) == before
    for name, count in machine.calls().items():
        assert not (count and ("Set" in name or "Create" in name or "Destroy" in name)), name
