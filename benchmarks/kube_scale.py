"""A Kubernetes cluster of a thousand nodes: what the controller needs to start and to decide."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from benchmarks.kube_sites import Allocator, Site, site
from tests.k8s.nvidia import resource_slices

from slicewise.core.geometry import Geometry
from slicewise.sim.mix import Mix, parse_mix

_PATIENCE = 600.0
_STOCK_PATIENCE = 120.0
FLAGS = {
    "etcd": ["--quota-backend-bytes=8589934592"],
    "apiserver": ["--max-requests-inflight=2000", "--max-mutating-requests-inflight=1000"],
}


def scale(
    geometry: Geometry, nodes: int, gpus: int, pods: int, seed: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Publish everything, start the controller on it, and give it a burst of pods."""
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
        world = place.world
        world.make_templates([profile.name for profile in mix.profiles], allocator.device_class)
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
    """From the start of the process until the claim of a pod that waits is allocated."""
    world = place.world
    world.create("first", world.geometry.plain_profiles[0].name).result()
    time.sleep(3)  # until its claim has been made
    began = time.monotonic()
    allocator.start()
    if not world.until("the first claim is allocated", lambda: world.allocated > 0, _PATIENCE):
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
    """Many pods at once: until all their claims are allocated."""
    world = place.world
    rng = np.random.default_rng(seed)
    kinds = rng.choice(len(mix.profiles), pods, p=mix.probabilities)
    before = allocator.report()
    already = world.allocated
    began = time.monotonic()
    made = [
        world.create(f"p{number}", mix.profiles[int(kind)].name)
        for number, kind in enumerate(kinds)
    ]
    for one in made:
        one.result()
    created = time.monotonic() - began
    done = world.until(
        "all claims are allocated", lambda: world.allocated >= already + pods, _PATIENCE
    )
    took = time.monotonic() - began
    run = world.until("all pods run", lambda: world.running > pods, _PATIENCE)
    until_running = time.monotonic() - began
    after = allocator.report()
    deciding = after["deciding_seconds"] - before["deciding_seconds"]
    decided = after["decided"] - before["decided"]
    return {
        "pods": pods,
        "all_allocated": done,
        "create_seconds": created,
        "allocate_seconds": took,
        "allocations_per_second": (world.allocated - already) / took,
        "all_run": run,
        "running_seconds": until_running,
        "running_per_second": (world.running - 1) / until_running,
        "decided": decided,
        "deciding_seconds": deciding,
        "decisions_per_second": decided / deciding if deciding else 0.0,
        "burst_cpu_seconds": after["cpu_seconds"] - before["cpu_seconds"],
        "rss_after_mib": after["rss_mib"],
        "failed": after["failed"],
        "overlaps": len(world.overlaps),
    }


def _stock(place: Site) -> float | None:
    """How long kube-scheduler by itself takes for one pod; None if longer than is waited for."""
    world = place.world
    profile = world.geometry.plain_profiles[-1].name
    stock = Allocator("stock", place.plane)
    world.make_templates([profile], stock.device_class, "stock-")
    before = world.running
    began = time.monotonic()
    world.create("stock", profile, "stock-").result()
    if world.until("a stock pod runs", lambda: world.running > before, _STOCK_PATIENCE):
        return time.monotonic() - began
    return None


def tell(found: dict[str, Any]) -> list[str]:
    """For people."""
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
