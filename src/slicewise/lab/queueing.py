"""The queueing experiment: tenants on a cluster under sustained load, and ways to wait.

All disciplines and policies get the same requests, run by run; a lifetime begins when its request
is placed. The counts cover the measured slots: placements and their waits, requests that gave up,
and every slot in which a request waited. With a patience of 0 nothing waits.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slicewise.core.cluster import Cluster
from slicewise.core.errors import SlicewiseError
from slicewise.engine.reclaim import ReclaimRules
from slicewise.engine.reservation_rules import ReservationRules
from slicewise.engine.scheduler import Scheduler
from slicewise.lab.disciplines import WAYS, InLines, InRoom, InUse, Way
from slicewise.lab.experiment import Steady, Tick
from slicewise.lab.reclaiming import InLinesWithReclaim
from slicewise.lab.results import Row, put_estimate
from slicewise.lab.runner import Outcome
from slicewise.lab.statistics import Floats, Ratio
from slicewise.lab.tenants import Asked, Scenario, draw
from slicewise.lab.workload import Ints
from slicewise.policies.base import Policy

PERCENTILES = (50, 95, 99)

RUN_COLUMNS = ("slots", "occupied", "waiting", "falsely", "passes", "attempts", "lost")
"""Sums of a run: slices in use, requests waiting, those with an open window, passes over those that
wait with the attempts to place them, and what reclaimed instances had used in vain."""

TENANT_COLUMNS = ("demand", "service")
"""By tenant: the slices it asked for and those it used, times slots."""

WAIT_COLUMNS = (*(f"wait_p{percent}" for percent in PERCENTILES), "longest_wait")
"""By group of requests: percentiles of the waits of placed requests, and the longest of any."""

CLASS_COLUMNS = ("placed", "waited", "wait", "gave_up")
"""By tenant and profile: requests placed, requests that waited (placed or not), slots waited by
placed requests, and requests that gave up."""

MOST_STRETCH = 3.0
"""The factor by which the longest of the overestimated leases exceeds the lifetime."""

RECLAIM_TIMES = {"grace": 0.04, "min_run": 0.2, "notice": 0.01, "first_rest": 0.02}
"""The times of reclaim in mean lifetimes: those of the service, if one lasts for 50 minutes."""

_TICK = 1000


class Group(NamedTuple):
    """Requests with figures of their own."""

    kind: str
    """all, affected, tenant or profile."""
    name: str | None
    members: npt.NDArray[np.bool_]
    """By tenant and profile."""


def groups(scenario: Scenario) -> list[Group]:
    """Return all requests, those of the affected tenants, and those by tenant and by profile."""
    shape = len(scenario.tenants), len(scenario.profiles)
    names = [tenant.name for tenant in scenario.tenants]
    affected = np.array([name in (scenario.affected or names) for name in names])
    tenant, kind = np.indices(shape)
    return [
        Group("all", None, np.ones(shape, np.bool_)),
        Group("affected", None, affected[:, None].repeat(shape[1], axis=1)),
        *(Group("tenant", name, tenant == number) for number, name in enumerate(names)),
        *(Group("profile", p.name, kind == number) for number, p in enumerate(scenario.profiles)),
    ]


class Counts:
    """What is counted from the beginning of the measurement."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._sizes = [profile.size for profile in scenario.profiles]
        shape = len(scenario.tenants), len(scenario.profiles), len(CLASS_COLUMNS)
        self._classes = np.zeros(shape, np.int64)
        self._waits: defaultdict[tuple[int, int], Counter[int]] = defaultdict(Counter)
        self._longest: Counter[tuple[int, int]] = Counter()
        self._run = [0] * len(RUN_COLUMNS)
        self._demand = [0] * len(scenario.tenants)
        self._service = [0] * len(scenario.tenants)

    def arrived(self, asked: Asked) -> None:
        """Count what a request asks for."""
        self._demand[asked.tenant] += self._sizes[asked.kind] * asked.lifetime

    def placed(self, asked: Asked, wait: int) -> None:
        """Count a request that was placed."""
        cell = asked.tenant, asked.kind
        self._waits[cell][wait] += 1
        self._classes[cell] += (1, wait > 0, wait, 0)
        self._longest[cell] = max(self._longest[cell], wait)

    def gave_up(self, asked: Asked, wait: int) -> None:
        """Count a request that gave up."""
        cell = asked.tenant, asked.kind
        self._classes[cell] += (0, wait > 0, 0, 1)
        self._longest[cell] = max(self._longest[cell], wait)

    def slot_ends(self, in_use: InUse, before: Sequence[int]) -> None:
        """Count what is in use and what waits at the end of a slot, and what happened in it."""
        waiting = len(in_use.waiting)
        falsely = in_use.open_windows() if waiting else 0
        in_slot = (now - then for now, then in zip(in_use.work, before, strict=True))
        seen = (1, sum(in_use.slices), waiting, falsely, *in_slot)
        self._run = [total + more for total, more in zip(self._run, seen, strict=True)]
        self._service = [a + b for a, b in zip(self._service, in_use.slices, strict=True)]

    def sums(self) -> Ints:
        """Return the columns of the run, of tenants, of groups, and of tenants by profile."""
        waits = []
        for group in groups(self._scenario):
            cells = [(int(t), int(k)) for t, k in np.argwhere(group.members)]
            merged: Counter[int] = Counter()
            for cell in cells:
                merged.update(self._waits[cell])
            waits += [percentile(merged, percent) for percent in PERCENTILES]
            waits.append(max(self._longest[cell] for cell in cells))
        tenants = np.column_stack([self._demand, self._service]).ravel()
        return np.concatenate(
            [np.array(self._run, np.int64), tenants, waits, self._classes.ravel()]
        ).astype(np.int64)


def percentile(counts: Counter[int], percent: int) -> int:
    """Return the lowest value that at least this percentage does not exceed; 0 if empty."""
    needed, seen, value = -(-counts.total() * percent // 100), 0, 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= needed:
            break
    return value


@dataclass(frozen=True)
class Queueing(Steady):
    """Tenants under sustained load, with every policy and way to wait."""

    oracle: bool = False
    """Always False: the oracle decides at arrival and does not wait."""
    scenarios: tuple[Scenario, ...] = ()
    """One for each of the mixes; `queueing` makes the mixes."""
    ways: tuple[Way, ...] = tuple(WAYS.values())
    patience: float = 1.0
    """Mean lifetimes until a request gives up; infinity is never."""
    reserve_after: float = 0.1
    """Mean lifetimes until a window may be reserved for a waiting request."""
    reserve_share: float = ReservationRules().share
    """The largest share of the GPUs with a reserved window."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.oracle:
            raise SlicewiseError("the oracle does not queue: leave it out")
        if not self.ways or len(set(self.ways)) < len(self.ways):
            raise SlicewiseError("the experiment needs disciplines, each of them once")
        if not 0 <= self.patience <= 1e6 and self.patience != math.inf:
            raise SlicewiseError(
                f"patience {self.patience} is not in 0..1000000 mean lifetimes, nor inf"
            )
        if self.patience == math.inf and self.load >= 1:
            raise SlicewiseError(
                f"at load {self.load:g} a queue grows forever: set a patience, or a load below 1"
            )
        ReservationRules(self.reserve_after, self.reserve_share)

    def runs_on_engine(self, policy: Policy) -> bool:
        """Return True: the queue is not compiled."""
        return True

    def entrants(self, mix: int) -> range:
        """Return the indexes of the entrants: each policy with every discipline."""
        return range(len(self.policies) * len(self.ways))

    def longest_lifetime(self, mix: int) -> int:
        """Return the longest lifetime in slots."""
        return self.scenarios[mix].longest_lifetime(self.gpus, self.load)

    def mean_lifetime(self, mix: int) -> float:
        """Return the mean lifetime in slots."""
        return (1 + self.longest_lifetime(mix)) / 2

    def units(self, mix: int) -> int:
        """Return the number of slots."""
        return self.lifetimes * self.longest_lifetime(mix)

    def simulate(self, mix: int, policy: int, run: int, tick: Tick) -> Ints:
        """Return the sums of `Counts` over the measured slots."""
        scenario, longest = self.scenarios[mix], self.longest_lifetime(mix)
        slots, settled = self.units(mix), self.warmup * longest
        in_use = self.in_use(mix, policy)
        for now, arrivals in enumerate(
            draw(scenario, self.seed, run, slots, longest, MOST_STRETCH)
        ):
            if now == settled or not now:
                counts = in_use.watcher = Counts(scenario)
            for asked in arrivals:
                counts.arrived(asked)
            before = in_use.work
            in_use.slot(now, arrivals)
            counts.slot_ends(in_use, before)
            if now % _TICK == 0:
                tick(min(_TICK, slots - now))
        return counts.sums()

    def in_use(self, mix: int, entrant: int) -> InUse:
        """Return an empty cluster with a policy and a discipline."""
        policy, way = divmod(entrant, len(self.ways))
        chosen, scenario = self.ways[way], self.scenarios[mix]
        cluster = Cluster.of(scenario.geometry, self.gpus, self.gpus_per_node)
        scheduler = Scheduler(cluster, self.policies[policy])
        mean = self.mean_lifetime(mix)
        patience = None if self.patience == math.inf else round(self.patience * mean)
        common = (scheduler, scenario, patience, Counts(scenario))
        if chosen.room is not None:
            return InRoom(chosen.room, *common)
        rules = ReservationRules(self.reserve_after * mean, self.reserve_share)
        if not chosen.reclaim:
            return InLines(chosen.leases, rules, *common)
        times = {name: part * mean for name, part in RECLAIM_TIMES.items()}
        reclaim = ReclaimRules(enabled=True, **times)
        return InLinesWithReclaim(reclaim, chosen.leases, rules, *common)


def queueing_rows(outcome: Outcome) -> list[Row]:
    """Return a row for each scenario, policy, discipline and group of requests.

    Waits are those of placed requests, in mean lifetimes; a percentile is the mean of the
    percentiles of the runs. Figures of the whole cluster are in the rows of the group ``all``, and
    None in the others.
    """
    experiment = outcome.experiment
    assert isinstance(experiment, Queueing)
    rows: list[Row] = []
    for m, scenario in enumerate(experiment.scenarios):
        runs = outcome.paired_runs(m)
        if not runs:
            raise SlicewiseError("interrupted before every discipline had finished a run")
        for entrant in experiment.entrants(m):
            policy, way = divmod(entrant, len(experiment.ways))
            cell = outcome.samples[m, entrant]
            samples = np.array([cell[run] for run in runs], np.float64)
            setting: Row = {
                "scenario": scenario.name,
                "policy": experiment.policies[policy].name,
                "discipline": experiment.ways[way].name,
                "load": experiment.load,
                "gpus": experiment.gpus,
                "model": scenario.geometry.model,
                "runs": len(runs),
                "patience_lifetimes": _finite(experiment.patience),
                "reserve_after_lifetimes": _finite(experiment.reserve_after),
                "reserve_share": experiment.reserve_share,
                "mean_lifetime_slots": experiment.mean_lifetime(m),
            }
            rows += _rows(setting, scenario, samples, experiment.gpus)
    return rows


def _finite(number: float) -> float | None:
    """Return None for infinity, which JSON does not have."""
    return None if number == math.inf else number


def _rows(setting: Row, scenario: Scenario, samples: Floats, gpus: int) -> list[Row]:
    """Return the rows of one entrant, by group."""
    known, tenants = groups(scenario), len(scenario.tenants)
    ends = np.cumsum(
        [len(RUN_COLUMNS), tenants * len(TENANT_COLUMNS), len(known) * len(WAIT_COLUMNS)]
    )
    run, by_tenant, waits, classes = np.split(samples, ends, axis=1)
    by_tenant = by_tenant.reshape(-1, tenants, len(TENANT_COLUMNS))
    waits = waits.reshape(-1, len(known), len(WAIT_COLUMNS))
    classes = classes.reshape(-1, tenants, len(scenario.profiles), len(CLASS_COLUMNS))
    lifetime = setting["mean_lifetime_slots"]
    assert isinstance(lifetime, float)
    one = np.ones(len(samples))
    rows: list[Row] = []
    for number, group in enumerate(known):
        row: Row = {**setting, "group": group.kind, "name": group.name}
        placed, waited, wait, gave_up = classes[:, group.members].sum(axis=1).T
        figures = {
            "gave_up_share": Ratio(gave_up, placed + gave_up),
            "waited_share": Ratio(waited, placed + gave_up),
            "mean_wait_lifetimes": Ratio(wait, placed * lifetime),
            **{
                f"{column}_lifetimes": Ratio(waits[:, number, place], one * lifetime)
                for place, column in enumerate(WAIT_COLUMNS)
            },
        }
        for figure, ratio in figures.items():
            put_estimate(row, figure, ratio.estimate())
        rows.append(row)
    capacity = float(gpus * scenario.geometry.slices)
    of_cluster = _of_cluster(scenario, run, by_tenant, capacity)
    for row in rows:
        for figure, ratio in of_cluster.items():
            row[figure] = row[f"{figure}_ci95"] = None
            if row["group"] == "all":
                put_estimate(row, figure, ratio.estimate())
    worst = max(
        (row for row in rows if row["group"] == "profile"),
        key=lambda row: float(str(row["gave_up_share"] or 0)),
    )
    for row in rows:
        here = row["group"] == "all"
        row["worst_profile"] = worst["name"] if here else None
        for end in ("", "_ci95"):
            row[f"worst_profile_gave_up_share{end}"] = (
                worst[f"gave_up_share{end}"] if here else None
            )
    return rows


def _of_cluster(
    scenario: Scenario, run: Floats, by_tenant: Floats, capacity: float
) -> dict[str, Ratio]:
    """Return the figures of the whole cluster."""
    slots, occupied, waiting, falsely, passes, attempts, lost = run.T
    one = np.ones(len(run))
    weights = [tenant.weight for tenant in scenario.tenants]
    fairness = [
        jain(service / np.maximum(fair_service(demand, weights, capacity * length), 1.0))
        for (demand, service), length in zip(by_tenant.transpose(0, 2, 1), slots, strict=True)
    ]
    return {
        "utilization_percent": Ratio(100 * occupied, slots * capacity),
        "lost_percent": Ratio(100 * lost, slots * capacity),
        "false_wait_share": Ratio(falsely, waiting),
        "mean_queue": Ratio(waiting, slots),
        "attempts_per_pass": Ratio(attempts, passes),
        "fairness": Ratio(np.array(fairness), one),
    }


def fair_service(demand: Floats, weights: list[float], capacity: float) -> Floats:
    """Return what each tenant would get of the capacity if it were shared out fairly.

    No tenant gets more than it asks for; among those that get less, equal for equal weight.
    """
    given = np.zeros(len(demand))
    open_to = set(range(len(demand)))
    while open_to:
        level = (capacity - given.sum()) / sum(weights[t] for t in open_to)
        content = {t for t in open_to if demand[t] <= level * weights[t]}
        for t in content or open_to:
            given[t] = demand[t] if content else level * weights[t]
        open_to -= content or open_to
    return given


def jain(amounts: Floats) -> float:
    """Return Jain's index: 1 if all amounts are equal, 1/n if one of n has everything."""
    squares = float((amounts**2).sum())
    return float(amounts.sum()) ** 2 / (len(amounts) * squares) if squares else 1.0
