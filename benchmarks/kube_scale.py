"""Measure the controller's start and its decisions on a Kubernetes cluster of a thousand nodes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from benchmarks.kube_sites import Allocator, Site, site
from tests.kubernetes_e2e.nvidia import resource_slices

from slicewise.core.geometry import Geometry
from slicewise.lab.mix import Mix, parse_mix

_PATIENCE = 600.0
_STOCK_PATIENCE = 120.0
FLAGS = {
    "etcd": ["--quota-backend-bytes=8589934592"],
    "apiserver": ["--max-requests-inflight=2000", "--max-mutating-requests-inflight=1000"],
}


def scale(
    geometry: Geometry, nodes: int, gpus: int, pods: int, seed: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Publish all devices, start the controller, and create a burst of pods."""
    mix = parse_mix("uniform", geometry)
    say(f"  publishing {nodes} nodes of {gpus} {geometry.model}")
    with site(geometry, nodes, gpus, flags=FLAGS) as place:
        one_node = resource_slices("any", geometry.model, gpus)
        devices = nodes * sum(len(slice_["spec"].get("devices", ())) for slice_ in one_node)
        found: dict[str, Any] = {
            "nodes": nodes,
            "gpus": nodes * gpus,
            "model": geometry.model,
            "devices": devices,
            "slices": nodes * (gpus + 1),
            "publish_seconds": place.publish_seconds,
            "load_average": os.getloadavg()[0],
        }
        say(f"  published in {place.publish_seconds:.1f} s")
        allocator = Allocator("slicewise", place.plane)
        tracker = place.tracker
        tracker.make_templates([profile.name for profile in mix.profiles], allocator.device_class)
        try:
            found |= _start(place, allocator)
            say(f"  decides after {found['start_seconds']:.1f} s with {found['rss_mib']:.0f} MiB")
            found |= _burst(place, allocator, mix, pods, seed)
            say(f"  {found['allocations_per_second']:.1f} allocations/s")
        finally:
            allocator.stop()
        found["stock_seconds"] = _stock(place)
    return found


def _start(place: Site, allocator: Allocator) -> dict[str, Any]:
    """Measure from the start of the process until the claim of a waiting pod is allocated."""
    tracker = place.tracker
    tracker.create("first", tracker.geometry.plain_profiles[0].name).result()
    time.sleep(3)  # until its claim exists
    began = time.monotonic()
    allocator.start()
    if not tracker.until("the first claim is allocated", lambda: tracker.allocated > 0, _PATIENCE):
        raise SystemExit(f"nothing is decided: {allocator.log()[-2000:]}")
    took = time.monotonic() - began
    time.sleep(2)
    report = allocator.report()
    return {
        "start_seconds": took,
        "start_cpu_seconds": report["cpu_seconds"],
        "rss_mib": report["rss_mib"],
        "peak_mib": report["peak_mib"],
        "memory_mib": place.memory(),
    }


def _burst(place: Site, allocator: Allocator, mix: Mix, pods: int, seed: int) -> dict[str, Any]:
    """Create many pods at once and measure until all their claims are allocated."""
    tracker = place.tracker
    rng = np.random.default_rng(seed)
    kinds = rng.choice(len(mix.profiles), pods, p=mix.probabilities)
    before = allocator.report()
    already = tracker.allocated
    began = time.monotonic()
    made = [
        tracker.create(f"p{number}", mix.profiles[int(kind)].name)
        for number, kind in enumerate(kinds)
    ]
    for one in made:
        one.result()
    created = time.monotonic() - began
    done = tracker.until(
        "all claims are allocated", lambda: tracker.allocated >= already + pods, _PATIENCE
    )
    took = time.monotonic() - began
    run = tracker.until("all pods run", lambda: tracker.running > pods, _PATIENCE)
    until_running = time.monotonic() - began
    after = allocator.report()
    deciding = after["deciding_seconds"] - before["deciding_seconds"]
    decided = after["decided"] - before["decided"]
    return {
        "pods": pods,
        "all_allocated": done,
        "create_seconds": created,
        "allocate_seconds": took,
        "allocations_per_second": (tracker.allocated - already) / took,
        "all_run": run,
        "running_seconds": until_running,
        "running_per_second": (tracker.running - 1) / until_running,
        "decided": decided,
        "deciding_seconds": deciding,
        "decisions_per_second": decided / deciding if deciding else 0.0,
        "burst_cpu_seconds": after["cpu_seconds"] - before["cpu_seconds"],
        "rss_after_mib": after["rss_mib"],
        "failed": after["failed"],
        "overlaps": len(tracker.overlaps),
    }


def _stock(place: Site) -> float | None:
    """Return the seconds kube-scheduler alone takes for one pod; None on timeout."""
    tracker = place.tracker
    profile = tracker.geometry.plain_profiles[-1].name
    stock = Allocator("stock", place.plane)
    tracker.make_templates([profile], stock.device_class, "stock-")
    before = tracker.running
    began = time.monotonic()
    tracker.create("stock", profile, "stock-").result()
    if tracker.until("a stock pod runs", lambda: tracker.running > before, _STOCK_PATIENCE):
        return time.monotonic() - began
    return None


def tell(found: dict[str, Any]) -> list[str]:
    """Yield the results as text."""
    stock = (
        f"more than {_STOCK_PATIENCE:g} s"
        if found["stock_seconds"] is None
        else f"{found['stock_seconds']:.1f} s"
    )
    held = ", ".join(f"{part} {mib:.0f}" for part, mib in found["memory_mib"].items())
    return [
        f"{found['nodes']} nodes, {found['gpus']} {found['model']}, {found['devices']} devices "
        f"in {found['slices']} slices, published in {found['publish_seconds']:.1f} s",
        f"the controller decides {found['start_seconds']:.1f} s after its start "
        f"({found['start_cpu_seconds']:.1f} s of CPU), with {found['rss_mib']:.0f} MiB "
        f"(at most {found['peak_mib']:.0f}); MiB of the others: {held}",
        f"a burst of {found['pods']} pods (made in {found['create_seconds']:.1f} s): "
        f"{found['decisions_per_second']:.0f} decisions/s by themselves, "
        f"{found['allocations_per_second']:.1f} allocations/s from pod to allocated claim, "
        f"{found['burst_cpu_seconds']:.1f} s of the controller's CPU",
        f"{found['running_per_second']:.1f} pods/s until they run (kube-scheduler binds them)",
        f"one pod of the stock class, allocated by kube-scheduler itself: {stock}",
    ]
