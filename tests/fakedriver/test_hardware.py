"""What happens to hardware: heat, memory errors, XIDs, GPUs that vanish, reboots."""

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
    """An event set that listens for XIDs of both GPUs."""
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


def test_xids_are_told_in_order_to_every_listener(machine: Machine, events: Any, nvml: Any) -> None:
    other = nvml.nvmlEventSetCreate()
    machine.xid(0, 13)  # before the other listens
    nvml.nvmlDeviceRegisterEvents(nvml.nvmlDeviceGetHandleByIndex(0), XID, other)
    machine.create_instance(1, "2g.35gb", 4)
    machine.xid(1, 43, start=4)
    machine.xid(0, 48)
    seen = [nvml.nvmlEventSetWait_v2(events, 0) for _ in range(3)]
    assert [(event.eventType, event.eventData) for event in seen] == [(8, 13), (8, 43), (8, 48)]
    uuids = [nvml.nvmlDeviceGetUUID(event.device) for event in seen]
    assert uuids == [machine.gpus[gpu].uuid for gpu in (0, 1, 0)]
    nobody = 0xFFFFFFFF
    assert [(e.gpuInstanceId, e.computeInstanceId) for e in seen] == [
        (nobody, nobody),
        (machine.instances(1)[0].id, 0),
        (nobody, nobody),
    ]
    assert code(nvml.nvmlEventSetWait_v2, events, 0) == TIMEOUT
    assert nvml.nvmlEventSetWait_v2(other, 0).eventData == 48
    assert code(nvml.nvmlEventSetWait_v2, other, 1) == TIMEOUT
    nvml.nvmlEventSetFree(other)
    assert code(nvml.nvmlEventSetFree, other) == INVALID_ARGUMENT


def test_a_listener_that_waits_is_woken(machine: Machine, events: Any, nvml: Any) -> None:
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


def test_of_very_many_events_the_latest_are_kept(machine: Machine, events: Any, nvml: Any) -> None:
    for number in range(100):
        machine.xid(0, number + 1)
    heard = []
    while not code(lambda: heard.append(nvml.nvmlEventSetWait_v2(events, 0).eventData)):
        pass
    assert heard == list(range(37, 101))


def test_only_what_is_supported_can_be_listened_for(
    machine: Machine, events: Any, gpu: Any, nvml: Any
) -> None:
    assert nvml.nvmlDeviceGetSupportedEventTypes(gpu) & XID
    assert code(nvml.nvmlDeviceRegisterEvents, gpu, 0x20, events) == NOT_SUPPORTED
    machine.create_instance(0, "1g.18gb", 0)
    mig = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)
    assert code(nvml.nvmlDeviceRegisterEvents, mig, XID, events) == NOT_SUPPORTED
    machine.add_ecc(0, uncorrected=1)  # nobody listens for it
    assert code(nvml.nvmlEventSetWait_v2, events, 0) == TIMEOUT
    nvml.nvmlDeviceRegisterEvents(gpu, nvml.nvmlEventTypeDoubleBitEccError, events)
    machine.add_ecc(0, uncorrected=1)
    assert nvml.nvmlEventSetWait_v2(events, 0).eventType == nvml.nvmlEventTypeDoubleBitEccError


def test_a_gpu_that_falls_off_the_bus_answers_nothing(
    machine: Machine, events: Any, nvml: Any
) -> None:
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


def test_a_removed_gpu_is_gone_for_those_who_start_later(
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
def test_a_reboot(model: str, stays: bool, make: Callable[..., Machine], library: Path) -> None:
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


def test_a_mode_that_waits_for_a_reset_comes_with_the_reboot(
    make: Callable[..., Machine], library: Path
) -> None:
    machine = make("A30", mig=False)
    with attached(machine, library) as nvml:
        assert nvml.nvmlDeviceSetMigMode(nvml.nvmlDeviceGetHandleByIndex(0), 1) == 16
    machine.reboot()
    assert (machine.gpus[0].mig, machine.gpus[0].mig_pending) == (True, True)


def test_several_holds_on_one_machine_see_the_same(machine: Machine) -> None:
    other = Machine(machine.path)
    machine.create_instance(1, "4g.71gb", 0)
    assert other.instances() == machine.instances()
    assert [(i.gpu, i.profile, i.start, i.size) for i in other.instances()] == [
        (1, "4g.71gb", 0, 4)
    ]
    assert str(machine.path) in repr(machine)
    with pytest.raises(SlicewiseError, match="no instance starts at slice 0"):
        machine.busy(0, 0)
    assert other.gpus == machine.gpus
