"""Compare the decisions and the start of this checkout with those of another one, in one run.

    python -m benchmarks.compare_decisions ../old

Decisions are timed by `slicewise bench` of each checkout, engine and compiled, in processor time.
The start is that of `slicewise serve` on a database with many allocations, which each checkout
fills itself. Rounds alternate between the checkouts, so that other load on the machine affects
both. Processor times are less sensitive to it than the time of a start.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from benchmarks.bench_isolation import Server

HERE = Path(__file__).resolve().parents[1]
RUN = (
    "import time; time.perf_counter_ns = time.process_time_ns; "
    "from slicewise.cli.main import run; run()"
)
"""The command, which then times decisions by the processor time of its only busy thread."""


def decision_times(source: Path, gpus: int) -> dict[str, float]:
    """Nanoseconds of a decision with the default policy, by path."""
    command = [sys.executable, "-c", RUN, "bench", "--policy", "least-lost"]
    done = subprocess.run(
        [*command, "--gpus", str(gpus), "--json"],
        env=os.environ | {"PYTHONPATH": str(source / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    rows = json.loads(done.stdout)["decisions"]
    return {row["path"]: row["ns_per_decision"] for row in rows}


def start_seconds(folder: Path, source: Path) -> tuple[float, float]:
    """How long a service takes to lead, on a folder that exists; and its processor time."""
    begun = time.perf_counter()
    with Server(folder, source) as server:
        return time.perf_counter() - begun, server.processor_seconds()


def _report(what: str, here: list[float], other: list[float], unit: str) -> None:
    """Print medians, and how much faster this checkout is: above 1 it is faster."""
    ratios = sorted(b / a for a, b in zip(here, other, strict=True))
    print(
        f"{what:12} {statistics.median(here):10.1f} {statistics.median(other):10.1f} {unit}   "
        f"speed ratio {statistics.median(ratios):.2f} ({', '.join(f'{r:.2f}' for r in ratios)}), "
        f"of the best {min(other) / min(here):.2f}",
        flush=True,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gpus", type=int, default=10_000)
    parser.add_argument("--allocations", type=int, default=100_000)
    options = parser.parse_args()
    checkouts = {"here": HERE, "other": options.other}
    print(f"{'':12} {'here':>10} {'other':>10}")
    times: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in range(options.rounds):
        for name, source in checkouts.items():
            for path, nanoseconds in decision_times(source, options.gpus).items():
                times[path, name].append(nanoseconds)
    for path in ("engine", "compiled"):
        _report(path, times[path, "here"], times[path, "other"], "ns")
    with tempfile.TemporaryDirectory() as folder:
        for name, source in checkouts.items():
            with Server(Path(folder) / name, source) as server:
                server.populate(options.allocations, options.allocations)
        for _ in range(options.rounds):
            for name, source in checkouts.items():
                wall, processor = start_seconds(Path(folder) / name, source)
                times["start", name].append(wall)
                times["processor", name].append(processor)
    _report("start", times["start", "here"], times["start", "other"], "s")
    _report("its CPU time", times["processor", "here"], times["processor", "other"], "s")


if __name__ == "__main__":
    main()
