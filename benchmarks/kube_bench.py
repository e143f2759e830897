"""Does slicewise let more pods run on a Kubernetes cluster than the stock scheduler, and how fast?

Against a real control plane (`tests/k8s/plane.py`), in one run:

- stream: the same pods, once with NVIDIA's class, where kube-scheduler takes the first device that
  matches, and once with slicewise's; each on a fresh control plane: pods running, slices in use,
  pods stuck, fragmentation, time to running, and the speed of the first burst;
- waiting (`--waiting`): pods wait for GPUs that become free one by one: how soon they are in use;
- scale (`--scale`): a thousand nodes of eight GPUs: how long publishing takes, the controller's
  memory, its start until it decides, decisions a second.

Run it from the root of the project, with nothing else on the machine:

    .venv/bin/python -m benchmarks.kube_bench [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import kube_scale
from benchmarks.kube_sites import Allocator, site
from benchmarks.kube_stream import Plan, Stream
from benchmarks.kube_waiting import waiting

from slicewise import load_geometry
from slicewise.sim.mix import PUBLISHED, parse_mix

SIDES = ("stock", "slicewise")
SCALE_MODEL = "H100-80GB"


def streams(options: argparse.Namespace, keep: dict[str, Any]) -> None:
    """All streams, one after the other; what is found is written down as it comes."""
    geometry = load_geometry(options.model)
    plan = Plan(
        tuple(options.loads),
        options.rate,
        options.seconds,
        options.burst,
        options.wave,
        options.seed,
    )
    keep["streams"] = []
    for name in options.mixes:
        mix = parse_mix(name, geometry)
        for side in options.sides:
            say(f"  {name}, {side}")
            with site(geometry, options.nodes, options.gpus) as place:
                allocator = Allocator(side, place.plane, options.profile)
                try:
                    found = Stream(place, allocator, mix, plan, say).run()
                finally:
                    allocator.stop()
            keep["streams"].append({"mix": name, "side": side, **found})
            save(options, keep)
            for line in tell_stream(keep["streams"][-1]):
                say(f"    {line}")


def tell_stream(found: dict[str, Any]) -> Iterator[str]:
    """One stream in words."""
    for one in found["loads"]:
        times = one["to_running"] or {}
        yield (
            f"load {one['load']:g}: {one['running']:.0f} running, "
            f"{100 * one['slices_share']:.1f}% of slices, {one['pending']:.1f} pending, "
            f"{one['stuck']:.1f} stuck ({one['stranded']:.1f} stranded), "
            f"F {one['fragmentation']:.3f}, to running "
            + "/".join(f"{seconds:.2f}" for seconds in times.values())
            + f" s; {one['had_room_and_ran']} of {one['had_room']} that had room"
        )
    if found["overlaps"]:
        yield f"{found['overlaps']} OVERLAPS"


def table(keep: dict[str, Any]) -> Iterator[str]:
    """Stock and slicewise side by side."""
    yield (
        f"{'':12}{'load':>5} {'':10}{'running':>8}{'slices':>8}{'pending':>8}{'stuck':>7}"
        f"{'F':>8}{'p50':>7}{'p90':>7}{'p99 s':>7}{'burst pods/s':>14}"
    )
    for stream in keep["streams"]:
        for number, one in enumerate(stream["loads"]):
            times = one["to_running"] or {"p50": 0.0, "p90": 0.0, "p99": 0.0}
            burst = f"{stream['burst']['pods_per_second']:14.2f}" if number == 0 else ""
            yield (
                f"{stream['mix']:12}{one['load']:5.2f} {stream['side']:10}{one['running']:8.1f}"
                f"{100 * one['slices_share']:7.1f}%{one['pending']:8.1f}{one['stuck']:7.1f}"
                f"{one['fragmentation']:8.3f}"
                + "".join(f"{times[rank]:7.2f}" for rank in ("p50", "p90", "p99"))
                + burst
            )


def say(text: str) -> None:
    """Tell at once how far it is."""
    print(text, flush=True)


def save(options: argparse.Namespace, keep: dict[str, Any]) -> None:
    """Write down what is known so far."""
    if options.json:
        options.json.write_text(json.dumps(keep, indent=1) + "\n")


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--model", default="A100-80GB")
    parser.add_argument("--mixes", nargs="+", default=list(PUBLISHED))
    parser.add_argument("--sides", nargs="+", default=list(SIDES))
    parser.add_argument("--loads", nargs="+", type=float, default=[1.0])
    parser.add_argument("--rate", type=float, default=1.0, help="pods a second")
    parser.add_argument("--seconds", type=float, default=40.0, help="for each load")
    parser.add_argument("--burst", type=int, default=40, help="pods into the empty cluster")
    parser.add_argument("--wave", type=int, default=5, help="nodes filled at a time; 0: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="few nodes and one distribution")
    parser.add_argument("--scale", action="store_true", help="a thousand nodes, and no streams")
    parser.add_argument("--waiting", action="store_true", help="pods that wait, and no streams")
    parser.add_argument("--pods", type=int, default=2000, help="the burst of --scale")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--profile", type=Path, help="profile the controller into this file")
    options = parser.parse_args()
    if options.quick:
        options.nodes, options.mixes, options.seconds = 6, options.mixes[:1], 30.0
        options.rate = 2.0
    if options.scale:
        geometry = load_geometry(SCALE_MODEL)
        nodes, pods = (100, 300) if options.quick else (1000, options.pods)
        found = kube_scale.scale(geometry, nodes, options.gpus, pods, options.seed, say)
        save(options, found)
        print("\n".join(kube_scale.tell(found)))
        return
    if options.waiting:
        geometry = load_geometry(options.model)
        save(options, waiting(geometry, options.nodes, options.gpus, 30, options.sides, say))
        return
    keep: dict[str, Any] = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_average_before": os.getloadavg(),
        "date": time.strftime("%Y-%m-%d"),
        "nodes": options.nodes,
        "gpus": options.nodes * options.gpus,
        "model": options.model,
        "rate": options.rate,
        "seconds": options.seconds,
        "wave": options.wave,
        "seed": options.seed,
    }
    streams(options, keep)
    keep["load_average_after"] = os.getloadavg()
    save(options, keep)
    print("\n".join(table(keep)))


if __name__ == "__main__":
    main()
