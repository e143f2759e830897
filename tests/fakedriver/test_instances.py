"""GPU instances, compute instances and MIG devices."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakedriver.driver import (
    FULL,
    IN_USE,
    INVALID_ARGUMENT,
    NOT_SUPPORTED,
    attached,
    code,
    create,
    found_on,
)

from slicewise.core.errors import PlacementError, SlicewiseError, UnknownNameError
from slicewise.fakedriver import Machine

NOT_FOUND = 6


def whole(nvml: Any, instance: Any) -> Any:
    """Create the compute instance that spans a GPU instance, as the agent does."""
    device = nvml.nvmlGpuInstanceGetInfo(instance).device
    profile_id = nvml.nvmlGpuInstanceGetInfo(instance).profileId
    slices = nvml.nvmlDeviceGetGpuInstanceProfileInfoById(device, profile_id).sliceCount
    for number in range(nvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        try:
            info = nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, number, 0)
        except nvml.NVMLError_NotSupported:
            continue
        if info.sliceCount == slices:
            return nvml.nvmlGpuInstanceCreateComputeInstance(instance, info.id)
    raise AssertionError("no compute instance covers it")


def mig_uuids(nvml: Any, device: Any) -> list[str]:
    """The UUIDs of a GPU's MIG devices, by index."""
    found = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(device)):
        try:
            mig = nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, index)
        except nvml.NVMLError_NotFound:
            continue
        found.append(nvml.nvmlDeviceGetUUID(mig))
    return found


def test_lifecycle_of_an_instance(machine: Machine, gpu: Any, nvml: Any) -> None:
    instance = create(gpu, 9, 4, 4)
    assert mig_uuids(nvml, gpu) == []
    compute = whole(nvml, instance)
    (view,) = machine.instances()
    (uuid,) = mig_uuids(nvml, gpu)
    assert uuid == view.computes[0].uuid
    assert uuid.startswith("MIG-")
    mig = nvml.nvmlDeviceGetHandleByUUID(uuid)
    assert nvml.nvmlDeviceIsMigDeviceHandle(mig).value
    assert nvml.nvmlDeviceGetName(mig) == "NVIDIA H200 MIG 3g.71gb"
    assert nvml.nvmlDeviceGetGpuInstanceId(mig) == view.id
    assert nvml.nvmlDeviceGetComputeInstanceId(mig) == 0
    parent = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig)
    assert nvml.nvmlDeviceGetUUID(parent) == machine.gpus[0].uuid
    assert nvml.nvmlDeviceGetMemoryInfo(mig).total == 71424 << 20
    attributes = nvml.nvmlDeviceGetAttributes_v2(mig)
    assert (attributes.multiprocessorCount, attributes.memorySizeMB) == (60, 71424)
    assert (attributes.gpuInstanceSliceCount, attributes.computeInstanceSliceCount) == (3, 3)

    told = nvml.nvmlComputeInstanceGetInfo_v2(compute)
    assert (told.id, told.profileId, told.placement.start, told.placement.size) == (0, 2, 0, 3)
    assert nvml.nvmlGpuInstanceGetInfo(told.gpuInstance).id == view.id
    assert nvml.nvmlDeviceIsMigDeviceHandle(told.device).value
    assert nvml.nvmlDeviceGetUUID(told.device) == uuid
    by_id = nvml.nvmlDeviceGetGpuInstanceById(gpu, view.id)
    assert nvml.nvmlGpuInstanceGetInfo(by_id).placement.start == 4
    again = nvml.nvmlGpuInstanceGetComputeInstanceById(by_id, 0)
    assert nvml.nvmlComputeInstanceGetInfo_v2(again).profileId == 2

    assert code(nvml.nvmlGpuInstanceDestroy, instance) == IN_USE  # it has a compute instance
    nvml.nvmlComputeInstanceDestroy(compute)
    nvml.nvmlGpuInstanceDestroy(instance)
    assert machine.instances() == ()
    for stale in (mig, nvml.nvmlDeviceGetUUID), (instance, nvml.nvmlGpuInstanceGetInfo):
        assert code(stale[1], stale[0]) == INVALID_ARGUMENT
    assert code(nvml.nvmlDeviceGetHandleByUUID, uuid) == NOT_FOUND


def test_stale_handle_is_invalid(gpu: Any, nvml: Any) -> None:
    old = create(gpu, 19, 0, 1)
    nvml.nvmlGpuInstanceDestroy(old)
    new = create(gpu, 19, 0, 1)
    assert nvml.nvmlGpuInstanceGetInfo(new).id == 7
    assert code(nvml.nvmlGpuInstanceDestroy, old) == INVALID_ARGUMENT
    assert found_on(gpu) == {("1g.18gb", 0, 1)}


def test_recreated_instance_has_a_new_uuid(machine: Machine, gpu: Any, nvml: Any) -> None:
    uuids = set()
    for _ in range(20):
        instance = create(gpu, 19, 3, 1)
        compute = whole(nvml, instance)
        uuids.add(machine.instances()[0].computes[0].uuid)
        nvml.nvmlComputeInstanceDestroy(compute)
        nvml.nvmlGpuInstanceDestroy(instance)
    assert len(uuids) == 20


def test_ids_of_gpu_instances_differ_between_dies(machine: Machine, nvml: Any) -> None:
    layout = [(9, 4, 4), (14, 0, 2), (19, 2, 1), (19, 3, 1)]
    seen = []
    for index in range(2):
        device = nvml.nvmlDeviceGetHandleByIndex(index)
        made = [create(device, *place) for place in layout]
        seen.append([nvml.nvmlGpuInstanceGetInfo(instance).id for instance in made])
    # As reported for a host with two A100: the same placements, different ids.
    assert seen == [[2, 3, 9, 10], [1, 5, 13, 14]]


def test_seven_small_instances_leave_a_gap_in_the_ids(machine: Machine, nvml: Any) -> None:
    device = nvml.nvmlDeviceGetHandleByIndex(1)
    made = [nvml.nvmlDeviceCreateGpuInstance(device, 19) for _ in range(7)]
    ids = sorted(nvml.nvmlGpuInstanceGetInfo(instance).id for instance in made)
    assert ids == [7, 8, 9, 11, 12, 13, 14]


def test_several_compute_instances_in_a_gpu_instance(gpu: Any, nvml: Any) -> None:
    instance = create(gpu, 0, 0, 8)
    offered = {}
    for number in range(nvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        if not code(nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo, instance, number, 0):
            info = nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, number, 0)
            plain = nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, number, 0, 1)
            assert plain.id == info.id
            offered[info.name] = (info.id, info.sliceCount, info.instanceCount)
    assert offered == {
        "MIG 1c.7g.141gb": (0, 1, 7),
        "MIG 2c.7g.141gb": (1, 2, 3),
        "MIG 3c.7g.141gb": (2, 3, 2),
        "MIG 4c.7g.141gb": (3, 4, 1),
        "MIG 7g.141gb": (4, 7, 1),
    }
    nvml.nvmlGpuInstanceCreateComputeInstance(instance, 3)
    assert nvml.nvmlGpuInstanceGetComputeInstanceRemainingCapacity(instance, 0) == 3
    assert nvml.nvmlGpuInstanceGetComputeInstanceRemainingCapacity(instance, 4) == 0
    assert code(nvml.nvmlGpuInstanceCreateComputeInstance, instance, 3) == FULL
    place = nvml.c_nvmlComputeInstancePlacement_t(5, 1)
    at = ctypes.byref(place)
    make = nvml.nvmlGpuInstanceCreateComputeInstanceWithPlacement
    small = make(instance, 0, at)
    assert code(make, instance, 0, at) == FULL
    place.start = 7
    assert code(make, instance, 0, at) == INVALID_ARGUMENT
    assert code(nvml.nvmlGpuInstanceCreateComputeInstance, instance, 7) == NOT_SUPPORTED
    assert nvml.nvmlComputeInstanceGetInfo_v2(small).id == 1
    count, room = ctypes.c_uint(), (nvml.c_nvmlComputeInstance_t * 8)()
    nvml.nvmlGpuInstanceGetComputeInstances(instance, 0, room, ctypes.byref(count))
    assert count.value == 1
    nvml.nvmlGpuInstanceGetComputeInstancePossiblePlacements(instance, 1, None, ctypes.byref(count))
    assert count.value == 3
    assert len(mig_uuids(nvml, gpu)) == 2


def test_mig_devices_are_numbered_without_gaps(gpu: Any, nvml: Any) -> None:
    made = {}
    for start in (6, 0, 3):
        instance = create(gpu, 19, start, 1)
        made[start] = (instance, whole(nvml, instance))
    before = mig_uuids(nvml, gpu)
    nvml.nvmlComputeInstanceDestroy(made[0][1])
    after = mig_uuids(nvml, gpu)
    assert len(before) == 3
    assert after == before[1:]
    assert code(nvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu, 2) == NOT_FOUND
    assert code(nvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu, 7) == INVALID_ARGUMENT


def test_busy_instance_cannot_be_destroyed(machine: Machine, gpu: Any, nvml: Any) -> None:
    machine.create_instance(0, "2g.35gb", 2)
    machine.set_busy(0, 2, process=4321)
    machine.set_memory_used(0, 2, 5 << 30)
    instance = nvml.nvmlDeviceGetGpuInstanceById(gpu, machine.instances()[0].id)
    compute = nvml.nvmlGpuInstanceGetComputeInstanceById(instance, 0)
    for _ in range(2):
        assert code(nvml.nvmlComputeInstanceDestroy, compute) == IN_USE
        assert code(nvml.nvmlGpuInstanceDestroy, instance) == IN_USE
    (process,) = nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
    assert (process.pid, process.usedGpuMemory) == (4321, 5 << 30)
    mig = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)
    assert nvml.nvmlDeviceGetMemoryInfo(mig, nvml.nvmlMemory_v2).used == 5 << 30
    assert nvml.nvmlDeviceGetMemoryInfo(gpu, nvml.nvmlMemory_v2).used == 5 << 30
    assert len(nvml.nvmlDeviceGetComputeRunningProcesses(mig)) == 1
    machine.set_idle(0, 2)
    assert nvml.nvmlDeviceGetComputeRunningProcesses(mig) == []
    nvml.nvmlComputeInstanceDestroy(compute)
    nvml.nvmlGpuInstanceDestroy(instance)
    assert machine.instances() == ()


def test_create_instance_obeys_the_placement_rules(machine: Machine, gpu: Any, nvml: Any) -> None:
    view = machine.create_instance(machine.gpus[0].uuid, "1g.18gb+me", 6, compute=False)
    assert (view.id, view.computes) == (13, ())
    assert found_on(gpu) == {("1g.18gb+me", 6, 1)}
    assert code(create, gpu, 20, 0, 1) == FULL
    for profile, start, words in (
        ("1g.18gb", 6, "does not fit"),
        ("1g.18gb+me", 0, "does not fit"),
        ("1g.18gb", 7, "cannot start"),
    ):
        with pytest.raises(PlacementError, match=words):
            machine.create_instance(0, profile, start)
    with pytest.raises(UnknownNameError, match="profile of this machine"):
        machine.create_instance(0, "1g.19gb", 0)
    with pytest.raises(SlicewiseError, match="no GPU 2 in this machine"):
        machine.create_instance(2, "1g.18gb", 0)
    with pytest.raises(UnknownNameError, match="unknown GPU"):
        machine.create_instance("GPU-unknown", "1g.18gb", 0)
    with pytest.raises(PlacementError, match="no instance starts at slice 0"):
        machine.destroy_instance(0, 0)
    machine.destroy_instance(0, 6)
    assert found_on(gpu) == set()


def test_mig_mode_changes_at_once_on_hopper(make: Callable[..., Machine], library: Path) -> None:
    machine = make("H200", mig=False)
    with attached(machine, library) as nvml:
        gpu = nvml.nvmlDeviceGetHandleByIndex(0)
        for refused in (
            lambda: create(gpu, 19, 0, 1),
            lambda: nvml.nvmlDeviceCreateGpuInstance(gpu, 19),
        ):
            assert code(refused) == NOT_SUPPORTED
        assert found_on(gpu) == set()
        assert nvml.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, 19) == 7
        assert code(nvml.nvmlDeviceGetGpuInstanceById, gpu, 0) == NOT_FOUND
        for index in (0, 99):
            assert code(nvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu, index) == NOT_FOUND
        with pytest.raises(PlacementError, match="MIG mode is off"):
            machine.create_instance(0, "1g.18gb", 0)
        assert nvml.nvmlDeviceSetMigMode(gpu, 1) == 0
        assert nvml.nvmlDeviceGetMigMode(gpu) == [1, 1]
        instance = create(gpu, 19, 0, 1)
        activation = ctypes.c_uint(99)
        ask = nvml._nvmlGetFunctionPointer("nvmlDeviceSetMigMode")
        assert ask(gpu, 0, ctypes.byref(activation)) == IN_USE
        assert activation.value == 0
        assert nvml.nvmlDeviceGetMigMode(gpu) == [1, 1]
        assert found_on(gpu) == {("1g.18gb", 0, 1)}
        nvml.nvmlGpuInstanceDestroy(instance)
        assert nvml.nvmlDeviceSetMigMode(gpu, 0) == 0
        assert nvml.nvmlDeviceGetMigMode(gpu) == [0, 0]
        assert code(nvml.nvmlDeviceSetMigMode, gpu, 2) == INVALID_ARGUMENT


def test_mig_mode_needs_a_reset_on_ampere(make: Callable[..., Machine], library: Path) -> None:
    machine = make("A100-80GB", mig=False)
    with attached(machine, library) as nvml:
        gpu = nvml.nvmlDeviceGetHandleByIndex(0)
        assert nvml.nvmlDeviceSetMigMode(gpu, 1) == 16  # reset required
        assert nvml.nvmlDeviceGetMigMode(gpu) == [0, 1]
        assert code(create, gpu, 19, 0, 1) == NOT_SUPPORTED
        machine.reset(0)
        assert nvml.nvmlDeviceGetMigMode(gpu) == [1, 1]
        create(gpu, 19, 0, 1)
        machine.set_mig(0, False)
        assert nvml.nvmlDeviceGetMigMode(gpu) == [0, 0]
        assert machine.instances() == ()


def test_mig_device_is_not_a_gpu(machine: Machine, gpu: Any, nvml: Any) -> None:
    machine.create_instance(0, "1g.18gb", 0)
    mig = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)
    for question in (
        nvml.nvmlDeviceGetMigMode,
        nvml.nvmlDeviceGetPciInfo,
        nvml.nvmlDeviceGetMinorNumber,
        nvml.nvmlDeviceGetMaxMigDeviceCount,
    ):
        assert code(question, mig) == INVALID_ARGUMENT
    assert code(create, mig, 19, 1, 1) == INVALID_ARGUMENT
    for question in (
        nvml.nvmlDeviceGetGpuInstanceId,
        nvml.nvmlDeviceGetComputeInstanceId,
        nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle,
    ):
        assert code(question, gpu) == INVALID_ARGUMENT
    assert code(nvml.nvmlDeviceGetAttributes_v2, gpu) == NOT_SUPPORTED
