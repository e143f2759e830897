"""How many GPUs the requests of a recorded trace need under each policy.

A recording is one sample. One GPU more changes which requests find a place and so what comes after
them, and a larger cluster may reject more than a smaller one. So no interval is given. The size
needed is the smallest from which on *every* size tried meets the target, and so many sizes beyond
it are tried one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Geometry
from slicewise.policies.base import Policy
from slicewise.sim.experiment import ORACLE
from slicewise.sim.oracle_host import Limit, OracleHost, limit_of
from slicewise.sim.planning import (
    Count,
    Watch,
    check_names,
    check_step,
    check_target,
    saved_percent,
)
from slicewise.sim.replay import MAX_GPUS, EngineHost, Host, Row, figures, replay
from slicewise.sim.sizing import Search, exactly
from slicewise.sim.timeline import Timeline

NEAREST, WINDOW_SHARE = 5, 20
"""How many sizes on either side of the answer are tried: so many, or one for every so many GPUs
of demand if that is more."""

SHARES = {Count.REQUESTS: "rejected_share", Count.SLICES: "rejected_slices_share"}
"""What the shares are called in the figures of a replay."""

MakeHost = Callable[[int], Host]
"""An empty cluster of so many GPUs."""


@dataclass(frozen=True)
class TraceQuestion:
    """What is asked: the requests, and the share of them that may be rejected."""

    timeline: Timeline
    geometry: Geometry
    policies: tuple[Policy, ...]
    target: float = 0.001
    count: Count = Count.REQUESTS
    reference: str = "first-fit"
    step: int = 1
    gpus_per_node: int = 8
    oracle: bool = True

    def __post_init__(self) -> None:
        check_target(self.target)
        check_step(self.step)
        check_names(self.policies, self.reference, self.oracle)
        if not 1 <= self.gpus_per_node <= MAX_GPUS:
            raise SlicewiseError(f"gpus per node must be 1 to {MAX_GPUS}, not {self.gpus_per_node}")

    @property
    def offered_gpus(self) -> float:
        """Slices that all requests together would hold, averaged over time, in whole GPUs."""
        return self.timeline.offered_slices / self.geometry.slices


@dataclass
class Replayed:
    """What is known of one policy."""

    policy: str
    count: Count
    host: MakeHost
    search: Search
    figures: dict[int, Row] = field(default_factory=dict)
    """By size: the figures of the replay."""

    def on_cluster(self, timeline: Timeline, gpus: int) -> None:
        """Replay the trace on a cluster of so many GPUs."""
        host = self.host(gpus)
        found = figures(replay(timeline, host), host.totals)
        share, without = found[SHARES[self.count]], found["preplaced_rejected"]
        assert isinstance(share, float)
        # Who was there beforehand is not counted as an arrival, but must have a place as well.
        self.search.record(gpus, exactly(1.0 if without else share))
        self.figures[gpus] = found


def plan_trace(question: TraceQuestion, watch: Watch) -> tuple[list[Replayed], str | None]:
    """Find the smallest cluster for every policy; also why the limit is not among them."""
    geometry, timeline = question.geometry, question.timeline
    hosts = {policy.name: _engine(question, policy) for policy in question.policies}
    limit = limit_of(timeline.jobs, geometry) if question.oracle else "it was not asked for"
    if isinstance(limit, Limit):
        hosts[ORACLE] = _limit(geometry, limit)
    found = [
        Replayed(name, question.count, host, _search(question)) for name, host in hosts.items()
    ]
    while trials := [(each, gpus) for each in found for gpus in each.search.next_sizes()]:
        with watch(len(trials), len(trials)) as tick:
            for each, gpus in trials:
                each.on_cluster(timeline, gpus)
                tick(1)
    return found, limit if isinstance(limit, str) else None


def _engine(question: TraceQuestion, policy: Policy) -> MakeHost:
    return lambda gpus: EngineHost(question.geometry, gpus, policy, question.gpus_per_node)


def _limit(geometry: Geometry, limit: Limit) -> MakeHost:
    return lambda gpus: OracleHost(geometry, gpus, limit)


def _search(question: TraceQuestion) -> Search:
    start = max(1, math.ceil(question.offered_gpus))
    return Search(
        question.target,
        start=start,
        spacing=max(question.step, math.ceil(start / WINDOW_SHARE)),
        least=1,
        # So many instances are there at most: each could have a GPU to itself.
        most=min(MAX_GPUS, max(start, question.timeline.peak_instances)),
        step=question.step,
        window=max(NEAREST, math.ceil(start / WINDOW_SHARE / question.step)),
    )


def trace_plan_rows(
    question: TraceQuestion, found: Sequence[Replayed], missing: str | None
) -> list[Row]:
    """A row per policy: GPUs needed, the sizes about which chance decides, and what is saved."""
    needed = {each.policy: each.search.needed for each in found}
    rows: list[Row] = []
    for each in found:
        gpus = each.search.needed
        there = None if gpus is None else each.figures[gpus]
        above = None
        if gpus is not None and (limit := needed.get(ORACLE)) is not None:
            above = gpus - limit
        base = needed[question.reference]
        rows.append(
            {
                "policy": each.policy,
                "model": question.geometry.model,
                "offered_gpus": question.offered_gpus,
                "target_rejected_share": question.target,
                "count": str(question.count),
                "arrivals": len(question.timeline.arrivals),
                "needed_gpus": gpus,
                "first_gpus": each.search.interval[0],
                "tried_to_gpus": max(each.figures),
                "load": None if gpus is None else question.offered_gpus / gpus,
                **{
                    name: None if there is None else there[name]
                    for name in ("rejected", "rejected_share", "rejected_slices_share")
                },
                "compared_with": question.reference,
                "saved_gpus": None if gpus is None or base is None else base - gpus,
                "saved_percent": saved_percent(gpus, base),
                "above_limit_gpus": above,
                "oracle_missing": missing,
            }
        )
    return rows


def trace_curve_rows(question: TraceQuestion, found: Sequence[Replayed]) -> list[Row]:
    """A row for every cluster that was tried."""
    return [
        {
            "policy": each.policy,
            "gpus": gpus,
            "load": question.offered_gpus / gpus,
            **{
                name: each.figures[gpus][name]
                for name in (
                    "rejected",
                    "rejected_share",
                    "rejected_slices_share",
                    "preplaced_rejected",
                )
            },
        }
        for each in found
        for gpus in sorted(each.figures)
    ]
