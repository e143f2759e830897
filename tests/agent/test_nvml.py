"""The NVML driver: readings, checks before destroying, older drivers, failing calls."""

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
from tests.agent.simulated import ServiceState

from slicewise.agent.discovery import discover, format_placements, identify
from slicewise.agent.driver import ComputeReading, DriverError, GpuReading, InstanceRef
from slicewise.agent.health import Health
from slicewise.agent.node_state import DriverChangedError, GpuIndex, NodeState
from slicewise.agent.nvml import Nvml, profile_name
from slicewise.agent.reconciler import Reconciler
from slicewise.agent.record import Record
from slicewise.agent.reports import report
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
"""Read from a real H200: id, placements, maximum."""
MODELS = [entry.model for entry in Catalog.builtin().entries() if entry.geometry is not None]
CODES = (2, 3, 6, 10, 15, 18, 19, 23, 999)
MADE = "nvmlDeviceCreateGpuInstanceWithPlacement"


def only(driver: Nvml) -> GpuReading:
    (gpu,) = driver.gpus()
    assert isinstance(gpu, str)
    return driver.read(gpu)


@pytest.mark.parametrize("mig", [True, False])
def test_reading_of_an_h200(machine_of: MachineMaker, opened: Open, mig: bool) -> None:
    gpu = only(opened(machine_of("H200-141GB", mig=mig)))
    assert {p.name: (p.id, format_placements(p), p.maximum) for p in gpu.profiles} == H200
    assert gpu.mig is mig
    assert [p.free for p in gpu.profiles] == [p.maximum if mig else None for p in gpu.profiles]
    assert gpu.pci_device == "0x2335"


@pytest.mark.parametrize("model", MODELS)
def test_every_model_matches_the_catalog(
    machine_of: MachineMaker, opened: Open, model: str
) -> None:
    found = identify(only(opened(machine_of(model))))
    assert found is not None
    assert found.differences == ()


def test_lifecycle_of_an_instance(machine_of: MachineMaker, opened: Open) -> None:
    machine = machine_of()
    driver = opened(machine)
    gpu = only(driver)
    driver.create_gpu_instance(gpu.uuid, 9, 4, 4)
    (made,) = only(driver).instances
    assert (made.profile, made.start, made.size, made.compute, made.uuid) == (
        "3g.71gb", 4, 4, (), "",
    )  # fmt: skip
    at = InstanceRef(gpu.uuid, made.id, 9, 4)
    driver.create_compute_instance(at)
    (whole,) = only(driver).instances
    (view,) = machine.instances()
    assert whole.uuid == view.computes[0].uuid
    assert view.computes[0].slices == 3
    machine.set_memory_used(0, 4, 12345)
    usage = driver.usage(gpu.uuid)
    assert usage.instances == ((whole.uuid, 12345),)
    assert usage.temperature == machine.gpus[0].temperature
    with pytest.raises(DriverError, match="IN_USE"):
        driver.destroy_gpu_instance(at)
    driver.destroy_compute_instance(at, whole.compute[0])
    driver.destroy_gpu_instance(at)
    assert machine.instances() == ()


def test_reused_id_is_not_destroyed(machine_of: MachineMaker, opened: Open) -> None:
    """The id matches, but profile or start differ: the driver reuses ids."""
    machine = machine_of()
    instance = machine.create_instance(0, "1g.18gb", 4)
    driver = opened(machine)
    gpu = only(driver).uuid
    for wrong in (InstanceRef(gpu, instance.id, 19, 5), InstanceRef(gpu, instance.id, 15, 4)):
        for harm in (
            partial(driver.destroy_gpu_instance, wrong),
            partial(driver.destroy_compute_instance, wrong, ComputeReading(0, "")),
            partial(driver.create_compute_instance, wrong),
        ):
            with pytest.raises(DriverError, match="is not the expected one"):
                harm()
    assert machine.instances() == (instance,)


def test_replaced_instance_is_not_destroyed(machine_of: MachineMaker, opened: Open) -> None:
    """Only the UUID shows that another program recreated the instance with the same ids."""
    machine = machine_of()
    machine.create_instance(0, "1g.18gb", 4)
    driver = opened(machine)
    gpu = only(driver)
    (meant,) = gpu.instances
    machine.destroy_instance(0, 4)
    foreign = machine.create_instance(0, "1g.18gb", 4)
    assert (foreign.id, foreign.computes[0].id) == (meant.id, meant.compute[0].id)
    at = InstanceRef(gpu.uuid, meant.id, meant.profile_id, meant.start)
    with pytest.raises(DriverError, match=f"it is {foreign.computes[0].uuid}, not {meant.uuid}"):
        driver.destroy_compute_instance(at, meant.compute[0])
    with pytest.raises(DriverError, match="it is in use"):
        driver.destroy_gpu_instance(at)
    assert machine.instances() == (foreign,)


@pytest.mark.parametrize("unknown", [13, 25, 2])
def test_older_drivers_without_names(
    unknown: int, machine_of: MachineMaker, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the newer variants of functions, names are derived as the driver does."""
    pynvml = importlib.import_module("pynvml")
    find = pynvml._nvmlGetFunctionPointer
    newer = "nvmlDeviceGetGpuInstancePossiblePlacements_v2"

    def older_library(name: str) -> object:
        if name == newer:
            raise pynvml.NVMLError(13)
        # The fake driver has only the newer variant; given an array, both do the same.
        return find(newer if name == newer.removesuffix("_v2") else name)

    for model in ("H200-141GB", "A100-80GB", "A100-40GB", "A30-24GB", "H100-80GB-SXM5"):
        machine = machine_of(model)
        machine.create_instance(0, sorted(p.name for p in _geometry(model))[0], 0)
        newer_reading = only(opened(machine))
        for function in (
            "nvmlDeviceGetGpuInstanceProfileInfoV",
            "nvmlGpuInstanceGetComputeInstanceProfileInfoV",
        ):
            machine.fail(function, unknown, times=None)
        with monkeypatch.context() as patch:
            patch.setattr(pynvml, "_nvmlGetFunctionPointer", older_library)
            older = only(opened(machine))
        assert _nameless(older) == _nameless(newer_reading)


def _nameless(gpu: GpuReading) -> GpuReading:
    # Names derive from the memory, which differs slightly from that of a real GPU.
    profiles = tuple(replace(profile, name="") for profile in gpu.profiles)
    instances = tuple(replace(instance, profile="") for instance in gpu.instances)
    return replace(gpu, profiles=profiles, instances=instances)


@pytest.mark.parametrize(
    ("number", "slices", "memory", "name"),
    [(0, 1, 16384, "1g.18gb"), (7, 1, 16384, "1g.18gb+me"), (9, 1, 33280, "1g.35gb"),
     (1, 2, 33280, "2g.35gb"), (2, 3, 71424, "3g.71gb"), (4, 7, 143360, "7g.141gb")],
)  # fmt: skip
def test_derived_profile_names(number: int, slices: int, memory: int, name: str) -> None:
    info = SimpleNamespace(sliceCount=slices, memorySizeMB=memory)
    assert profile_name(info, number, 143771) == name


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


def test_events_of_a_lost_gpu(machine_of: MachineMaker, opened: Open, tmp_path: Path) -> None:
    """The lost GPU no longer reports its UUID; its events and those of others still count."""
    machine = machine_of(gpus=2)
    first, second = (gpu.uuid for gpu in machine.gpus)
    node = NodeState(opened(machine), GpuIndex(tmp_path), Health(tmp_path, "b"))
    node.refresh()
    machine.xid(1, 48)
    machine.lose(0)
    machine.xid(1, 95)
    node.refresh()
    assert "XID 79" in node.problem(first)
    assert "XID 48" in node.problem(second)
    assert "XID 95" in node.problem(second)


def test_driver_replaced_by_another_version(
    machine_of: MachineMaker, opened: Open, tmp_path: Path
) -> None:
    machine = machine_of()
    node = NodeState(opened(machine), GpuIndex(tmp_path), Health(tmp_path, "b"))
    node.refresh()
    machine.fail("nvmlSystemGetDriverVersion", 9)
    machine.fail("nvmlInitWithFlags", 18, times=None)
    with pytest.raises(DriverChangedError, match="different versions"):
        node.refresh()


def test_contradicting_lists_are_rejected(machine_of: MachineMaker, opened: Open) -> None:
    machine = machine_of()
    machine.create_instance(0, "1g.18gb", 0)
    driver = opened(machine)
    only(driver)
    machine.fail("nvmlDeviceGetMigDeviceHandleByIndex", 6, times=None)
    with pytest.raises(DriverError, match="contradict each other"):
        only(driver)
    machine.clear_faults()
    machine.fail("nvmlDeviceGetMigMode", 3)
    with pytest.raises(DriverError, match="NOT_SUPPORTED"):
        only(driver)
    assert len(only(driver).instances) == 1


def test_enable_mig(machine_of: MachineMaker, opened: Open) -> None:
    hopper = machine_of("H200-141GB", mig=False)
    driver = opened(hopper)
    driver.enable_mig(hopper.gpus[0].uuid)
    assert only(driver).mig is True
    busy = machine_of("H200-141GB", mig=False)
    driver = opened(busy)
    busy.fail("nvmlDeviceSetMigMode", 19)
    with pytest.raises(DriverError, match="it is in use"):
        driver.enable_mig(busy.gpus[0].uuid)


def test_gpu_without_mig(machine_of: MachineMaker, opened: Open) -> None:
    machine = machine_of(gpus=2)
    machine.fail("nvmlDeviceGetMigMode", 3, times=None)
    text = discover(opened(machine), as_json=False)
    assert text.count("does not support MIG") == 2
    assert "profile" not in text


def test_missing_driver_is_reported_in_one_line() -> None:
    for words in (["--discover"], ["--discover", "--json"]):
        done = subprocess.run(
            [sys.executable, "-m", "slicewise.agent", *words],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith("slicewise: error: libnvidia-ml.so.1 is not installed")
        assert done.stderr.count("\n") == 1


class AgentOnFakeDriver:
    """A reconciler on the fake driver with a simulated clock; restarted when it must be."""

    def __init__(self, folder: Path, machine: Machine, opened: Open) -> None:
        self.folder, self.machine, self.opened = folder, machine, opened
        folder.mkdir()
        self.service = ServiceState()
        self.now = 0.0
        self.starts = 0
        self.reconciler: Reconciler | None = None
        self.driver: Nvml | None = None

    def step(self) -> None:
        try:
            if self.reconciler is None:
                self.starts += 1
                self.driver = self.opened(self.machine)
                node = NodeState(self.driver, GpuIndex(self.folder), Health(self.folder, "b"))
                self.reconciler = Reconciler(
                    node, Record(self.folder, "b"), None, lambda: self.now, random.Random(2)
                )
            self.reconciler.set_desired(self.service.desired())
            self.reconciler.node.refresh()
            self.reconciler.node.read_usage()
            self.reconciler.reconcile(True)
            self.service.receive_report(report(self.reconciler.node, self.reconciler))
        except (DriverError, DriverChangedError):
            # The agent exits, and systemd restarts it.
            if self.driver is not None:
                self.driver.close()
            self.reconciler = None
        self.now += 70.0

    def create_and_release(self) -> None:
        """Create and release an instance."""
        gpu = self.machine.gpus[0].uuid
        self.service.place("a", gpu, "2g.35gb", 4, 2)
        for _ in range(20):
            self.step()
            if self.service.instances["a", 0].uuid:
                break
        (made,) = [i for i in self.machine.instances() if i.start == 4]
        assert self.service.instances["a", 0].uuid == made.computes[0].uuid
        self.service.release("a")
        for _ in range(20):
            self.step()
            if not self.service.instances:
                break
        assert ("a", 0) in self.service.released


def test_every_function_fails_with_several_codes(
    machine_of: MachineMaker, opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever call fails once, the instance is created and destroyed; a foreign one stays."""
    monkeypatch.setattr("os.fsync", lambda file: None)
    calm = machine_of()
    foreign = calm.create_instance(0, "1g.18gb", 1)
    calm.reset_calls()
    AgentOnFakeDriver(tmp_path / "calm", calm, opened).create_and_release()
    assert calm.instances() == (foreign,)
    used = {name: count for name, count in calm.calls().items() if count}
    changing = [name for name in used if "Destroy" in name or "Create" in name]
    assert len(changing) >= 4
    applied = tried = 0
    machine = machine_of()
    machine.create_instance(0, "1g.18gb", 1)
    kept = machine.instances()
    for name, count in sorted(used.items()):
        for number, code in enumerate(CODES):
            for done in (False, True) if name in changing and number % 3 == 0 else (False,):
                fault = machine.fail(name, code, after=(number * 5) % count, done=done)
                agent = AgentOnFakeDriver(tmp_path / f"agent-{tried}", machine, opened)
                agent.create_and_release()
                assert machine.instances() == kept, f"{name} answered {code}"
                applied += machine.hits(fault)
                machine.clear_faults()
                tried += 1
    print(f"{len(used)} functions, {tried} runs with a fault, {applied} faults applied")
    assert applied > 0.8 * tried
