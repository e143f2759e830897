"""Hardware events: temperature, memory errors, XIDs, lost GPUs, reboots."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tests.fakedriver.driver import INVALID_ARGUMENT, NOT_SUPPORTED, attached, code, create, run

from slicewise.core.errors import SlicewiseError
from slicewise.fakedriver import Machine

TIMEOUT = 10
LOST = 15
XID = 8


@pytest.fixture
def events(nvml: Any) -> Any:
    """An event set registered for XIDs of both GPUs."""
    made = nvml.nvmlEventSetCreate()
    for index in range(2):
        nvml.nvmlDeviceRegisterEvents(nvml.nvmlDeviceGetHandleByIndex(index), XID, made)
    yield made
    nvml.nvmlEventSetFree(made)


def test_temperature_and_memory_errors(machine: Machine, gpu: Any, nvml: Any) -> None:
    machine.set_temperature(0, 91)
    assert nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU) == 91
    assert nvml.nvmlDeviceGetTemperatureV(gpu, nvml.NVML_TEMPERATURE_GPU) == 91
    machine.add_ecc(0, uncorrected=2, corrected=5)
    machine.add_ecc(0, uncorrected=1)
    count = nvml.nvmlDeviceGetTotalEccErrors
    assert [count(gpu, kind, counter) for kind in (0, 1) for counter in (0, 1)] == [5, 5, 3, 3]
    machine.reboot()
    assert [count(gpu, kind, counter) for kind in (0, 1) for counter in (0, 1)] == [0, 5, 0, 3]


def test_every_event_set_gets_xids_in_order(machine: Machine, events: Any, nvml: Any) -> None:
    other = nvml.nvmlEventSetCreate()
    machine.xid(0, 13)  # before the other set is registered
    nvml.nvmlDeviceRegisterEvents(nvml.nvmlDeviceGetHandleByIndex(0), XID, other)
    machine.create_instance(1, "2g.35gb", 4)
    machine.xid(1, 43, start=4)
    machine.xid(0, 48)
    seen = [nvml.nvmlEventSetWait_v2(events, 0) for _ in range(3)]
    assert [(event.eventType, event.eventData) for event in seen] == [(8, 13), (8, 43), (8, 48)]
    uuids = [nvml.nvmlDeviceGetUUID(event.device) for event in seen]
    assert uuids == [machine.gpus[gpu].uuid for gpu in (0, 1, 0)]
    no_instance = 0xFFFFFFFF
    assert [(e.gpuInstanceId, e.computeInstanceId) for e in seen] == [
        (no_instance, no_instance),
        (machine.instances(1)[0].id, 0),
        (no_instance, no_instance),
    ]
    assert code(nvml.nvmlEventSetWait_v2, events, 0) == TIMEOUT
    assert nvml.nvmlEventSetWait_v2(other, 0).eventData == 48
    assert code(nvml.nvmlEventSetWait_v2, other, 1) == TIMEOUT
    nvml.nvmlEventSetFree(other)
    assert code(nvml.nvmlEventSetFree, other) == INVALID_ARGUMENT


def test_event_ends_a_wait(machine: Machine, events: Any, nvml: Any) -> None:
    heard: list[int] = []
    waiting = Thread(
        target=lambda: heard.append(nvml.nvmlEventSetWait_v2(events, 600_000).eventData)
    )
    waiting.start()
    while not machine.calls()["nvmlEventSetWait_v2"]:
        pass
    machine.xid(1, 94)
    waiting.join()
    assert heard == [94]


def test_latest_events_are_kept(machine: Machine, events: Any, nvml: Any) -> None:
    for number in range(100):
        machine.xid(0, number + 1)
    heard = []
    while not code(lambda: heard.append(nvml.nvmlEventSetWait_v2(events, 0).eventData)):
        pass
    assert heard == list(range(37, 101))


def test_only_supported_events_can_be_registered(
    machine: Machine, events: Any, gpu: Any, nvml: Any
) -> None:
    assert nvml.nvmlDeviceGetSupportedEventTypes(gpu) & XID
    assert code(nvml.nvmlDeviceRegisterEvents, gpu, 0x20, events) == NOT_SUPPORTED
    machine.create_instance(0, "1g.18gb", 0)
    mig = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)
    assert code(nvml.nvmlDeviceRegisterEvents, mig, XID, events) == NOT_SUPPORTED
    machine.add_ecc(0, uncorrected=1)  # not registered
    assert code(nvml.nvmlEventSetWait_v2, events, 0) == TIMEOUT
    nvml.nvmlDeviceRegisterEvents(gpu, nvml.nvmlEventTypeDoubleBitEccError, events)
    machine.add_ecc(0, uncorrected=1)
    assert nvml.nvmlEventSetWait_v2(events, 0).eventType == nvml.nvmlEventTypeDoubleBitEccError


def test_calls_for_a_lost_gpu_fail(machine: Machine, events: Any, nvml: Any) -> None:
    machine.create_instance(0, "3g.71gb", 0)
    lost, well = (nvml.nvmlDeviceGetHandleByIndex(index) for index in range(2))
    mig = nvml.nvmlDeviceGetMigDeviceHandleByIndex(lost, 0)
    instance = nvml.nvmlDeviceGetGpuInstanceById(lost, machine.instances()[0].id)
    machine.lose(0)
    for question in (nvml.nvmlDeviceGetUUID, nvml.nvmlDeviceGetMigMode, nvml.nvmlDeviceGetName):
        assert code(question, lost) == LOST
    assert code(nvml.nvmlDeviceGetUUID, mig) == LOST
    assert code(nvml.nvmlGpuInstanceDestroy, instance) == LOST
    assert code(nvml.nvmlDeviceGetHandleByIndex, 0) == LOST
    assert code(nvml.nvmlDeviceGetHandleByUUID, machine.gpus[0].uuid) == LOST
    assert nvml.nvmlDeviceGetCount() == 2
    assert nvml.nvmlDeviceGetUUID(well) == machine.gpus[1].uuid
    assert nvml.nvmlEventSetWait_v2(events, 0).eventData == 79
    assert code(nvml.nvmlEventSetWait_v2, events, 0) == LOST
    machine.restore(0)
    assert nvml.nvmlDeviceGetUUID(lost) == machine.gpus[0].uuid
    assert machine.instances() == ()
    assert code(nvml.nvmlGpuInstanceDestroy, instance) == INVALID_ARGUMENT


def test_removed_gpu_is_missing_for_new_processes(
    machine: Machine, gpu: Any, nvml: Any, library: Path
) -> None:
    second = machine.gpus[1].uuid
    machine.remove(0)
    assert nvml.nvmlDeviceGetCount() == 2
    assert code(nvml.nvmlDeviceGetUUID, gpu) == LOST
    program = """
assert nvml.nvmlDeviceGetCount() == 1
device = nvml.nvmlDeviceGetHandleByIndex(0)
assert nvml.nvmlDeviceGetUUID(device) == sys.argv[1]
assert nvml.nvmlDeviceGetIndex(device) == 0
try: nvml.nvmlDeviceGetHandleByUUID(sys.argv[2])
except nvml.NVMLError_NotFound: pass
else: sys.exit("found")
"""
    assert run(machine, library, program, second, machine.gpus[0].uuid) == 0
    machine.restore(0)
    assert run(machine, library, "assert nvml.nvmlDeviceGetCount() == 2") == 0


@pytest.mark.parametrize(
    ("model", "stays"), [("A100-80GB", True), ("H200", False), ("B200", False)]
)
def test_reboot(model: str, stays: bool, make: Callable[..., Machine], library: Path) -> None:
    machine = make(model, 2)
    first = machine.boot_id
    assert machine.boot_id_file.read_text() == f"{first}\n"
    with attached(machine, library) as nvml:
        device = nvml.nvmlDeviceGetHandleByIndex(0)
        instance = create(device, 19, 0, 1)
        machine.reboot()
        assert machine.boot_id != first
        assert machine.boot_id_file.read_text() == f"{machine.boot_id}\n"
        assert machine.instances() == ()
        assert code(nvml.nvmlGpuInstanceGetInfo, instance) == INVALID_ARGUMENT
        assert nvml.nvmlDeviceGetMigMode(device) == [stays, stays]
    third = machine.boot_id
    machine.reboot()
    assert machine.boot_id not in {first, third}


def test_reboot_applies_pending_mig_mode(make: Callable[..., Machine], library: Path) -> None:
    machine = make("A30", mig=False)
    with attached(machine, library) as nvml:
        assert nvml.nvmlDeviceSetMigMode(nvml.nvmlDeviceGetHandleByIndex(0), 1) == 16
    machine.reboot()
    assert (machine.gpus[0].mig, machine.gpus[0].mig_pending) == (True, True)


def test_machine_objects_share_state(machine: Machine) -> None:
    other = Machine(machine.path)
    machine.create_instance(1, "4g.71gb", 0)
    assert other.instances() == machine.instances()
    assert [(i.gpu, i.profile, i.start, i.size) for i in other.instances()] == [
        (1, "4g.71gb", 0, 4)
    ]
    assert str(machine.path) in repr(machine)
    with pytest.raises(SlicewiseError, match="no instance starts at slice 0"):
        machine.set_busy(0, 0)
    assert other.gpus == machine.gpus
