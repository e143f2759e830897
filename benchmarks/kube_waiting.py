"""Measure how soon a freed GPU is used again in a full cluster with waiting pods."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.kube_pods import cpu_seconds
from benchmarks.kube_sites import Allocator, Site, site
from benchmarks.kube_stream import percentiles

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
    """Measure each side: pods wait for whole GPUs, and GPUs for half of them become free."""
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
    tracker = place.tracker
    whole = max(tracker.geometry.plain_profiles, key=lambda profile: profile.size).name
    size = len(place.names) * tracker.gpus
    tracker.make_templates([whole], allocator.device_class)
    allocator.start()
    for number in range(size):
        tracker.create(f"first-{number}", whole)
    if not tracker.until("all GPUs are in use", lambda: tracker.running == size, _PATIENCE):
        raise SystemExit(f"only {tracker.running} of {size} pods run: {allocator.name}")
    for number in range(pods):
        tracker.create(f"next-{number}", whole)
    time.sleep(5)
    scheduler = place.plane.process_id("scheduler")
    cpu, began = cpu_seconds(scheduler), time.monotonic()
    took: list[float] = []
    for number in range(pods // 2):
        freed = time.monotonic()
        gone = tracker.lives[f"first-{number}"]
        tracker.delete(gone.name).result()
        served = tracker.until(
            "another pod runs",
            lambda gone=gone: gone.gone is not None and tracker.running == size,  # type: ignore[misc]
            _PATIENCE,
        )
        if not served:
            raise SystemExit(f"no pod gets a free GPU: {allocator.name}")
        took.append(time.monotonic() - freed)
        time.sleep(max(0.0, freed + 1 - time.monotonic()))
    return {
        "seconds": percentiles(took),
        "scheduler_cpu": (cpu_seconds(scheduler) - cpu) / (time.monotonic() - began),
    }
