"""A full cluster with pods that wait: how soon a GPU that becomes free is in use again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.kube_sites import Allocator, Site, site
from benchmarks.kube_stream import percentiles
from benchmarks.kube_world import cpu_seconds

from slicewise.core.geometry import Geometry

_PATIENCE = 600.0


def waiting(
    geometry: Geometry,
    nodes: int,
    gpus: int,
    pods: int,
    sides: Sequence[str],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Each side in turn: so many pods wait for a whole GPU, and half as many GPUs become free."""
    found: dict[str, Any] = {"nodes": nodes, "gpus": nodes * gpus, "waiting": pods, "sides": {}}
    for side in sides:
        with site(geometry, nodes, gpus) as place:
            allocator = Allocator(side, place.plane)
            try:
                found["sides"][side] = one = _hand_over(place, allocator, pods)
            finally:
                allocator.stop()
        times = "/".join(f"{one['seconds'][rank]:.2f}" for rank in ("p50", "p90", "p99"))
        say(
            f"{side:10} in use again after {times} s (p50/p90/p99), kube-scheduler uses "
            f"{100 * one['scheduler_cpu']:.0f}% of a core"
        )
    return found


def _hand_over(place: Site, allocator: Allocator, pods: int) -> dict[str, Any]:
    world = place.world
    whole = max(world.geometry.plain_profiles, key=lambda profile: profile.size).name
    size = len(place.names) * world.gpus
    world.make_templates([whole], allocator.device_class)
    allocator.start()
    for number in range(size):
        world.create(f"first-{number}", whole)
    if not world.until("all GPUs are in use", lambda: world.running == size, _PATIENCE):
        raise SystemExit(f"only {world.running} of {size} pods run: {allocator.name}")
    for number in range(pods):
        world.create(f"next-{number}", whole)
    time.sleep(5)
    scheduler = place.plane.process_id("scheduler")
    cpu, began = cpu_seconds(scheduler), time.monotonic()
    took: list[float] = []
    for number in range(pods // 2):
        freed = time.monotonic()
        gone = world.lives[f"first-{number}"]
        world.delete(gone.name).result()
        served = world.until(
            "another pod runs",
            lambda gone=gone: gone.gone is not None and world.running == size,  # type: ignore[misc]
            _PATIENCE,
        )
        if not served:
            raise SystemExit(f"nobody gets a GPU that is free: {allocator.name}")
        took.append(time.monotonic() - freed)
        time.sleep(max(0.0, freed + 1 - time.monotonic()))
    return {
        "seconds": percentiles(took),
        "scheduler_cpu": (cpu_seconds(scheduler) - cpu) / (time.monotonic() - began),
    }
