"""A random walk on which scheduler and driver must always agree."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fakedriver.driver import FULL, INVALID_ARGUMENT, Direct, shapes

from slicewise.core.cluster import Cluster, Instance
from slicewise.core.errors import PlacementError
from slicewise.core.geometry import Geometry
from slicewise.fakedriver import Machine

OPERATIONS = 100_000
GPUS = 3


def test_scheduler_and_driver_agree(make: Callable[..., Machine], library: Path) -> None:
    kinds = shapes()
    counts: Counter[str] = Counter()
    for number, geometry in enumerate(kinds):
        share = OPERATIONS // len(kinds) + (number < OPERATIONS % len(kinds))
        machine = make(geometry.model, GPUS, seed=number)
        with Direct(machine, library) as driver:
            _walk(random.Random(number), share, geometry, machine, driver, counts)
    assert counts.total() == OPERATIONS
    assert all(
        counts[word] > OPERATIONS // 100 for word in ("placed", "full", "released", "chosen")
    )
    print(f"{OPERATIONS} operations on {len(kinds)} geometries, no disagreement: {dict(counts)}")


def _walk(
    chance: random.Random,
    operations: int,
    geometry: Geometry,
    machine: Machine,
    driver: Direct,
    counts: Counter[str],
) -> None:
    cluster = Cluster.of(geometry, GPUS)
    ids = {p.name: machine._file.profiles[n].id for n, p in enumerate(geometry.profiles)}
    alive: list[tuple[Instance, Any]] = []
    for step in range(operations):
        gpu = chance.randrange(GPUS)
        profile = chance.choice(geometry.profiles)
        action = chance.random()
        if action < 0.45 and alive:
            instance, handle = alive.pop(chance.randrange(len(alive)))
            assert driver.destroy(handle) == 0
            assert driver.destroy(handle) == INVALID_ARGUMENT
            cluster.release(instance)
            counts["released"] += 1
        elif action < 0.6:
            feasible = cluster.state(gpu).feasible_starts(profile)
            start = next((s for s in profile.start_order if s in feasible), None)
            code, handle = driver.create_anywhere(gpu, ids[profile.name])
            if start is None:
                assert code == FULL
                counts["none chosen"] += 1
            else:
                assert (code, driver.start_of(handle)) == (0, start)
                alive.append((cluster.place(gpu, profile.name, start), handle))
                counts["chosen"] += 1
        else:
            start = chance.randrange(geometry.slices)
            code, handle = driver.create(gpu, ids[profile.name], start, profile.size)
            try:
                instance = cluster.place(gpu, profile.name, start)
            except PlacementError:
                expected = FULL if start in profile.starts else INVALID_ARGUMENT
                assert code == expected, f"step {step}: {profile.name} at {start}"
                counts["full" if code == FULL else "not offered"] += 1
            else:
                assert code == 0, f"step {step}: {profile.name} at {start}"
                alive.append((instance, handle))
                counts["placed"] += 1
        if step % 500 == 0:
            _compare(cluster, machine)
    _compare(cluster, machine)


def _compare(cluster: Cluster, machine: Machine) -> None:
    """Compare all instances of the scheduler and the driver."""
    ours = sorted((i.gpu, i.start, i.profile, i.size) for i in cluster.instances())
    assert ours == [(i.gpu, i.start, i.profile, i.size) for i in machine.instances()]
