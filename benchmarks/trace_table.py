"""How many GPUs does a recorded trace need under each policy? Prints the tables of docs/traces.md.

    .venv/bin/python benchmarks/trace_table.py TRACE [--compress X] [--resamples N] [--seed N]
        [--workers N] [--json FILE]

TRACE is the pod list of Alibaba's GPU trace v2023, which is not part of the project. Every policy
and the oracle replay it at three scales, as it was recorded and on recordings whose weeks were
drawn anew (`slicewise.sim.resampling`): once on a cluster of a given size, then on fewer and fewer
nodes of 8 GPUs, down from as many as would give every instance a GPU to itself. The defaults take
about half an hour on one core.
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
from slicewise.policies.base import Policy, TablePolicy, Ties
from slicewise.policies.peers.node_first import NodeFirst
from slicewise.policies.peers.volcano import Volcano
from slicewise.policies.registry import policy_class, policy_names
from slicewise.sim.oracle_host import Limit, OracleHost, limit_of
from slicewise.sim.replay import EngineHost, Host, Tally, replay
from slicewise.sim.resampling import resample_weeks
from slicewise.sim.timeline import Timeline, busy_begin, lay_out
from slicewise.sim.trace import Job, Trace, fit, read_trace
from slicewise.sim.workload import run_generator

MODEL = "A100-80GB"
NODE = 8
SIZES = {"1": 144, "0.4": 88, "0.2": 64}
"""By scale: whole nodes of 8, for an offered load of about 0.85 when compressed 10 times."""
ORACLE = "oracle"
COMPARED_WITH = "first-fit"
TARGETS = {"1%": 0.01, "none": 0.0}
"""What may be rejected, of the requests and of the slices asked for."""


def hosts() -> list[str]:
    """The project's own policies, the strict ones, the rules of other systems, the oracle."""
    ours = [n for n in policy_names() if policy_class(n).__module__.startswith("slicewise.")]
    return [*sorted(ours, key=lambda n: (n.startswith("peer-"), n.endswith("-strict"))), ORACLE]


@dataclass(frozen=True)
class Task:
    """One recording at one scale; number 0 is the real one."""

    path: str
    scale: str
    number: int
    compress: float
    seed: int


@dataclass(frozen=True)
class Measured:
    """What one policy does with one recording."""

    scale: str
    number: int
    host: str
    load: float
    """Offered, on the cluster of the given size."""
    bound: int
    """GPUs on which every instance could have one to itself."""
    rejected: float
    rejected_slices: float
    """Shares on the cluster of the given size."""
    needed: dict[str, int | None]
    """By target: the GPUs from which on it is met; None when not even the bound will do."""


@cache
def recorded(path: str) -> Trace:
    """The trace, read once a process."""
    return read_trace(Path(path))


def timeline_of(task: Task) -> Timeline:
    """The recording laid out in time; its weeks drawn anew unless it is the real one."""
    trace = recorded(task.path)
    jobs = fit(trace, load_geometry(MODEL), Fraction(task.scale)).jobs
    begin = busy_begin(jobs)
    if task.number:
        rng = run_generator(task.seed, task.number)
        jobs = tuple(resample_weeks(jobs, begin, trace.end, rng))
    return lay_out(jobs, begin, Fraction(str(task.compress)))


class Reaching(EngineHost):
    """Knows how far up the GPUs it ever went."""

    reach = 0
    """One more than the highest GPU that ever had an instance."""

    def enter(self, number: int, job: Job) -> Reason | None:
        """As ever; then look at the GPUs above, from the top."""
        reason = super().enter(number, job)
        unused = range(self.totals.gpus - 1, self.reach - 1, -1)
        self.reach = next((g + 1 for g in unused if self.totals.state(g).mask), self.reach)
        return reason


def hosted(timeline: Timeline, name: str, gpus: int, kind: type[EngineHost] = EngineHost) -> Host:
    """An empty cluster under a policy or the oracle."""
    geometry = load_geometry(MODEL)
    if name != ORACLE:
        return kind(geometry, gpus, policy(name), NODE)
    limit = limit_of(timeline.jobs, geometry)
    assert isinstance(limit, Limit)
    return OracleHost(geometry, gpus, limit)


def shares(tally: Tally) -> tuple[float, float]:
    """Rejected requests and slices, of those that arrived."""
    return (
        tally.rejected.total() / tally.arrivals.total(),
        tally.rejected_slices / tally.slices,
    )


def needed(timeline: Timeline, name: str, bound: int) -> dict[str, int | None]:
    """By target: the size from which on it is met, whole nodes up to the bound.

    Rejections need not become more as a cluster shrinks, so all sizes are tried from the bound
    down. They are alike down to the last node that is used on the bound, if nothing is rejected
    there and ties go to the lowest GPU: who is not chosen may as well not be there.
    """
    met: dict[str, int | None] = dict.fromkeys(TARGETS)
    still = dict(TARGETS)
    gpus = bound
    while gpus:
        kind = Reaching if gpus == bound else EngineHost
        host = hosted(timeline, name, gpus, kind)
        tally = replay(timeline, host)
        worst = math.inf if tally.preplaced_rejected else max(shares(tally))
        still = {target: share for target, share in still.items() if worst <= share}
        if not still:
            break
        if isinstance(host, Reaching) and worst == 0 and prefers_low(policy(name)):
            gpus = whole_nodes(host.reach)
        met |= dict.fromkeys(still, gpus)
        gpus -= NODE
    return met


def prefers_low(chosen: Policy) -> bool:
    """Whether it judges GPUs, or nodes, each by itself and takes the first of equal ones."""
    if isinstance(chosen, TablePolicy):
        return chosen.ties is not Ties.ROTATE
    return isinstance(chosen, (NodeFirst, Volcano))


def whole_nodes(gpus: int) -> int:
    """As many GPUs or a few more."""
    return -(-gpus // NODE) * NODE


def measure(task: Task) -> list[Measured]:
    """Every policy and the oracle on one recording."""
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
    """Measure, with a line on standard error now and then, and print the tables."""
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
    """Two tables a scale: what a given cluster rejects, and how many GPUs are needed."""
    for scale, gpus in SIZES.items():
        here = [each for each in found if each.scale == scale]
        real = next(each for each in here if each.number == 0)
        loads, bounds = [each.load for each in here], [each.bound for each in here]
        yield (
            f"\n### Scale {scale}\n\nThe load offered to {gpus} GPUs is {real.load:.2f} "
            f"({min(loads):.2f} to {max(loads):.2f}), every instance alone would take "
            f"{real.bound} GPUs ({min(bounds)} to {max(bounds)}).\n"
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
        # Who falls short even at the bound needs more than all of them, as far as is known.
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
    """A line for each policy; for every figure the real value, those drawn anew, and a count."""
    lines = [[title]]
    for heading in figures:
        lines[0] += [heading, "drawn anew", "less / more"]
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
    """Median and range."""
    if not values or math.isinf(min(values)):
        return ""
    middle = statistics.median_high(values)
    low, high = (_number(value, max(0, digits - 1)) for value in (min(values), max(values)))
    return f"{_number(middle, digits)} ({low} - {high})"


def _compared(values: Mapping[tuple[str, int], float], name: str) -> str:
    """On how many of the recordings drawn anew it is less than the reference, and more."""
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
