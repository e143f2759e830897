"""Every placement of every model: the driver allows exactly what the scheduler allows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakedriver.driver import (
    FULL,
    INVALID_ARGUMENT,
    Direct,
    attached,
    code,
    create,
    found_on,
    profiles,
    shapes,
)

from slicewise.core.cluster import Cluster
from slicewise.core.errors import PlacementError
from slicewise.core.geometry import Geometry
from slicewise.core.states import ILLEGAL, state_space
from slicewise.fakedriver import Machine


def test_every_placement_on_an_empty_gpu(
    geometry: Geometry, make: Callable[..., Machine], library: Path
) -> None:
    machine = make(geometry.model)
    legal = refused = 0
    with attached(machine, library) as nvml:
        device = nvml.nvmlDeviceGetHandleByIndex(0)
        offered = profiles(device)
        for profile in geometry.profiles:
            info = offered[profile.name]
            for start in range(geometry.slices + 2):
                for size in range(geometry.slices + 2):
                    if start in profile.starts and size == profile.size:
                        instance = create(device, info.id, start, size)
                        assert found_on(device, offered) == {(profile.name, start, size)}
                        (seen,) = machine.instances()
                        assert (seen.profile, seen.start, seen.size) == (profile.name, start, size)
                        nvml.nvmlGpuInstanceDestroy(instance)
                        legal += 1
                    else:
                        answer = code(create, device, info.id, start, size)
                        assert answer == INVALID_ARGUMENT
                        refused += 1
            assert found_on(device) == set()
    assert legal == len(geometry.placements)
    print(f"{geometry.model}: {legal} legal and {refused} illegal places tried")


def test_every_pair_of_placements(
    geometry: Geometry, make: Callable[..., Machine], library: Path
) -> None:
    together = 0
    with attached(make(geometry.model), library) as nvml:
        device = nvml.nvmlDeviceGetHandleByIndex(0)
        offered = profiles(device)
        ids = {name: info.id for name, info in offered.items()}
        cluster = Cluster.of(geometry, 1)
        for one in geometry.placements:
            first = create(device, ids[one.profile.name], one.start, one.profile.size)
            there = cluster.place(0, one.profile.name, one.start)
            for two in geometry.placements:
                expected = {(one.profile.name, one.start, one.profile.size)}
                try:
                    beside = cluster.place(0, two.profile.name, two.start)
                except PlacementError:
                    answer = code(
                        create, device, ids[two.profile.name], two.start, two.profile.size
                    )
                    assert answer == FULL
                else:
                    second = create(device, ids[two.profile.name], two.start, two.profile.size)
                    expected.add((two.profile.name, two.start, two.profile.size))
                    assert found_on(device, offered) == expected
                    nvml.nvmlGpuInstanceDestroy(second)
                    cluster.release(beside)
                    together += 1
            nvml.nvmlGpuInstanceDestroy(first)
            cluster.release(there)
    print(f"{geometry.model}: {len(geometry.placements) ** 2} pairs, {together} of them legal")


@pytest.mark.parametrize("kind", shapes(), ids=lambda g: g.model)
def test_every_state_of_a_gpu(kind: Geometry, make: Callable[..., Machine], library: Path) -> None:
    """Visit every state once and try every placement in it."""
    space = state_space(kind)
    machine = make(kind.model)
    visited: set[int] = set()
    tried = 0

    with Direct(machine, library) as driver:
        ids = _ids(machine, kind)

        def visit(state: int) -> None:
            nonlocal tried
            visited.add(state)
            for placement in kind.placements:
                follower = space.after_place[state][placement.number]
                profile = placement.profile
                code, handle = driver.create(0, ids[profile.name], placement.start, profile.size)
                tried += 1
                assert code == (FULL if follower == ILLEGAL else 0), (
                    f"{profile.name} at {placement.start} in {space.states[state]}"
                )
                if code == 0:
                    if follower not in visited:
                        visit(follower)
                    assert driver.destroy(handle) == 0

        visit(0)
    assert visited == set(range(len(space)))
    assert machine.instances() == ()
    print(f"{kind.model}: {len(visited)} states, {tried} placements tried")


def _ids(machine: Machine, geometry: Geometry) -> dict[str, int]:
    return {
        profile.name: machine._file.profiles[number].id
        for number, profile in enumerate(geometry.profiles)
    }


def test_driver_fills_a_gpu_in_its_preferred_order(machine: Machine, gpu: Any, nvml: Any) -> None:
    for profile_id, order in ((19, [6, 4, 5, 0, 1, 2, 3]), (14, [4, 0, 2]), (9, [4, 0])):
        made = [nvml.nvmlDeviceCreateGpuInstance(gpu, profile_id) for _ in order]
        starts = [nvml.nvmlGpuInstanceGetInfo(instance).placement.start for instance in made]
        assert starts == order
        assert code(nvml.nvmlDeviceCreateGpuInstance, gpu, profile_id) == FULL
        assert nvml.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, profile_id) == 0
        for instance in made:
            nvml.nvmlGpuInstanceDestroy(instance)
    assert machine.instances() == ()


def test_known_bad_order_fails_as_on_hardware(gpu: Any, nvml: Any) -> None:
    for profile_id in (19, 19, 14):
        nvml.nvmlDeviceCreateGpuInstance(gpu, profile_id)
    assert code(nvml.nvmlDeviceCreateGpuInstance, gpu, 9) == FULL


def test_only_one_instance_has_the_media_extension(gpu: Any, nvml: Any) -> None:
    create(gpu, 20, 0, 1)
    assert code(create, gpu, 20, 1, 1) == FULL
    assert nvml.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, 20) == 0
    assert nvml.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, 19) == 6
    create(gpu, 19, 1, 1)
