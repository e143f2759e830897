"""Replays a trace on a cluster and measures rejections and utilization.

`replay` goes through the events of a timeline; a `Host` places the jobs. `EngineHost` is the
scheduler under one policy, `OracleHost` the limit. Other schedulers can be measured on the same
events by implementing `Host`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from slicewise.core.cluster import Cluster, Instance
from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Geometry
from slicewise.core.request import Reason, Rejection
from slicewise.engine.scheduler import Scheduler
from slicewise.lab.experiment import ORACLE, Tick
from slicewise.lab.timeline import Timeline
from slicewise.lab.trace import Job
from slicewise.lab.trace_oracle import Limit, OracleHost, limit_of
from slicewise.policies.base import Policy

Row = dict[str, object]

GPUS_PER_NODE = 8
"""The default; it matters to policies that choose a node first."""

MAX_GPUS = 1_000_000
"""The engine's index of a larger cluster takes gigabytes."""


class Totals(Protocol):
    """The measured totals of a cluster."""

    @property
    def gpus(self) -> int:
        """The number of GPUs."""

    @property
    def slices(self) -> int:
        """Memory slices of all GPUs together."""

    @property
    def occupied_slices(self) -> int:
        """Memory slices occupied by instances."""

    @property
    def active_gpus(self) -> int | None:
        """GPUs with at least one instance; None if instances are on no particular GPU."""

    def fragmentation(self) -> float | None:
        """Return the mean F over all GPUs; None if instances are on no particular GPU."""


class Host(Protocol):
    """Places and releases jobs, identified by their index in the timeline."""

    @property
    def totals(self) -> Totals:
        """The current totals of the cluster."""

    def enter(self, number: int, job: Job) -> Reason | None:
        """Place a whole job, or nothing of it and return the reason."""

    def leave(self, number: int) -> None:
        """Release a placed job."""


class EngineHost:
    """A cluster under a policy of the scheduler, without moves."""

    def __init__(
        self, geometry: Geometry, gpus: int, policy: Policy, gpus_per_node: int = GPUS_PER_NODE
    ) -> None:
        self.totals = Cluster.of(geometry, gpus, gpus_per_node)
        self._scheduler = Scheduler(self.totals, policy)
        self._held: dict[int, tuple[Instance, ...]] = {}

    def enter(self, number: int, job: Job) -> Reason | None:
        """Place all instances of a job, or none."""
        outcome = self._scheduler.submit_all(job.request, job.count)
        if isinstance(outcome, Rejection):
            return outcome.reason
        self._held[number] = outcome
        return None

    def leave(self, number: int) -> None:
        """Release all instances of a job."""
        for instance in self._held.pop(number):
            self._scheduler.release(instance)


@dataclass
class ReplayStats:
    """The counts and sums of one replay; sums over time are in seconds."""

    arrivals: Counter[str] = field(default_factory=Counter)
    """By kind of request."""
    rejected: Counter[tuple[str, Reason]] = field(default_factory=Counter)
    """By kind of request and reason."""
    tenants: Counter[tuple[str, bool]] = field(default_factory=Counter)
    """By tenant, and whether it was rejected."""
    slices: int = 0
    rejected_slices: int = 0
    preplaced_rejected: int = 0
    """The number of jobs that could not be placed beforehand."""
    seconds: float = 0
    occupied: float = 0
    active: float = 0
    fragmentation: float = 0
    peak_occupied: int = 0
    peak_active: int = 0


def replay(timeline: Timeline, host: Host) -> ReplayStats:
    """Place and release the jobs of a timeline on a host; return the counts."""
    stats = ReplayStats()
    totals = host.totals
    inside: set[int] = set()
    now = 0.0
    for seconds, number, arrives in timeline.events:
        if seconds > now:
            passed = seconds - now
            stats.occupied += passed * totals.occupied_slices
            stats.active += passed * (totals.active_gpus or 0)
            stats.fragmentation += passed * (totals.fragmentation() or 0)
            now = seconds
        if not arrives:
            if number in inside:
                inside.remove(number)
                host.leave(number)
            continue
        job = timeline.jobs[number]
        reason = host.enter(number, job)
        if reason is None:
            inside.add(number)
            stats.peak_occupied = max(stats.peak_occupied, totals.occupied_slices)
            stats.peak_active = max(stats.peak_active, totals.active_gpus or 0)
        if number >= timeline.preplaced:
            _count(stats, job, reason)
        elif reason is not None:
            stats.preplaced_rejected += 1
    stats.seconds = now
    return stats


def _count(stats: ReplayStats, job: Job, reason: Reason | None) -> None:
    stats.arrivals[job.label] += 1
    stats.tenants[job.tenant, reason is not None] += 1
    stats.slices += job.slices
    if reason is not None:
        stats.rejected[job.label, reason] += 1
        stats.rejected_slices += job.slices


def figures(stats: ReplayStats, totals: Totals) -> Row:
    """Return the figures of one replay; None if a figure is undefined.

    Means over time are undefined if no time passed, and figures of positions if instances are on
    no particular GPU.
    """
    arrivals, rejected = stats.arrivals.total(), stats.rejected.total()
    has_positions = totals.active_gpus is not None

    def mean(total: float, whole: int, known: bool = True) -> float | None:
        return total / stats.seconds / whole if stats.seconds and known else None

    return {
        "arrivals": arrivals,
        "rejected": rejected,
        "rejected_share": rejected / arrivals,
        "rejected_slices_share": stats.rejected_slices / stats.slices,
        "utilization_percent": mean(100 * stats.occupied, totals.slices),
        "peak_utilization_percent": 100 * stats.peak_occupied / totals.slices,
        "active_gpus_percent": mean(100 * stats.active, totals.gpus, has_positions),
        "peak_active_gpus_percent": 100 * stats.peak_active / totals.gpus
        if has_positions
        else None,
        "fragmentation": mean(stats.fragmentation, 1, has_positions),
        "preplaced_rejected": stats.preplaced_rejected,
        "rejected_by_reason": {
            str(reason): sum(n for (_, why), n in stats.rejected.items() if why is reason)
            for reason in Reason
        },
        "by_profile": {
            label: {
                "arrivals": stats.arrivals[label],
                **{str(reason): stats.rejected[label, reason] for reason in Reason},
            }
            for label in sorted(stats.arrivals)
        },
        "by_tenant": {
            tenant: {
                "arrivals": stats.tenants[tenant, True] + stats.tenants[tenant, False],
                "rejected": stats.tenants[tenant, True],
            }
            for tenant in sorted({tenant for tenant, _ in stats.tenants if tenant})
        },
    }


def compare(
    timeline: Timeline,
    geometry: Geometry,
    gpus: int,
    policies: Sequence[Policy],
    tick: Tick,
    gpus_per_node: int = GPUS_PER_NODE,
    oracle: bool = True,
) -> list[Row]:
    """Return a row per policy, on the same events, and one for the oracle if requested.

    Every row has the oracle's share of rejections, or None and the reason in ``oracle_missing``.
    ``tick`` is called after each row.
    """
    if not policies:
        raise SlicewiseError("a replay needs at least one policy")
    if oracle and any(policy.name == ORACLE for policy in policies):
        raise SlicewiseError(f"{ORACLE!r} is the name of the limit: rename the policy")
    rows: list[Row] = []
    for policy in policies:
        host = EngineHost(geometry, gpus, policy, gpus_per_node)
        rows.append({"policy": policy.name, **figures(replay(timeline, host), host.totals)})
        tick(1)
    limit = limit_of(timeline.jobs, geometry) if oracle else "it was not requested"
    missing = limit if isinstance(limit, str) else None
    share: object = None
    if isinstance(limit, Limit):
        free = OracleHost(geometry, gpus, limit)
        rows.append({"policy": ORACLE, **figures(replay(timeline, free), free.totals)})
        share = rows[-1]["rejected_share"]
    elif oracle:
        rows.append({**_unknown(rows[0]), "policy": ORACLE})
    if oracle:
        tick(1)
    return [{**row, "oracle_rejected_share": share, "oracle_missing": missing} for row in rows]


def _unknown(row: Row) -> Row:
    """Return the row of an oracle that did not run: the arrivals, and None for the rest."""
    known: Row = {}
    for name, value in row.items():
        if isinstance(value, dict):
            known[name] = _unknown(value)
        else:
            known[name] = value if name == "arrivals" else None
    return known
