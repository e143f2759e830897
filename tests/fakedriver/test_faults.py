"""Fault injection: errors, delays and kills in every function."""

from __future__ import annotations

import ctypes
import signal
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tests.fakedriver.driver import Direct, code, create, found_on, run

from slicewise.core.errors import SlicewiseError, UnknownNameError
from slicewise.fakedriver import Machine
from slicewise.fakedriver.library import functions

CODES = (1, 2, 3, 4, 6, 7, 9, 10, 15, 16, 19, 20, 23, 25, 29, 999)


@pytest.mark.parametrize("function", functions())
def test_every_function_fails_on_demand(function: str, machine: Machine, library: Path) -> None:
    with Direct(machine, library) as driver:
        call = getattr(driver.c, function)
        before = machine.calls()[function]
        for number in CODES:
            fault = machine.fail(function, number, times=2)
            # Arguments do not matter: the fault applies first.
            assert [call(None, None, None, None, None) for _ in range(2)] == [number] * 2
            assert machine.hits(fault) == 2
            machine.clear_faults()
        assert machine.calls()[function] == before + 2 * len(CODES)
        assert machine.instances() == ()


def test_fault_after_and_times(machine: Machine, gpu: Any, nvml: Any) -> None:
    fault = machine.fail("nvmlDeviceGetTemperature", 999, after=2, times=3)
    answers = [code(nvml.nvmlDeviceGetTemperature, gpu, 0) for _ in range(7)]
    assert answers == [0, 0, 999, 999, 999, 0, 0]
    assert machine.hits(fault) == 3
    for_ever = machine.fail("nvmlDeviceGetTemperature", 15, times=None)
    assert {code(nvml.nvmlDeviceGetTemperature, gpu, 0) for _ in range(20)} == {15}
    assert machine.hits(for_ever) == 20
    machine.clear_faults()
    assert code(nvml.nvmlDeviceGetTemperature, gpu, 0) == 0


def test_fault_of_one_gpu_does_not_affect_another(machine: Machine, nvml: Any) -> None:
    devices = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(2)]
    machine.fail("nvmlDeviceGetMigMode", 999, times=None, gpu=machine.gpus[1].uuid)
    assert [code(nvml.nvmlDeviceGetMigMode, device) for device in devices] == [0, 999]
    machine.fail("nvmlDeviceGetHandleByUUID", 4, times=None, gpu=0)
    machine.fail("nvmlDeviceGetHandleByIndex_v2", 4, times=None, gpu=1)
    uuids = [gpu.uuid for gpu in machine.gpus]
    assert [code(nvml.nvmlDeviceGetHandleByUUID, uuid) for uuid in uuids] == [4, 0]
    assert [code(nvml.nvmlDeviceGetHandleByIndex, index) for index in range(2)] == [0, 4]


def test_fault_in_the_nth_call_of_any_function(machine: Machine, gpu: Any, nvml: Any) -> None:
    machine.fail("*", 999, after=2)
    answers = [
        code(nvml.nvmlDeviceGetMigMode, gpu),
        code(nvml.nvmlDeviceGetTemperature, gpu, 0),
        code(nvml.nvmlDeviceGetCount),
        code(nvml.nvmlDeviceGetCount),
    ]
    assert answers == [0, 0, 999, 0]


def test_failed_call_has_no_effect_unless_done(machine: Machine, gpu: Any, nvml: Any) -> None:
    name = "nvmlDeviceCreateGpuInstanceWithPlacement"
    machine.fail(name, 999)
    assert code(create, gpu, 19, 0, 1) == 999
    assert found_on(gpu) == set()
    machine.fail(name, 10, done=True)
    assert code(create, gpu, 19, 0, 1) == 10
    assert found_on(gpu) == {("1g.18gb", 0, 1)}
    # A call that fails anyway returns its own error.
    machine.fail(name, 10, done=True)
    assert code(create, gpu, 19, 0, 1) == 23


def test_init_can_fail_and_be_retried(machine: Machine, library: Path) -> None:
    with Direct(machine, library):
        pass
    machine.fail("nvmlInit_v2", 9)
    with pytest.raises(AssertionError), Direct(machine, library):
        pass
    machine.fail("nvmlInit_v2", 999, done=True)
    with pytest.raises(AssertionError), Direct(machine, library):
        pass
    with Direct(machine, library) as driver:
        assert driver.c.nvmlShutdown() == 0
        assert driver.c.nvmlShutdown() == 1  # no attachment was left
        assert driver.c.nvmlInit_v2() == 0


def test_slow_call_does_not_block_others(machine: Machine, gpu: Any, nvml: Any) -> None:
    machine.delay("nvmlDeviceGetTemperature", 60_000, times=1)
    slow = Thread(target=code, args=(nvml.nvmlDeviceGetTemperature, gpu, 0), daemon=True)
    slow.start()
    while not machine.calls()["nvmlDeviceGetTemperature"]:
        pass
    # The first call sleeps for a minute; these would block if it kept the lock.
    assert nvml.nvmlDeviceGetTemperature(gpu, 0) == 34
    create(gpu, 19, 0, 1)
    machine.set_temperature(0, 50)
    assert slow.is_alive()


def test_delay(machine: Machine, gpu: Any, nvml: Any) -> None:
    fault = machine.delay("nvmlDeviceGetTemperature", 1, times=3)
    assert [nvml.nvmlDeviceGetTemperature(gpu, 0) for _ in range(5)] == [34] * 5
    assert machine.hits(fault) == 3


MAKE = """
import ctypes
gpu = nvml.nvmlDeviceGetHandleByIndex(0)
place = nvml.c_nvmlGpuInstancePlacement_t(4, 4)
nvml.nvmlDeviceGetTemperature(gpu, 0)
instance = nvml.nvmlDeviceCreateGpuInstanceWithPlacement(gpu, 9, ctypes.byref(place))
compute = nvml.nvmlGpuInstanceCreateComputeInstance(instance, 2)
nvml.nvmlComputeInstanceDestroy(compute)
nvml.nvmlGpuInstanceDestroy(instance)
"""
MADE = ((), ("GPU instance",), ("GPU instance", "compute instance"))
STEPS = (
    ("nvmlDeviceCreateGpuInstanceWithPlacement", MADE[0], MADE[1]),
    ("nvmlGpuInstanceCreateComputeInstance", MADE[1], MADE[2]),
    ("nvmlComputeInstanceDestroy", MADE[2], MADE[1]),
    ("nvmlGpuInstanceDestroy", MADE[1], MADE[0]),
)


@pytest.mark.parametrize(("function", "before", "after"), STEPS, ids=lambda v: str(v)[:40])
@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_killed_process_leaves_the_state_before_or_after_its_call(
    function: str,
    before: tuple[str, ...],
    after: tuple[str, ...],
    moment: str,
    machine: Machine,
    library: Path,
) -> None:
    machine.kill(function, moment)
    assert run(machine, library, MAKE) == -signal.SIGKILL
    there = [
        what
        for view in machine.instances()
        for what in ("GPU instance", *("compute instance" for _ in view.computes))
    ]
    assert tuple(there) == (after if moment == "after" else before)
    # The machine still works: the lock was released, and the instances can be destroyed.
    with Direct(machine, library) as driver:
        if not there:
            assert driver.create(0, 9, 4, 4)[0] == 0
    machine.destroy_instance(0, 4)
    assert run(machine, library, MAKE) == 0
    assert machine.instances() == ()


def test_kill_in_the_nth_call(machine: Machine, library: Path) -> None:
    program = "for _ in range(9): nvml.nvmlDeviceGetCount()"
    machine.kill("nvmlDeviceGetCount_v2", after=5)
    assert run(machine, library, program) == -signal.SIGKILL
    assert machine.calls()["nvmlDeviceGetCount_v2"] == 6
    assert run(machine, library, program) == 0  # the fault applies once


def test_calls_of_all_processes_are_counted(machine: Machine, library: Path) -> None:
    for _ in range(3):
        assert run(machine, library, "nvml.nvmlDeviceGetCount()") == 0
    calls = machine.calls()
    assert (calls["nvmlInitWithFlags"], calls["nvmlDeviceGetCount_v2"]) == (3, 3)
    assert set(calls) == set(machine.functions)
    machine.reset_calls()
    assert not any(machine.calls().values())


def test_invalid_faults_are_refused(machine: Machine) -> None:
    with pytest.raises(UnknownNameError, match="did you mean nvmlDeviceGetMigMode"):
        machine.fail("nvmlDeviceGetMigMod", 3)
    with pytest.raises(SlicewiseError, match="0 is not the number of an NVML error"):
        machine.fail("nvmlShutdown", 0)
    with pytest.raises(SlicewiseError, match="after: -1 is negative"):
        machine.fail("nvmlShutdown", 3, after=-1)
    with pytest.raises(SlicewiseError, match="no GPU 9"):
        machine.fail("nvmlShutdown", 3, gpu=9)
    with pytest.raises(ValueError, match="sometime"):
        machine.kill("nvmlShutdown", "sometime")
    for _ in range(64):
        machine.fail("nvmlShutdown", 3)
    with pytest.raises(SlicewiseError, match="at most 64 faults"):
        machine.fail("nvmlShutdown", 3)
    machine.clear_faults()
    machine.fail("nvmlShutdown", 3)


def test_calls_before_init_fail(machine: Machine, library: Path) -> None:
    c = ctypes.CDLL(str(library))
    for function in functions():
        if not function.startswith("nvmlInit"):
            assert getattr(c, function)(None, None, None, None, None) == 1
    assert not any(machine.calls().values())
