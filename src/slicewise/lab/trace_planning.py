"""Finds the number of GPUs that a recorded trace needs under each policy.

A recording is one sample, so there is no interval. One more GPU changes which requests are placed,
and a larger cluster may reject more than a smaller one. The size needed is the smallest such that
it and *every* larger size tried meet the target; several sizes around it are tried one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Geometry
from slicewise.lab.experiment import ORACLE
from slicewise.lab.planning import (
    Count,
    Watch,
    check_names,
    check_step,
    check_target,
    saved_percent,
)
from slicewise.lab.sizing import Search, exactly
from slicewise.lab.timeline import Timeline
from slicewise.lab.trace_oracle import Limit, OracleHost, limit_of
from slicewise.lab.trace_replay import MAX_GPUS, EngineHost, Host, Row, figures, replay
from slicewise.policies.base import Policy

NEAREST, WINDOW_SHARE = 5, 20
"""The sizes tried on either side of the answer: at least the first number, or one per second
number of GPUs of demand."""

SHARES = {Count.REQUESTS: "rejected_share", Count.SLICES: "rejected_slices_share"}
"""The columns of the shares in the figures of a replay."""

MakeHost = Callable[[int], Host]
"""Creates an empty cluster with a number of GPUs."""


@dataclass(frozen=True)
class TraceQuestion:
    """The requests, and the share of them that may be rejected."""

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
        """The slices that all requests would occupy, averaged over time, in whole GPUs."""
        return self.timeline.offered_slices / self.geometry.slices


@dataclass
class Replayed:
    """The search for one policy, with its results."""

    policy: str
    count: Count
    host: MakeHost
    search: Search
    figures: dict[int, Row] = field(default_factory=dict)
    """By size: the figures of the replay."""

    def on_cluster(self, timeline: Timeline, gpus: int) -> None:
        """Replay the trace on a cluster of this size."""
        host = self.host(gpus)
        found = figures(replay(timeline, host), host.totals)
        share, without = found[SHARES[self.count]], found["preplaced_rejected"]
        assert isinstance(share, float)
        # Jobs placed beforehand are not counted as arrivals, but all of them must fit.
        self.search.record(gpus, exactly(1.0 if without else share))
        self.figures[gpus] = found


def plan_trace(question: TraceQuestion, watch: Watch) -> tuple[list[Replayed], str | None]:
    """Find the smallest cluster for every policy; also return why there is no limit."""
    geometry, timeline = question.geometry, question.timeline
    hosts = {policy.name: _engine(question, policy) for policy in question.policies}
    limit = limit_of(timeline.jobs, geometry) if question.oracle else "it was not requested"
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
        # The maximum number of instances at a time: each could have its own GPU.
        most=min(MAX_GPUS, max(start, question.timeline.peak_instances)),
        step=question.step,
        window=max(NEAREST, math.ceil(start / WINDOW_SHARE / question.step)),
    )


def trace_plan_rows(
    question: TraceQuestion, found: Sequence[Replayed], missing: str | None
) -> list[Row]:
    """Return a row per policy: GPUs needed, the first size that meets by chance, GPUs saved."""
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
    """Return a row per cluster tried."""
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
