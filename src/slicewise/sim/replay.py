"""A trace replayed on a cluster: who finds a place, and how the cluster looks meanwhile.

`replay` walks through the events of a timeline and measures; where jobs go is up to a `Host`.
`EngineHost` is the scheduler under one of its policies, `OracleHost` the limit of all of them.
Anything else that can take jobs in and let them go is measured by the same walk on the same
events when it is written as another `Host`.
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
from slicewise.policies.base import Policy
from slicewise.sim.experiment import ORACLE, Tick
from slicewise.sim.oracle_host import Limit, OracleHost, limit_of
from slicewise.sim.timeline import Timeline
from slicewise.sim.trace import Job

Row = dict[str, object]

GPUS_PER_NODE = 8
"""What a node has unless said otherwise; it matters to policies that choose a node first."""

MAX_GPUS = 1_000_000
"""A replay goes through the engine, whose index of larger clusters takes gigabytes."""


class Totals(Protocol):
    """What is measured of a cluster."""

    @property
    def gpus(self) -> int:
        """How many GPUs there are."""

    @property
    def slices(self) -> int:
        """Memory slices of all GPUs together."""

    @property
    def occupied_slices(self) -> int:
        """Memory slices taken by instances."""

    @property
    def active_gpus(self) -> int | None:
        """GPUs with at least one instance; None where instances have no GPU of their own."""

    def fragmentation(self) -> float | None:
        """Mean F over all GPUs; None there too."""


class Host(Protocol):
    """Takes jobs in and lets them go; jobs are told apart by their number in the timeline."""

    @property
    def totals(self) -> Totals:
        """The cluster as it is now."""

    def enter(self, number: int, job: Job) -> Reason | None:
        """Place a whole job, or nothing of it and say why."""

    def leave(self, number: int) -> None:
        """End a job that was placed."""


class EngineHost:
    """A cluster under a policy of the scheduler; nothing is moved."""

    def __init__(
        self, geometry: Geometry, gpus: int, policy: Policy, gpus_per_node: int = GPUS_PER_NODE
    ) -> None:
        self.totals = Cluster.of(geometry, gpus, gpus_per_node)
        self._scheduler = Scheduler(self.totals, policy)
        self._held: dict[int, tuple[Instance, ...]] = {}

    def enter(self, number: int, job: Job) -> Reason | None:
        """Place all of its instances, or none."""
        outcome = self._scheduler.submit_all(job.request, job.count)
        if isinstance(outcome, Rejection):
            return outcome.reason
        self._held[number] = outcome
        return None

    def leave(self, number: int) -> None:
        """Release all its instances."""
        for instance in self._held.pop(number):
            self._scheduler.release(instance)


@dataclass
class Tally:
    """What one replay counts and measures; sums over time are in seconds."""

    arrivals: Counter[str] = field(default_factory=Counter)
    """By what was asked for."""
    rejected: Counter[tuple[str, Reason]] = field(default_factory=Counter)
    """By what was asked for, and why it was rejected."""
    tenants: Counter[tuple[str, bool]] = field(default_factory=Counter)
    """By tenant, and whether it was rejected."""
    slices: int = 0
    rejected_slices: int = 0
    preplaced_rejected: int = 0
    """How many of those placed beforehand found no place even then."""
    seconds: float = 0
    occupied: float = 0
    active: float = 0
    fragmentation: float = 0
    peak_occupied: int = 0
    peak_active: int = 0


def replay(timeline: Timeline, host: Host) -> Tally:
    """Let the jobs of a timeline come and go."""
    tally = Tally()
    totals = host.totals
    inside: set[int] = set()
    now = 0.0
    for seconds, number, arrives in timeline.events:
        if seconds > now:
            passed = seconds - now
            tally.occupied += passed * totals.occupied_slices
            tally.active += passed * (totals.active_gpus or 0)
            tally.fragmentation += passed * (totals.fragmentation() or 0)
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
            tally.peak_occupied = max(tally.peak_occupied, totals.occupied_slices)
            tally.peak_active = max(tally.peak_active, totals.active_gpus or 0)
        if number >= timeline.preplaced:
            _count(tally, job, reason)
        elif reason is not None:
            tally.preplaced_rejected += 1
    tally.seconds = now
    return tally


def _count(tally: Tally, job: Job, reason: Reason | None) -> None:
    tally.arrivals[job.label] += 1
    tally.tenants[job.tenant, reason is not None] += 1
    tally.slices += job.slices
    if reason is not None:
        tally.rejected[job.label, reason] += 1
        tally.rejected_slices += job.slices


def figures(tally: Tally, totals: Totals) -> Row:
    """The figures of one replay; None where there is none.

    There are no means over time when no time passed, and no figures about where instances are
    when they are nowhere in particular.
    """
    arrivals, rejected = tally.arrivals.total(), tally.rejected.total()
    somewhere = totals.active_gpus is not None

    def mean(total: float, whole: int, known: bool = True) -> float | None:
        return total / tally.seconds / whole if tally.seconds and known else None

    return {
        "arrivals": arrivals,
        "rejected": rejected,
        "rejected_share": rejected / arrivals,
        "rejected_slices_share": tally.rejected_slices / tally.slices,
        "utilization_percent": mean(100 * tally.occupied, totals.slices),
        "peak_utilization_percent": 100 * tally.peak_occupied / totals.slices,
        "active_gpus_percent": mean(100 * tally.active, totals.gpus, somewhere),
        "peak_active_gpus_percent": 100 * tally.peak_active / totals.gpus if somewhere else None,
        "fragmentation": mean(tally.fragmentation, 1, somewhere),
        "preplaced_rejected": tally.preplaced_rejected,
        "rejected_by_reason": {
            str(reason): sum(n for (_, why), n in tally.rejected.items() if why is reason)
            for reason in Reason
        },
        "by_profile": {
            label: {
                "arrivals": tally.arrivals[label],
                **{str(reason): tally.rejected[label, reason] for reason in Reason},
            }
            for label in sorted(tally.arrivals)
        },
        "by_tenant": {
            tenant: {
                "arrivals": tally.tenants[tenant, True] + tally.tenants[tenant, False],
                "rejected": tally.tenants[tenant, True],
            }
            for tenant in sorted({tenant for tenant, _ in tally.tenants if tenant})
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
    """A row for each policy, on the same events, and one for the oracle if it is asked for.

    Every row holds the oracle's share of rejections; None, with the reason in
    ``oracle_missing``, where there is no oracle. ``tick`` is called after each row.
    """
    if not policies:
        raise SlicewiseError("a replay needs at least one policy")
    if oracle and any(policy.name == ORACLE for policy in policies):
        raise SlicewiseError(f"{ORACLE!r} is the name of the limit: call the policy otherwise")
    rows: list[Row] = []
    for policy in policies:
        host = EngineHost(geometry, gpus, policy, gpus_per_node)
        rows.append({"policy": policy.name, **figures(replay(timeline, host), host.totals)})
        tick(1)
    limit = limit_of(timeline.jobs, geometry) if oracle else "it was not asked for"
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
    """The row of who did not run: what arrived, and nothing else."""
    known: Row = {}
    for name, value in row.items():
        if isinstance(value, dict):
            known[name] = _unknown(value)
        else:
            known[name] = value if name == "arrivals" else None
    return known
