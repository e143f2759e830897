"""The driver through NVML: readings, refusals, older drivers, and every call failing."""

from __future__ import annotations

import importlib
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.agent.conftest import MachineMaker
from tests.agent.simulated import Office

from slicewise.agent.carrying import Carrier
from slicewise.agent.discovery import examine
from slicewise.agent.driver import At, ComputeReading, DriverError, GpuReading
from slicewise.agent.health import Health
from slicewise.agent.node import DriverChangedError, Node
from slicewise.agent.nvml import Nvml, _name
from slicewise.agent.record import Record
from slicewise.agent.reporting import report
from slicewise.agent.seats import Seats
from slicewise.agent.text import discover, places
from slicewise.catalog import Catalog
from slicewise.core.geometry import Profile
from slicewise.fakedriver import Machine

Open = Callable[[Machine], Nvml]

H200 = {
    "1g.18gb": (19, "{0..6}:1", 7),
    "1g.18gb+me": (20, "{0..6}:1", 1),
    "1g.35gb": (15, "{0,2,4,6}:2", 4),
    "2g.35gb": (14, "{0,2,4}:2", 3),
    "3g.71gb": (9, "{0,4}:4", 2),
    "4g.71gb": (5, "{0}:4", 1),
    "7g.141gb": (0, "{0}:8", 1),
}
"""As read on a real one: id, placements, maximum."""
MODELS = [entry.model for entry in Catalog.builtin().entries() if entry.geometry is not None]
CODES = (2, 3, 6, 10, 15, 18, 19, 23, 999)
MADE = "nvmlDeviceCreateGpuInstanceWithPlacement"


def only(driver: Nvml) -> GpuReading:
    (gpu,) = driver.gpus()
    assert isinstance(gpu, str)
    return driver.read(gpu)


@pytest.mark.parametrize("mig", [True, False])
def test_an_h200_is_read_as_it_is(machine_of: MachineMaker, opened: Open, mig: bool) -> None:
    gpu = only(opened(machine_of("H200-141GB", mig=mig)))
    assert {p.name: (p.id, places(p), p.maximum) for p in gpu.profiles} == H200
    assert gpu.mig is mig
    assert [p.free for p in gpu.profiles] == [p.maximum if mig else None for p in gpu.profiles]
    assert gpu.pci_device == "0x2335"


@pytest.mark.parametrize("model", MODELS)
def test_every_model_agrees_with_the_catalog(
    machine_of: MachineMaker, opened: Open, model: str
) -> None:
    finding = examine(only(opened(machine_of(model))))
    assert finding is not None
    assert finding.disagreements == ()


def test_an_instance_from_beginning_to_end(machine_of: MachineMaker, opened: Open) -> None:
    machine = machine_of()
    driver = opened(machine)
    gpu = only(driver)
    driver.create_gpu_instance(gpu.uuid, 9, 4, 4)
    (made,) = only(driver).instances
    assert (made.profile, made.start, made.size, made.compute, made.uuid) == (
        "3g.71gb", 4, 4, (), "",
    )  # fmt: skip
    at = At(gpu.uuid, made.id, 9, 4)
    driver.create_compute_instance(at)
    (whole,) = only(driver).instances
    (view,) = machine.instances()
    assert whole.uuid == view.computes[0].uuid
    assert view.computes[0].slices == 3
    machine.use_memory(0, 4, 12345)
    usage = driver.usage(gpu.uuid)
    assert usage.instances == ((whole.uuid, 12345),)
    assert usage.temperature == machine.gpus[0].temperature
    with pytest.raises(DriverError, match="IN_USE"):
        driver.destroy_gpu_instance(at)
    driver.destroy_compute_instance(at, whole.compute[0])
    driver.destroy_gpu_instance(at)
    assert machine.instances() == ()


def test_what_is_not_meant_is_not_destroyed(machine_of: MachineMaker, opened: Open) -> None:
    """The id is right, and still it is another instance: ids are given out again."""
    machine = machine_of()
    there = machine.create_instance(0, "1g.18gb", 4)
    driver = opened(machine)
    gpu = only(driver).uuid
    for wrong in (At(gpu, there.id, 19, 5), At(gpu, there.id, 15, 4)):
        for harm in (
            partial(driver.destroy_gpu_instance, wrong),
            partial(driver.destroy_compute_instance, wrong, ComputeReading(0, "")),
            partial(driver.create_compute_instance, wrong),
        ):
            with pytest.raises(DriverError, match="is not the one that was meant"):
                harm()
    assert machine.instances() == (there,)


def test_what_took_the_place_of_the_one_meant_is_not_destroyed(
    machine_of: MachineMaker, opened: Open
) -> None:
    """Same place, same profile, same ids: its UUID alone tells that somebody made it meanwhile."""
    machine = machine_of()
    machine.create_instance(0, "1g.18gb", 4)
    driver = opened(machine)
    gpu = only(driver)
    (meant,) = gpu.instances
    machine.destroy_instance(0, 4)
    foreign = machine.create_instance(0, "1g.18gb", 4)
    assert (foreign.id, foreign.computes[0].id) == (meant.id, meant.compute[0].id)
    at = At(gpu.uuid, meant.id, meant.profile_id, meant.start)
    with pytest.raises(DriverError, match=f"it is {foreign.computes[0].uuid}, not {meant.uuid}"):
        driver.destroy_compute_instance(at, meant.compute[0])
    with pytest.raises(DriverError, match="it is in use"):
        driver.destroy_gpu_instance(at)
    assert machine.instances() == (foreign,)


@pytest.mark.parametrize("unknown", [13, 25, 2])
def test_older_drivers_without_names(
    unknown: int, machine_of: MachineMaker, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer forms of functions are missing: names are made as the driver would."""
    pynvml = importlib.import_module("pynvml")
    find = pynvml._nvmlGetFunctionPointer
    newer = "nvmlDeviceGetGpuInstancePossiblePlacements_v2"

    def older_library(name: str) -> object:
        if name == newer:
            raise pynvml.NVMLError(13)
        # The fake driver has the newer form only; given an array, both do the same.
        return find(newer if name == newer.removesuffix("_v2") else name)

    for model in ("H200-141GB", "A100-80GB", "A100-40GB", "A30-24GB", "H100-80GB-SXM5"):
        machine = machine_of(model)
        machine.create_instance(0, sorted(p.name for p in _geometry(model))[0], 0)
        told = only(opened(machine))
        for function in (
            "nvmlDeviceGetGpuInstanceProfileInfoV",
            "nvmlGpuInstanceGetComputeInstanceProfileInfoV",
        ):
            machine.fail(function, unknown, times=None)
        with monkeypatch.context() as patch:
            patch.setattr(pynvml, "_nvmlGetFunctionPointer", older_library)
            older = only(opened(machine))
        assert _nameless(older) == _nameless(told)


def _nameless(gpu: GpuReading) -> GpuReading:
    # A made-up GPU has not quite the memory of a real one, from which names are made.
    profiles = tuple(replace(profile, name="") for profile in gpu.profiles)
    instances = tuple(replace(instance, profile="") for instance in gpu.instances)
    return replace(gpu, profiles=profiles, instances=instances)


@pytest.mark.parametrize(
    ("number", "slices", "memory", "name"),
    [(0, 1, 16384, "1g.18gb"), (7, 1, 16384, "1g.18gb+me"), (9, 1, 33280, "1g.35gb"),
     (1, 2, 33280, "2g.35gb"), (2, 3, 71424, "3g.71gb"), (4, 7, 143360, "7g.141gb")],
)  # fmt: skip
def test_names_are_made_as_the_driver_would(
    number: int, slices: int, memory: int, name: str
) -> None:
    info = SimpleNamespace(sliceCount=slices, memorySizeMB=memory)
    assert _name(info, number, 143771) == name


def _geometry(model: str) -> tuple[Profile, ...]:
    return Catalog.builtin().find(model).require().profiles


def test_processes_and_events_on_older_drivers(machine_of: MachineMaker, opened: Open) -> None:
    machine = machine_of(gpus=2)
    driver = opened(machine)
    gpus = [gpu.uuid for gpu in machine.gpus]
    assert driver.processes(gpus[0]) == []
    machine.fail("nvmlDeviceGetComputeRunningProcesses_v3", 15)
    with pytest.raises(DriverError, match="the GPU is lost"):
        driver.processes(gpus[0])
    assert driver.events() == []
    machine.xid(1, 48)
    machine.xid(0, 13)
    assert driver.events() == [(gpus[1], 48), (gpus[0], 13)]
    assert driver.events() == []
    machine.fail("nvmlEventSetCreate", 3, times=None)
    assert opened(machine).events() == []


def test_what_is_told_of_a_gpu_that_falls_off_the_bus(
    machine_of: MachineMaker, opened: Open, tmp_path: Path
) -> None:
    """It can no longer be asked who it is; that is known, and others' errors are heard as well."""
    machine = machine_of(gpus=2)
    first, second = (gpu.uuid for gpu in machine.gpus)
    node = Node(opened(machine), Seats(tmp_path), Health(tmp_path, "b"))
    node.look()
    machine.xid(1, 48)
    machine.lose(0)
    machine.xid(1, 95)
    node.look()
    assert "XID 79" in node.problem(first)
    assert "XID 48" in node.problem(second)
    assert "XID 95" in node.problem(second)


def test_a_driver_that_comes_back_in_another_version(
    machine_of: MachineMaker, opened: Open, tmp_path: Path
) -> None:
    machine = machine_of()
    node = Node(opened(machine), Seats(tmp_path), Health(tmp_path, "b"))
    node.look()
    machine.fail("nvmlSystemGetDriverVersion", 9)
    machine.fail("nvmlInitWithFlags", 18, times=None)
    with pytest.raises(DriverChangedError, match="different versions"):
        node.look()


def test_lists_that_do_not_fit_together_are_refused(machine_of: MachineMaker, opened: Open) -> None:
    machine = machine_of()
    machine.create_instance(0, "1g.18gb", 0)
    driver = opened(machine)
    only(driver)
    machine.fail("nvmlDeviceGetMigDeviceHandleByIndex", 6, times=None)
    with pytest.raises(DriverError, match="do not fit together"):
        only(driver)
    machine.heal()
    machine.fail("nvmlDeviceGetMigMode", 3)
    with pytest.raises(DriverError, match="NOT_SUPPORTED"):
        only(driver)
    assert len(only(driver).instances) == 1


def test_mig_mode_is_switched(machine_of: MachineMaker, opened: Open) -> None:
    hopper = machine_of("H200-141GB", mig=False)
    driver = opened(hopper)
    driver.enable_mig(hopper.gpus[0].uuid)
    assert only(driver).mig is True
    busy = machine_of("H200-141GB", mig=False)
    driver = opened(busy)
    busy.fail("nvmlDeviceSetMigMode", 19)
    with pytest.raises(DriverError, match="it is in use"):
        driver.enable_mig(busy.gpus[0].uuid)


def test_a_gpu_without_mig_says_so(machine_of: MachineMaker, opened: Open) -> None:
    machine = machine_of(gpus=2)
    machine.fail("nvmlDeviceGetMigMode", 3, times=None)
    text = discover(opened(machine), as_json=False)
    assert text.count("does not support MIG") == 2
    assert "profile" not in text


def test_without_a_driver_there_is_one_line() -> None:
    for words in (["--discover"], ["--discover", "--json"]):
        done = subprocess.run(
            [sys.executable, "-m", "slicewise.agent", *words],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith("slicewise: error: libnvidia-ml.so.1 is not installed")
        assert done.stderr.count("\n") == 1


class Life:
    """An agent's work on the fake driver, with a clock of its own; restarted when it must be."""

    def __init__(self, folder: Path, machine: Machine, opened: Open) -> None:
        self.folder, self.machine, self.opened = folder, machine, opened
        folder.mkdir()
        self.office = Office()
        self.now = 0.0
        self.starts = 0
        self.carrier: Carrier | None = None
        self.driver: Nvml | None = None

    def turn(self) -> None:
        try:
            if self.carrier is None:
                self.starts += 1
                self.driver = self.opened(self.machine)
                node = Node(self.driver, Seats(self.folder), Health(self.folder, "b"))
                self.carrier = Carrier(
                    node, Record(self.folder, "b"), None, lambda: self.now, random.Random(2)
                )
            self.carrier.take(self.office.desired())
            self.carrier.node.look()
            self.carrier.node.measure()
            self.carrier.round(True)
            self.office.hear(report(self.carrier.node, self.carrier))
        except (DriverError, DriverChangedError):
            # The process ends, and systemd starts another one.
            if self.driver is not None:
                self.driver.close()
            self.carrier = None
        self.now += 70.0

    def go(self) -> None:
        """A life beside a stranger's instance: made, there, released, gone."""
        gpu = self.machine.gpus[0].uuid
        self.office.place("a", gpu, "2g.35gb", 4, 2)
        for _ in range(20):
            self.turn()
            if self.office.wanted["a", 0].uuid:
                break
        (made,) = [i for i in self.machine.instances() if i.start == 4]
        assert self.office.wanted["a", 0].uuid == made.computes[0].uuid
        self.office.release("a")
        for _ in range(20):
            self.turn()
            if not self.office.wanted:
                break
        assert ("a", 0) in self.office.released


def test_every_function_fails_with_several_codes(
    machine_of: MachineMaker, opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the driver answers once, the instance is made, and goes; a stranger's stays."""
    monkeypatch.setattr("os.fsync", lambda file: None)
    calm = machine_of()
    stranger = calm.create_instance(0, "1g.18gb", 1)
    calm.forget_calls()
    Life(tmp_path / "calm", calm, opened).go()
    assert calm.instances() == (stranger,)
    used = {name: count for name, count in calm.calls().items() if count}
    changing = [name for name in used if "Destroy" in name or "Create" in name]
    assert len(changing) >= 4
    struck = tried = 0
    machine = machine_of()
    machine.create_instance(0, "1g.18gb", 1)
    kept = machine.instances()
    for name, count in sorted(used.items()):
        for number, code in enumerate(CODES):
            for done in (False, True) if name in changing and number % 3 == 0 else (False,):
                fault = machine.fail(name, code, after=(number * 5) % count, done=done)
                life = Life(tmp_path / f"life-{tried}", machine, opened)
                life.go()
                assert machine.instances() == kept, f"{name} answered {code}"
                struck += machine.struck(fault)
                machine.heal()
                tried += 1
    print(f"{len(used)} functions, {tried} lives with a fault, {struck} faults struck")
    assert struck > 0.8 * tried
