"""How many GPUs does a recorded trace need under each policy? Prints the tables of docs/traces.md.

    .venv/bin/python benchmarks/trace_table.py TRACE [--compress X] [--resamples N] [--seed N]
        [--workers N] [--json FILE]

TRACE is the pod list of Alibaba's GPU trace v2023, which is not part of the project. Every policy
and the oracle replay it at three scales, as recorded and with resampled weeks
(`slicewise.lab.timeline`): once on a cluster of a given size, then on clusters that shrink by one
node of 8 GPUs at a time, starting with one GPU per instance. The defaults take about half an hour
on one core.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cache
from pathlib import Path

from slicewise import Reason, load_geometry, policy
from slicewise.lab.timeline import Timeline, busy_begin, lay_out, resample_weeks
from slicewise.lab.trace import Job, Trace, fit, read_trace
from slicewise.lab.trace_oracle import Limit, OracleHost, limit_of
from slicewise.lab.trace_replay import EngineHost, Host, ReplayStats, replay
from slicewise.lab.workload import run_generator
from slicewise.policies.base import Policy, TablePolicy, Ties
from slicewise.policies.peers.node_first import NodeFirst
from slicewise.policies.peers.volcano import Volcano
from slicewise.policies.registry import policy_class, policy_names

MODEL = "A100-80GB"
NODE = 8
SIZES = {"1": 144, "0.4": 88, "0.2": 64}
"""GPUs by scale: whole nodes, with an offered load of about 0.85 when compressed 10 times."""
ORACLE = "oracle"
COMPARED_WITH = "first-fit"
TARGETS = {"1%": 0.01, "none": 0.0}
"""The share that may be rejected, of the requests and of the requested slices."""


def hosts() -> list[str]:
    """Return the names of the project's policies, the strict ones, the peers and the oracle."""
    ours = [n for n in policy_names() if policy_class(n).__module__.startswith("slicewise.")]
    return [*sorted(ours, key=lambda n: (n.startswith("peer-"), n.endswith("-strict"))), ORACLE]


@dataclass(frozen=True)
class Task:
    """One recording at one scale; number 0 is the original, the others are resampled."""

    path: str
    scale: str
    number: int
    compress: float
    seed: int


@dataclass(frozen=True)
class Measured:
    """The result of one policy on one recording."""

    scale: str
    number: int
    host: str
    load: float
    """Offered load on the cluster of the given size."""
    bound: int
    """GPUs needed to give every instance its own."""
    rejected: float
    rejected_slices: float
    """Rejected shares on the cluster of the given size."""
    needed: dict[str, int | None]
    """By target: the smallest size from which it is met; None if it is not met at the bound."""


@cache
def recorded(path: str) -> Trace:
    """Return the trace; each process reads it once."""
    return read_trace(Path(path))


def timeline_of(task: Task) -> Timeline:
    """Return the timeline of a recording, with resampled weeks unless it is the original."""
    trace = recorded(task.path)
    jobs = fit(trace, load_geometry(MODEL), Fraction(task.scale)).jobs
    begin = busy_begin(jobs)
    if task.number:
        rng = run_generator(task.seed, task.number)
        jobs = tuple(resample_weeks(jobs, begin, trace.end, rng))
    return lay_out(jobs, begin, Fraction(str(task.compress)))


class HighestGpuHost(EngineHost):
    """A host that records the highest GPU ever used."""

    used = 0
    """One more than the highest GPU that ever had an instance."""

    def enter(self, number: int, job: Job) -> Reason | None:
        """Place a job, then check the GPUs above the highest one used so far."""
        reason = super().enter(number, job)
        unused = range(self.totals.gpus - 1, self.used - 1, -1)
        self.used = next((g + 1 for g in unused if self.totals.state(g).mask), self.used)
        return reason


def hosted(timeline: Timeline, name: str, gpus: int, kind: type[EngineHost] = EngineHost) -> Host:
    """Return an empty cluster under a policy or the oracle."""
    geometry = load_geometry(MODEL)
    if name != ORACLE:
        return kind(geometry, gpus, policy(name), NODE)
    limit = limit_of(timeline.jobs, geometry)
    assert isinstance(limit, Limit)
    return OracleHost(geometry, gpus, limit)


def shares(stats: ReplayStats) -> tuple[float, float]:
    """Return the rejected shares of requests and of slices."""
    return (
        stats.rejected.total() / stats.arrivals.total(),
        stats.rejected_slices / stats.slices,
    )


def needed(timeline: Timeline, name: str, bound: int) -> dict[str, int | None]:
    """Return, by target, the smallest number of whole nodes from which it is met up to the bound.

    Rejections do not always increase as a cluster shrinks, so all sizes are tried from the bound
    down. One shortcut is exact: if nothing is rejected at the bound and ties go to the lowest GPU,
    removing GPUs that were never used changes nothing.
    """
    met: dict[str, int | None] = dict.fromkeys(TARGETS)
    still = dict(TARGETS)
    gpus = bound
    while gpus:
        kind = HighestGpuHost if gpus == bound else EngineHost
        host = hosted(timeline, name, gpus, kind)
        stats = replay(timeline, host)
        worst = math.inf if stats.preplaced_rejected else max(shares(stats))
        still = {target: share for target, share in still.items() if worst <= share}
        if not still:
            break
        if isinstance(host, HighestGpuHost) and worst == 0 and prefers_low(policy(name)):
            gpus = whole_nodes(host.used)
        met |= dict.fromkeys(still, gpus)
        gpus -= NODE
    return met


def prefers_low(chosen: Policy) -> bool:
    """Return whether a policy ranks GPUs or nodes independently and breaks ties by lowest id."""
    if isinstance(chosen, TablePolicy):
        return chosen.ties is not Ties.ROTATE
    return isinstance(chosen, (NodeFirst, Volcano))


def whole_nodes(gpus: int) -> int:
    """Round up to whole nodes."""
    return -(-gpus // NODE) * NODE


def measure(task: Task) -> list[Measured]:
    """Run every policy and the oracle on one recording."""
    timeline = timeline_of(task)
    given = SIZES[task.scale]
    bound = whole_nodes(timeline.peak_instances)
    load = timeline.offered_slices / (given * load_geometry(MODEL).slices)
    return [
        Measured(
            task.scale,
            task.number,
            name,
            load,
            bound,
            *shares(replay(timeline, hosted(timeline, name, given))),
            needed(timeline, name, bound),
        )
        for name in hosts()
    ]


def main(arguments: Sequence[str]) -> None:
    """Measure all recordings, report progress on standard error, and print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("trace")
    parser.add_argument("--compress", type=float, default=10)
    parser.add_argument("--resamples", type=int, default=11)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    first = Task(given.trace, "1", 0, given.compress, given.seed)
    tasks = [
        replace(first, scale=scale, number=number)
        for number in range(given.resamples + 1)
        for scale in SIZES
    ]
    found: list[Measured] = []
    with ProcessPoolExecutor(given.workers) as pool:
        for done, part in enumerate(pool.map(measure, tasks), 1):
            found += part
            if given.json is not None:
                with given.json.open("a") as file:
                    file.writelines(f"{json.dumps(asdict(each))}\n" for each in part)
            print(f"{done} of {len(tasks)} recordings", file=sys.stderr, flush=True)
    print("\n".join(tables(found)))


def tables(found: Sequence[Measured]) -> Iterator[str]:
    """Yield two tables per scale: rejections of a given cluster, and GPUs needed."""
    for scale, gpus in SIZES.items():
        here = [each for each in found if each.scale == scale]
        real = next(each for each in here if each.number == 0)
        loads, bounds = [each.load for each in here], [each.bound for each in here]
        yield (
            f"\n### Scale {scale}\n\nThe load offered to {gpus} GPUs is {real.load:.2f} "
            f"({min(loads):.2f} to {max(loads):.2f}). With one GPU per instance, "
            f"{real.bound} GPUs would be needed ({min(bounds)} to {max(bounds)}).\n"
        )
        yield from _table(
            f"Rejected on {gpus} GPUs, %",
            here,
            {
                "requests": [(each.host, each.number, 100 * each.rejected) for each in here],
                "slices": [(each.host, each.number, 100 * each.rejected_slices) for each in here],
            },
            2,
        )
        yield ""
        # A target that is missed even at the bound counts as larger than any size.
        yield from _table(
            "GPUs to reject",
            here,
            {
                target if target == "none" else f"at most {target}": [
                    (each.host, each.number, each.needed[target] or math.inf) for each in here
                ]
                for target in TARGETS
            },
            0,
        )


def _table(
    title: str,
    here: Sequence[Measured],
    figures: Mapping[str, Sequence[tuple[str, int, float]]],
    digits: int,
) -> Iterator[str]:
    """Yield a row per policy: each figure as recorded, resampled, and compared by count."""
    lines = [[title]]
    for heading in figures:
        lines[0] += [heading, "resampled", "less / more"]
    for name in dict.fromkeys(each.host for each in here):
        cells = [f"`{name}`"]
        for values in figures.values():
            known = {(host, number): value for host, number, value in values}
            real, *drawn = (value for host, _, value in values if host == name)
            cells += [_number(real, digits), _spread(drawn, digits), _compared(known, name)]
        lines.append(cells)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = [f"{'-' * (width + 1)}:" for width in widths]
    rule[0] = "-" * (widths[0] + 2)
    for number, cells in enumerate(lines):
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        padded[0] = cells[0].ljust(widths[0])
        yield f"| {' | '.join(padded)} |"
        if number == 0:
            yield f"|{'|'.join(rule)}|"


def _number(value: float, digits: int) -> str:
    return "-" if math.isinf(value) else f"{value:.{digits}f}"


def _spread(values: Sequence[float], digits: int) -> str:
    """Format median and range."""
    if not values or math.isinf(min(values)):
        return ""
    middle = statistics.median_high(values)
    low, high = (_number(value, max(0, digits - 1)) for value in (min(values), max(values)))
    return f"{_number(middle, digits)} ({low} - {high})"


def _compared(values: Mapping[tuple[str, int], float], name: str) -> str:
    """Count the resampled recordings with a lower and a higher figure than the reference."""
    if name == COMPARED_WITH:
        return ""
    pairs = [
        (value, values[COMPARED_WITH, number])
        for (host, number), value in values.items()
        if host == name and number
    ]
    return f"{sum(a < b for a, b in pairs)} / {sum(a > b for a, b in pairs)}"


if __name__ == "__main__":  # worker processes import this file too
    main(sys.argv[1:])
