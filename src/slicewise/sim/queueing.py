"""The steady experiment with a queue: who finds no place waits, and gives up after a while.

The arrivals are those of `Steady`, run by run; a lifetime begins when its request is placed. What
is counted is what happens in the measured slots: who arrives, who is placed and after how long,
and who gives up. Without patience nobody waits, and it is the steady experiment.
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
from slicewise.policies.base import Policy
from slicewise.sim.experiment import STEADY_COLUMNS, Advance, Steady, Tick
from slicewise.sim.mix import Mix
from slicewise.sim.results import Row, steady_rows
from slicewise.sim.runner import Outcome
from slicewise.sim.statistics import Floats, Ratio
from slicewise.sim.workload import Arrivals, Ints, SmallInts, longest_lifetime

PERCENTILES = (50, 95, 99)

CLASS_COLUMNS = ("placed", "waited", "wait", "gave_up")
"""What is counted of every profile and priority: how many were placed, how many of all who left
the queue had waited, how many slots those who were placed had waited, and how many gave up."""

QUEUE_COLUMNS = (
    *STEADY_COLUMNS,
    "queue",
    "longest_queue",
    "still_waiting",
    *(f"wait_p{percent}" for percent in PERCENTILES),
)
"""What a run measures: lengths of the queue at the ends of slots, and waits in slots. After these
come `CLASS_COLUMNS`, for every profile of the mix with priority 0 and then with priority 1."""

_PRIORITIES = 2
_STREAM_OF_PRIORITIES = 1
"""Priorities are drawn from a stream beside that of the run, so that arrivals stay the same."""


class Tally:
    """What happened in the queue since measuring began."""

    def __init__(self, sizes: Ints) -> None:
        self._sizes = sizes
        self._classes = np.zeros((len(sizes), _PRIORITIES, len(CLASS_COLUMNS)), np.int64)
        self._waits: Counter[int] = Counter()
        self._queue = self._longest = self._length = 0

    def placed(self, kind: int, priority: int, wait: int) -> None:
        """A request was placed, so many slots after it came."""
        self._waits[wait] += 1
        self._classes[kind, priority] += (1, wait > 0, wait, 0)

    def gave_up(self, kind: int, priority: int, wait: int) -> None:
        """A request waited in vain."""
        self._classes[kind, priority] += (0, wait > 0, 0, 1)

    def slot_ends(self, length: int) -> None:
        """So many are waiting now."""
        self._length = length
        self._queue += length
        self._longest = max(self._longest, length)

    def sums(self, steady: Ints) -> Ints:
        """`QUEUE_COLUMNS` and what follows them, from the sums of the steady experiment."""
        gave_up = self._classes[:, :, CLASS_COLUMNS.index("gave_up")].sum(axis=1)
        sums = steady.copy()
        sums[STEADY_COLUMNS.index("rejected")] = gave_up.sum()
        sums[STEADY_COLUMNS.index("rejected_slices")] = gave_up @ self._sizes
        waits = [percentile(self._waits, percent) for percent in PERCENTILES]
        queue = [self._queue, self._longest, self._length, *waits]
        return np.concatenate([sums, np.array(queue, np.int64), self._classes.ravel()])


def percentile(counts: Counter[int], percent: int) -> int:
    """The lowest value that at least so many percent do not exceed; 0 of nothing."""
    needed, seen, value = -(-counts.total() * percent // 100), 0, 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= needed:
            break
    return value


class QueuedRun:
    """A scheduler, the instances that will leave it, and the requests that wait for them to."""

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
        """A random stream, and the share of the arrivals that have priority."""
        self._requests = [Request(profile.name) for profile in mix.profiles]
        self._sizes = np.array([profile.size for profile in mix.profiles], np.int64)
        self.tally = Tally(self._sizes)
        self._attempts: Attempts[Instance] = Attempts(lambda request, _: scheduler.submit(request))
        self._asked: dict[int, tuple[int, int]] = {}
        """By number of a waiting ticket: the kind and the lifetime it asks for."""
        self._leaving: defaultdict[int, list[Instance]] = defaultdict(list)

    def slot(self, slot: int, kind: int, lifetime: int, priority: int = 0) -> None:
        """Terminations first, then the arrival, then the queue is served; some give up after it."""
        leaving = self._leaving.pop(slot, ())
        for instance in leaving:
            self.scheduler.release(instance)
        if leaving:
            self._attempts.room_appeared()
        if slot == self._settled:
            self.tally = Tally(self._sizes)
        deadline = None if self._patience is None else slot + self._patience
        # Every arrival is a tenant of its own: nobody waits for another's sake.
        ticket = Ticket(slot, self._requests[kind], 1, str(slot), priority, slot, deadline)
        self.room.enter(ticket)
        self._asked[slot] = kind, lifetime
        for ticket, instance in self.room.serve(self._place):
            kind, lifetime = self._asked.pop(ticket.number)
            self._leaving[slot + lifetime].append(instance)
            self.tally.placed(kind, ticket.priority, slot - ticket.number)
        for ticket in self.room.expired(slot):
            kind, _ = self._asked.pop(ticket.number)
            self.tally.gave_up(kind, ticket.priority, slot - ticket.number)
        self.tally.slot_ends(len(self.room))

    def _place(self, ticket: Ticket) -> Instance | Rejection:
        return self._attempts(ticket.request)

    def advance(self, arrivals: Arrivals, begin: int, trace: SmallInts) -> None:
        """Go through the slots from ``begin`` on and fill in the trace, as `EngineRun` does.

        Rejections are in the tally: they come later than the arrival, if at all.
        """
        cluster = self.scheduler.cluster
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
            trace[i, 2] = cluster.occupied_slices
            trace[i, 3] = cluster.active_gpus
            trace[i, 4] = round(cluster.fragmentation() * cluster.gpus)


@dataclass(frozen=True)
class Queued(Steady):
    """Sustained load, where a request that finds no place waits for one."""

    oracle: bool = False
    """There is none: who waits depends on more than on what could be arranged now."""
    discipline: Discipline = field(default_factory=Discipline)
    patience: float = 1.0
    """How many mean lifetimes a request waits before it gives up; infinity waits for ever."""
    priority_share: float = 0.0
    """The share of the arrivals that are served before the others."""
    _runs: list[QueuedRun] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.oracle:
            raise SlicewiseError("the oracle does not wait: leave it out where there is a queue")
        if not 0 <= self.patience <= 1e6 and self.patience != math.inf:
            raise SlicewiseError(
                f"patience {self.patience} is not in 0..1000000 mean lifetimes, nor inf"
            )
        if self.patience == math.inf and self.load >= 1:
            raise SlicewiseError(
                f"at load {self.load:g} a queue grows for ever: set a patience, or a load below 1"
            )
        if not 0 <= self.priority_share <= 1:
            raise SlicewiseError(f"priority share {self.priority_share} is not in 0..1")

    def runs_on_engine(self, policy: Policy) -> bool:
        """Every policy is: the queue is not compiled."""
        return True

    def mean_lifetime(self, mix: int) -> float:
        """In slots."""
        return (1 + longest_lifetime(self.mixes[mix], self.gpus, self.load)) / 2

    def simulate(self, mix: int, policy: int, run: int, tick: Tick) -> Ints:
        """`QUEUE_COLUMNS`, then `CLASS_COLUMNS` for every profile and priority."""
        self._runs[:] = [self._fresh_run(mix, policy, run)]
        steady = super().simulate(mix, policy, run, tick)
        return self._runs.pop().tally.sums(steady)

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
    """The rows of the steady experiment, with the waits of those who were placed.

    ``rejected_share`` is of those who gave up, over the arrivals. ``waited_share`` is of those
    who left the queue, placed or not, after at least a slot. Waits are in mean lifetimes, and of
    those who were placed; a percentile is the mean of the percentiles of the runs.
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
    """How the queue was served, and what a mean lifetime is."""
    forever = experiment.patience == math.inf
    return {
        "backfill": experiment.discipline.backfill,
        "overtakes": experiment.discipline.overtakes,
        "patience_lifetimes": None if forever else experiment.patience,
        "priority_share": experiment.priority_share,
        "mean_lifetime_slots": experiment.mean_lifetime(mix),
    }


def _measure(row: Row, samples: Floats, mix: Mix, lifetime: float) -> None:
    """Put in the figures of the queue."""
    column = dict(zip(QUEUE_COLUMNS, samples.T[: len(QUEUE_COLUMNS)], strict=True))
    shape = (len(samples), len(mix.profiles), _PRIORITIES, len(CLASS_COLUMNS))
    classes = samples[:, len(QUEUE_COLUMNS) :].reshape(shape)
    placed, waited, wait, gave_up = classes.sum(axis=(1, 2)).T
    urgent = classes[:, :, 1].sum(axis=1)
    slots = column["arrivals"]  # one arrives in each
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
        estimate = ratio.estimate()
        row[figure] = None if math.isnan(estimate.value) else estimate.value
        known = not math.isnan(estimate.low)
        row[f"{figure}_ci95"] = [estimate.low, estimate.high] if known else None
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
    """The figures of one profile or priority, over all runs."""
    placed, waited, wait, gave_up = counts.tolist()
    left = placed + gave_up
    return {
        "placed": int(placed),
        "rejected": int(gave_up),
        "rejected_share": gave_up / left if left else None,
        "waited_share": waited / left if left else None,
        "mean_wait_lifetimes": wait / placed / lifetime if placed else None,
    }
