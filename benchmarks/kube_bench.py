"""Compare slicewise with the stock scheduler on a Kubernetes cluster: pods running, and speed.

Runs against a real control plane (`tests/kubernetes_e2e/plane.py`):

- stream: the same pods, once with NVIDIA's class, where kube-scheduler takes the first matching
  device, and once with slicewise's; each on a fresh control plane. Measures pods running, slices in
  use, pods that are stuck or give up, fragmentation, time to running, and the speed of a burst;
- waiting (`--waiting`): pods wait for GPUs that become free one by one; measures how soon they are
  in use again;
- scale (`--scale`): a thousand nodes of eight GPUs; measures publishing, the controller's memory,
  its start-up time, and decisions per second.

Run it from the root of the project, with nothing else on the machine. Results are written to FILE
after each stream; with an existing FILE it continues where it stopped.

    .venv/bin/python -m benchmarks.kube_bench [--quick] [--seeds 1 2 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

from benchmarks import kube_scale
from benchmarks.kube_forecast import forecast
from benchmarks.kube_plan import Plan
from benchmarks.kube_sites import Allocator, site
from benchmarks.kube_stream import Stream
from benchmarks.kube_table import table, tell_stream
from benchmarks.kube_waiting import waiting

from slicewise import load_geometry
from slicewise.lab.mix import PUBLISHED, parse_mix

SIDES = ("stock", "slicewise")
SCALE_MODEL = "H100-80GB"
SETTINGS = (
    "nodes", "gpus", "model", "rate", "seconds", "burst",
    "wave", "turnovers", "together", "step", "patience", "cpus",
)  # fmt: skip
"""Options that must be equal for results to share a file."""


def streams(options: argparse.Namespace, keep: dict[str, Any]) -> None:
    """Run all streams one after the other, and save each result."""
    geometry = load_geometry(options.model)
    wanted = [
        (seed, load, name, side)
        for seed in options.seeds
        for load in options.loads
        for name in options.mixes
        for side in options.sides
    ]
    done = {(one["seed"], one["load"], one["mix"], one["side"]) for one in keep["streams"]}
    for number, key in enumerate(wanted):
        if key in done:
            continue
        seed, load, name, side = key
        say(f"  {name}, {side}, load {load:g}, seed {seed} ({number + 1} of {len(wanted)})")
        began = time.monotonic()
        mix = parse_mix(name, geometry)
        plan = Plan(
            load=load,
            rate=options.rate,
            seconds=options.seconds,
            burst=options.burst,
            wave=options.wave,
            turnovers=options.turnovers,
            together=options.together,
            step=options.step,
            patience=options.patience,
            cpus=options.cpus,
            seed=seed,
        )
        foretold = forecast(mix, plan, options.nodes, options.gpus, side)
        with site(geometry, options.nodes, options.gpus) as place:
            allocator = Allocator(side, place.plane, options.profile)
            try:
                found = Stream(place, allocator, mix, plan, say).run()
            finally:
                allocator.stop()
        row = {"seed": seed, "load": load, "mix": name, "side": side}
        keep["streams"].append({**row, "forecast": foretold, **found})
        save(options, keep)
        for line in tell_stream(keep["streams"][-1]):
            say(f"    {line}")
        say(f"    took {time.monotonic() - began:.0f} s")


def so_far(options: argparse.Namespace) -> dict[str, Any]:
    """Return the saved results of an earlier run, or an empty result."""
    settings = {name: str(getattr(options, name)) for name in SETTINGS}
    if options.json and options.json.exists():
        keep: dict[str, Any] = json.loads(options.json.read_text())
        if keep.get("settings") != settings:
            raise SystemExit(
                f"{options.json} is of a run with other settings: {keep.get('settings')}, not "
                f"{settings}; give another file"
            )
        return keep
    return {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "settings": settings,
        "streams": [],
    }


def say(text: str) -> None:
    """Print progress immediately."""
    print(text, flush=True)


def save(options: argparse.Namespace, keep: dict[str, Any]) -> None:
    """Save the results so far."""
    if options.json:
        draft = options.json.with_suffix(".draft")
        draft.write_text(json.dumps(keep, indent=1) + "\n")
        draft.replace(options.json)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    made.add_argument("--nodes", type=int, default=50)
    made.add_argument("--gpus", type=int, default=8, help="on each node")
    made.add_argument("--model", default="A100-80GB")
    made.add_argument("--mixes", nargs="+", default=list(PUBLISHED))
    made.add_argument("--sides", nargs="+", default=list(SIDES))
    made.add_argument("--loads", nargs="+", type=float, default=[1.0])
    made.add_argument("--seeds", nargs="+", type=int, default=[1])
    made.add_argument("--rate", type=float, default=1.0, help="pods per second")
    made.add_argument("--seconds", type=float, default=60.0, help="of the open stream")
    made.add_argument("--burst", type=int, default=40, help="pods into the empty cluster")
    made.add_argument("--wave", type=int, default=5, help="nodes that age at a time; 0: all")
    made.add_argument("--turnovers", type=float, default=1.5, help="mean lifetimes of ageing")
    made.add_argument("--together", type=float, default=0.375, help="the same, with all nodes")
    made.add_argument("--step", type=float, default=1 / 16, help="mean lifetimes per step")
    made.add_argument(
        "--patience", type=float, default=30.0, help="seconds until a pod gives up; inf: never"
    )
    made.add_argument("--cpus", type=int, default=2, help="CPUs per slice; 0: almost none")
    made.add_argument("--quick", action="store_true", help="few nodes and one distribution")
    made.add_argument("--scale", action="store_true", help="a thousand nodes, and no streams")
    made.add_argument("--waiting", action="store_true", help="pods that wait, and no streams")
    made.add_argument("--pods", type=int, default=2000, help="the burst of --scale")
    made.add_argument("--json", type=Path, help="results file; continues an existing one")
    made.add_argument("--profile", type=Path, help="profile the controller into this file")
    return made


def main() -> None:
    """Measure and print the tables."""
    options = parser().parse_args()
    if options.quick:
        options.nodes, options.mixes, options.seconds = 6, options.mixes[:1], 30.0
        options.wave, options.turnovers, options.step = 3, 1.0, 0.125
    if options.scale:
        geometry = load_geometry(SCALE_MODEL)
        nodes, pods = (100, 300) if options.quick else (1000, options.pods)
        found = kube_scale.scale(geometry, nodes, options.gpus, pods, options.seeds[0], say)
        save(options, found)
        print("\n".join(kube_scale.tell(found)))
        return
    if options.waiting:
        geometry = load_geometry(options.model)
        save(options, waiting(geometry, options.nodes, options.gpus, 30, options.sides, say))
        return
    keep = so_far(options)
    streams(options, keep)
    print("\n".join(table(keep["streams"])))


if __name__ == "__main__":
    main()
