"""The steady experiment with a queue: requests that do not fit wait, and give up after a while.

The arrivals are those of `Steady`, run by run; a lifetime begins when its request is placed. The
counts cover the measured slots: arrivals, placements and their waits, and requests that gave up.
With a patience of 0 this is the steady experiment.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np

from slicewise.core.cluster import Cluster, Instance
from slicewise.core.errors import SlicewiseError
from slicewise.core.request import Rejection, Request
from slicewise.engine.queue import Attempts, Discipline, Ticket, WaitingRoom
from slicewise.engine.scheduler import Scheduler
from slicewise.lab.engine_loop import record_totals
from slicewise.lab.experiment import STEADY_COLUMNS, Advance, Steady, Tick
from slicewise.lab.mix import Mix
from slicewise.lab.results import Row, put_estimate, steady_rows
from slicewise.lab.runner import Outcome
from slicewise.lab.statistics import Floats, Ratio
from slicewise.lab.workload import Arrivals, Ints, SmallInts, longest_lifetime
from slicewise.policies.base import Policy

PERCENTILES = (50, 95, 99)

CLASS_COLUMNS = ("placed", "waited", "wait", "gave_up")
"""The counts per profile and priority: requests placed, requests that waited (placed or not),
slots waited by placed requests, and requests that gave up."""

QUEUE_COLUMNS = (
    *STEADY_COLUMNS,
    "queue",
    "longest_queue",
    "still_waiting",
    *(f"wait_p{percent}" for percent in PERCENTILES),
)
"""The columns of a run: queue lengths at the ends of slots, and waits in slots. `CLASS_COLUMNS`
follow, for every profile of the mix with priority 0 and then with priority 1."""

_PRIORITIES = 2
_STREAM_OF_PRIORITIES = 1
"""Priorities have their own random stream, so that arrivals do not change."""


class QueueStats:
    """Counts of the queue since the beginning of the measurement."""

    def __init__(self, sizes: Ints) -> None:
        self._sizes = sizes
        self._classes = np.zeros((len(sizes), _PRIORITIES, len(CLASS_COLUMNS)), np.int64)
        self._waits: Counter[int] = Counter()
        self._queue = self._longest = self._length = 0

    def placed(self, kind: int, priority: int, wait: int) -> None:
        """Count a request that was placed after waiting."""
        self._waits[wait] += 1
        self._classes[kind, priority] += (1, wait > 0, wait, 0)

    def gave_up(self, kind: int, priority: int, wait: int) -> None:
        """Count a request that gave up."""
        self._classes[kind, priority] += (0, wait > 0, 0, 1)

    def slot_ends(self, length: int) -> None:
        """Count the queue length at the end of a slot."""
        self._length = length
        self._queue += length
        self._longest = max(self._longest, length)

    def sums(self, steady: Ints) -> Ints:
        """Return `QUEUE_COLUMNS` and the class columns, given the sums of the steady experiment."""
        gave_up = self._classes[:, :, CLASS_COLUMNS.index("gave_up")].sum(axis=1)
        sums = steady.copy()
        sums[STEADY_COLUMNS.index("rejected")] = gave_up.sum()
        sums[STEADY_COLUMNS.index("rejected_slices")] = gave_up @ self._sizes
        waits = [percentile(self._waits, percent) for percent in PERCENTILES]
        queue = [self._queue, self._longest, self._length, *waits]
        return np.concatenate([sums, np.array(queue, np.int64), self._classes.ravel()])


def percentile(counts: Counter[int], percent: int) -> int:
    """Return the lowest value that at least this percentage does not exceed; 0 if empty."""
    needed, seen, value = -(-counts.total() * percent // 100), 0, 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= needed:
            break
    return value


class QueuedRun:
    """A scheduler, its instances by the slot in which they end, and the queue."""

    def __init__(
        self,
        scheduler: Scheduler,
        mix: Mix,
        room: WaitingRoom,
        patience: int | None,
        settled: int = 0,
        priorities: tuple[np.random.Generator, float] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.room = room
        self._patience = patience
        self._settled = settled
        self._priorities = priorities
        """A random stream, and the share of arrivals with priority."""
        self._requests = [Request(profile.name) for profile in mix.profiles]
        self._sizes = np.array([profile.size for profile in mix.profiles], np.int64)
        self.stats = QueueStats(self._sizes)
        self._attempts: Attempts[Instance] = Attempts(lambda request, _: scheduler.submit(request))
        self._asked: dict[int, tuple[int, int]] = {}
        """By number of a queued ticket: its kind and lifetime."""
        self._ending: defaultdict[int, list[Instance]] = defaultdict(list)

    def slot(self, slot: int, kind: int, lifetime: int, priority: int = 0) -> None:
        """Release what ends, enqueue the arrival, serve the queue, drop expired requests."""
        ending = self._ending.pop(slot, ())
        for instance in ending:
            self.scheduler.release(instance)
        if ending:
            self._attempts.room_appeared()
        if slot == self._settled:
            self.stats = QueueStats(self._sizes)
        deadline = None if self._patience is None else slot + self._patience
        # Every arrival is its own tenant, so fairness between tenants delays no request.
        ticket = Ticket(slot, self._requests[kind], 1, str(slot), priority, slot, deadline)
        self.room.enter(ticket)
        self._asked[slot] = kind, lifetime
        for ticket, instance in self.room.serve(self._place):
            kind, lifetime = self._asked.pop(ticket.number)
            self._ending[slot + lifetime].append(instance)
            self.stats.placed(kind, ticket.priority, slot - ticket.number)
        for ticket in self.room.expired(slot):
            kind, _ = self._asked.pop(ticket.number)
            self.stats.gave_up(kind, ticket.priority, slot - ticket.number)
        self.stats.slot_ends(len(self.room))

    def _place(self, ticket: Ticket) -> Instance | Rejection:
        return self._attempts(ticket.request)

    def advance(self, arrivals: Arrivals, begin: int, trace: SmallInts) -> None:
        """Run the slots from ``begin`` and fill in the trace, as `EngineRun` does.

        Rejections are not in the trace: they come after the arrival and are counted in ``stats``.
        """
        urgent = np.zeros(len(arrivals.kinds), np.bool_)
        if self._priorities is not None:
            rng, share = self._priorities
            urgent = rng.random(len(arrivals.kinds)) < share
        columns = (arrivals.kinds, arrivals.lifetimes, urgent)
        trace[:, 0] = 1
        for i, (kind, lifetime, priority) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            self.slot(begin + i, kind, lifetime, int(priority))
            record_totals(self.scheduler.cluster, trace, i)


@dataclass(frozen=True)
class Queued(Steady):
    """Sustained load with a queue for requests that do not fit."""

    oracle: bool = False
    """Always False: the oracle decides at arrival and does not queue."""
    discipline: Discipline = field(default_factory=Discipline)
    patience: float = 1.0
    """Mean lifetimes until a request gives up; infinity is never."""
    priority_share: float = 0.0
    """The share of arrivals with priority over the others."""
    _runs: list[QueuedRun] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.oracle:
            raise SlicewiseError("the oracle does not queue: leave it out")
        if not 0 <= self.patience <= 1e6 and self.patience != math.inf:
            raise SlicewiseError(
                f"patience {self.patience} is not in 0..1000000 mean lifetimes, nor inf"
            )
        if self.patience == math.inf and self.load >= 1:
            raise SlicewiseError(
                f"at load {self.load:g} a queue grows forever: set a patience, or a load below 1"
            )
        if not 0 <= self.priority_share <= 1:
            raise SlicewiseError(f"priority share {self.priority_share} is not in 0..1")

    def runs_on_engine(self, policy: Policy) -> bool:
        """Return True: the queue is not compiled."""
        return True

    def mean_lifetime(self, mix: int) -> float:
        """Return the mean lifetime in slots."""
        return (1 + longest_lifetime(self.mixes[mix], self.gpus, self.load)) / 2

    def simulate(self, mix: int, policy: int, run: int, tick: Tick) -> Ints:
        """Return `QUEUE_COLUMNS`, then `CLASS_COLUMNS` for every profile and priority."""
        self._runs[:] = [self._fresh_run(mix, policy, run)]
        steady = super().simulate(mix, policy, run, tick)
        return self._runs.pop().stats.sums(steady)

    def _fresh_run(self, mix: int, policy: int, run: int) -> QueuedRun:
        chosen = self.mixes[mix]
        cluster = Cluster.of(chosen.geometry, self.gpus, self.gpus_per_node)
        forever = self.patience == math.inf
        stream = np.random.SeedSequence(self.seed, spawn_key=(run, _STREAM_OF_PRIORITIES))
        return QueuedRun(
            Scheduler(cluster, self.policies[policy]),
            chosen,
            WaitingRoom(self.discipline),
            None if forever else round(self.patience * self.mean_lifetime(mix)),
            self.warmup * longest_lifetime(chosen, self.gpus, self.load),
            (np.random.default_rng(stream), self.priority_share),
        )

    def _fresh_cluster(self, mix: int, policy: int, longest: int) -> Advance:
        return self._runs[0].advance


def queue_rows(outcome: Outcome) -> list[Row]:
    """Return the rows of the steady experiment with the waits of placed requests.

    ``rejected_share`` is the share of arrivals that gave up. ``waited_share`` is the share of
    requests, placed or not, that waited for at least a slot. Waits are in mean lifetimes; a
    percentile is the mean of the percentiles of the runs.
    """
    experiment = outcome.experiment
    assert isinstance(experiment, Queued)
    mixes = [mix.name for mix in experiment.mixes]
    names = [policy.name for policy in experiment.policies]
    rows = steady_rows(outcome)
    for row in rows:
        m = mixes.index(str(row["distribution"]))
        cell = outcome.samples[m, names.index(str(row["policy"]))]
        samples = np.array([cell[run] for run in outcome.paired_runs(m)], np.float64)
        row.update(_setting(experiment, m))
        _measure(row, samples, experiment.mixes[m], experiment.mean_lifetime(m))
    return rows


def _setting(experiment: Queued, mix: int) -> Row:
    """Return the settings of the queue, and the mean lifetime."""
    forever = experiment.patience == math.inf
    return {
        "backfill": experiment.discipline.backfill,
        "overtakes": experiment.discipline.overtakes,
        "patience_lifetimes": None if forever else experiment.patience,
        "priority_share": experiment.priority_share,
        "mean_lifetime_slots": experiment.mean_lifetime(mix),
    }


def _measure(row: Row, samples: Floats, mix: Mix, lifetime: float) -> None:
    """Add the figures of the queue to a row."""
    column = dict(zip(QUEUE_COLUMNS, samples.T[: len(QUEUE_COLUMNS)], strict=True))
    shape = (len(samples), len(mix.profiles), _PRIORITIES, len(CLASS_COLUMNS))
    classes = samples[:, len(QUEUE_COLUMNS) :].reshape(shape)
    placed, waited, wait, gave_up = classes.sum(axis=(1, 2)).T
    urgent = classes[:, :, 1].sum(axis=1)
    slots = column["arrivals"]  # one per slot
    one = np.ones(len(samples))
    for figure, ratio in {
        "waited_share": Ratio(waited, placed + gave_up),
        "mean_wait_lifetimes": Ratio(wait, placed * lifetime),
        "priority_mean_wait_lifetimes": Ratio(urgent[:, 2], urgent[:, 0] * lifetime),
        "priority_rejected_share": Ratio(urgent[:, 3], urgent[:, 0] + urgent[:, 3]),
        **{
            f"wait_p{percent}_lifetimes": Ratio(column[f"wait_p{percent}"], one * lifetime)
            for percent in PERCENTILES
        },
        "mean_queue": Ratio(column["queue"], slots),
        "longest_queue": Ratio(column["longest_queue"], one),
        "still_waiting_share": Ratio(column["still_waiting"], slots),
    }.items():
        put_estimate(row, figure, ratio.estimate())
    totals = classes.sum(axis=0)
    row["by_profile"] = {
        profile.name: _class(totals[kind].sum(axis=0), lifetime)
        for kind, profile in enumerate(mix.profiles)
    }
    row["by_priority"] = {
        str(priority): _class(totals[:, priority].sum(axis=0), lifetime)
        for priority in range(_PRIORITIES)
    }


def _class(counts: Floats, lifetime: float) -> Row:
    """Return the figures of one profile or priority, over all runs."""
    placed, waited, wait, gave_up = counts.tolist()
    left = placed + gave_up
    return {
        "placed": int(placed),
        "rejected": int(gave_up),
        "rejected_share": gave_up / left if left else None,
        "waited_share": waited / left if left else None,
        "mean_wait_lifetimes": wait / placed / lifetime if placed else None,
    }
