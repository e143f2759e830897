"""Finds the number of GPUs that a demand needs under each policy, and the GPUs saved.

The demand is fixed and the cluster size varies: in each run, clusters of every size, under every
policy, get the same requests with the same lifetimes. `sizing` chooses the sizes to try and
decides when the answer is final; docs/planning.md explains the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from slicewise.core.errors import SlicewiseError
from slicewise.lab.demand import MOST_DEMAND, Demand, SameDemand
from slicewise.lab.experiment import ORACLE, STEADY_COLUMNS, Tick
from slicewise.lab.mix import Mix
from slicewise.lab.repacking import Repacking, repacking
from slicewise.lab.results import Row
from slicewise.lab.runner import Outcome, run_experiment, total_units
from slicewise.lab.sizing import Counted, Search, fewer, share_estimate
from slicewise.lab.statistics import Estimate
from slicewise.lab.workload import Ints
from slicewise.policies.base import Policy
from slicewise.policies.registry import check_different

RUNS = 20
"""The default number of runs, unless the target needs more."""
MOST_RUNS = 5_000
"""The maximum number of runs that is chosen automatically."""
ENOUGH = 100
"""The number of rejections that must be expected at the target, over all runs. With fewer, all of
them may come from one or two bad moments, and the interval misses the true value too often."""
LOWEST_TARGET, HIGHEST_TARGET = 1e-7, 0.5
_THINNEST = 100
"""Clusters with a capacity below the demand divided by this are not tried."""
_SHORT_ROUND = 4_000_000
"""A round with fewer compiled slots is faster than starting worker processes."""


class Count(StrEnum):
    """What the target is a share of."""

    REQUESTS = "requests"
    SLICES = "slices"
    """The requested slices: a request for eight GPUs counts eight times."""


_COLUMNS = {
    count: [STEADY_COLUMNS.index(name) for name in names]
    for count, names in {
        Count.REQUESTS: ("arrivals", "rejected"),
        Count.SLICES: ("slices", "rejected_slices"),
    }.items()
}
"""The columns of arrivals and rejections in the sums of a run."""

Watch = Callable[[int, int], AbstractContextManager[Tick]]
"""Called before each round with the number of clusters to try and the units of work."""


@dataclass(frozen=True)
class Question:
    """A demand in GPUs, and the share of it that may be rejected."""

    mixes: tuple[Mix, ...]
    policies: tuple[Policy, ...]
    demand: float
    target: float = 0.001
    count: Count = Count.REQUESTS
    reference: str = "first-fit"
    """The policy that savings are relative to."""
    runs: int = RUNS
    seed: int = 1
    step: int = 1
    """Cluster sizes are multiples of this, such as the GPUs of a node."""
    gpus_per_node: int = 8
    lifetimes: int = 40
    warmup: int = 3
    oracle: bool = True

    def __post_init__(self) -> None:
        check_target(self.target)
        check_step(self.step)
        check_names(self.policies, self.reference, self.oracle)
        self.experiment()  # raises if it cannot be run

    def experiment(self) -> SameDemand:
        """Return the experiment, without clusters to try."""
        return SameDemand(
            self.mixes,
            self.policies,
            runs=self.runs,
            seed=self.seed,
            gpus_per_node=self.gpus_per_node,
            demands=self.demands,
            lifetimes=self.lifetimes,
            warmup=self.warmup,
            oracle=self.oracle,
        )

    @property
    def demands(self) -> tuple[Demand, ...]:
        """The demand of each mix."""
        return tuple(Demand.of_gpus(mix, self.demand) for mix in self.mixes)

    def requests(self, demand: Demand) -> int:
        """Return the number of requests measured in one run."""
        return (self.lifetimes - self.warmup) * demand.longest

    def expected(self, demand: Demand) -> float:
        """Return the rejections expected in one run at the target if the largest are rejected."""
        largest = max(profile.size for profile in demand.mix.profiles)
        weight = demand.mix.mean_size / largest if self.count is Count.SLICES else 1
        return self.target * weight * self.requests(demand)


def check_target(target: float) -> None:
    """Raise if the target is out of range."""
    if not LOWEST_TARGET <= target <= HIGHEST_TARGET:
        raise SlicewiseError(
            f"the target must be {percent(LOWEST_TARGET)} to {percent(HIGHEST_TARGET)}, "
            f"not {percent(target)}"
        )


def check_step(step: int) -> None:
    """Raise if the step is out of range."""
    if not 1 <= step <= MOST_DEMAND:
        raise SlicewiseError(f"step must be 1 to {MOST_DEMAND} GPUs, not {step}")


def check_names(policies: Sequence[Policy], reference: str, oracle: bool) -> None:
    """Raise unless names are unique, include the reference, and leave out the oracle's name."""
    check_different(policies)
    names = [policy.name for policy in policies]
    if reference not in names:
        raise SlicewiseError(f"the reference {reference!r} is not among the policies")
    if oracle and ORACLE in names:
        raise SlicewiseError(f"{ORACLE!r} is the name of the limit: rename the policy")


def percent(share: float) -> str:
    """Format a share in percent."""
    return f"{100 * share:.9f}".rstrip("0").rstrip(".") + "%"


def runs_for(question: Question, asked: int | None) -> int:
    """Return the requested number of runs, or what the target needs; raise if too few."""
    demand = min(question.demands, key=question.expected)
    wanted = math.ceil(round(ENOUGH / question.expected(demand), 6))
    if asked is not None and asked < wanted:
        raise SlicewiseError(
            f"{percent(question.target)} of {asked * question.requests(demand):,} requests is "
            f"{asked * question.expected(demand):.2g} rejections, and a result needs {ENOUGH}: use "
            f"--runs {wanted}, a longer --duration or a higher target"
        )
    if asked is None and wanted > MOST_RUNS:
        raise SlicewiseError(
            f"{ENOUGH} rejections at {percent(question.target)} need {wanted:,} runs of "
            f"{question.requests(demand):,} measured requests: use a higher target, a longer "
            f"--duration, or --runs {wanted}"
        )
    return max(RUNS, wanted) if asked is None else asked


@dataclass
class Found:
    """The search for one policy and one mix, with its results."""

    policy: str
    count: Count
    search: Search
    sums: dict[int, Ints] = field(default_factory=dict)
    """By size: a row of `STEADY_COLUMNS` for each run."""

    def record(self, gpus: int, sums: Ints) -> None:
        """Record the sums of all runs on a cluster."""
        self.sums[gpus] = sums
        self.search.record(gpus, self.share(gpus, self.count))

    def share(self, gpus: int, count: Count) -> Estimate:
        """Return the rejected share on a cluster, of requests or of slices."""
        arrived, rejected = self.sums[gpus][:, _COLUMNS[count]].T.astype(np.float64)
        return share_estimate(rejected, arrived)

    @property
    def counted(self) -> Counted:
        """Arrivals and rejections by run and size."""
        sizes = sorted(self.sums)
        sums = np.array([self.sums[gpus][:, _COLUMNS[self.count]] for gpus in sizes], np.float64)
        return Counted(np.array(sizes, np.int64), sums[:, :, 1].T, sums[:, :, 0].T)


@dataclass(frozen=True)
class Plan:
    """The result for one mix."""

    demand: Demand
    found: Mapping[str, Found]
    """By policy; the limit, if any, is last."""
    missing: str | None
    """Why there is no limit."""


def make_plans(question: Question, workers: int | None, watch: Watch) -> list[Plan]:
    """Find the smallest cluster for every mix and policy."""
    demands = question.demands
    missing = [_missing(question, mix) for mix in question.mixes]
    names = [policy.name for policy in question.policies]
    found = [
        [
            Found(name, question.count, _search(question, demand))
            for name in (names if why else [*names, ORACLE])
        ]
        for demand, why in zip(demands, missing, strict=True)
    ]
    experiment = question.experiment()
    while any(trials := [_trials(each) for each in found]):
        experiment = replace(experiment, trials=tuple(map(tuple, trials)))
        outcome = _run(experiment, workers, watch)
        for mix, cells in enumerate(trials):
            for cell, (entrant, gpus) in enumerate(cells):
                samples = outcome.samples[mix, cell]
                sums = np.array([samples[run] for run in range(question.runs)])
                found[mix][entrant].record(gpus, sums)
    return [
        Plan(demand, {each.policy: each for each in entrants}, why)
        for demand, entrants, why in zip(demands, found, missing, strict=True)
    ]


def _missing(question: Question, mix: Mix) -> str | None:
    rule = repacking(mix) if question.oracle else "it was not requested"
    return None if isinstance(rule, Repacking) else rule


def _search(question: Question, demand: Demand) -> Search:
    return Search(
        question.target,
        start=math.ceil(demand.offered_gpus),
        # The spare capacity needed is a multiple of the standard deviation of the demand.
        spacing=max(question.step, math.ceil(demand.spread_gpus)),
        least=max(1, math.ceil(demand.offered_gpus / _THINNEST)),
        # The maximum number of requests at a time: each could have its own GPU.
        most=max(demand.longest, math.ceil(demand.offered_gpus)),
        step=question.step,
    )


def _trials(found: Sequence[Found]) -> list[tuple[int, int]]:
    """Return the entrants and sizes to try next."""
    return [(e, gpus) for e, each in enumerate(found) for gpus in each.search.next_sizes()]


def _run(experiment: SameDemand, workers: int | None, watch: Watch) -> Outcome:
    units = total_units(experiment)
    compiled = not any(
        entrant < len(experiment.policies)
        and experiment.runs_on_engine(experiment.policies[entrant])
        for trials in experiment.trials
        for entrant, _ in trials
    )
    if compiled and units < _SHORT_ROUND:
        workers = 1
    with watch(sum(map(len, experiment.trials)), units) as tick:
        outcome = run_experiment(experiment, workers, tick)
        if outcome.interrupted:
            raise KeyboardInterrupt  # an unfinished round has no result
    return outcome


def plan_rows(question: Question, plans: Sequence[Plan]) -> list[Row]:
    """Return a row per mix and policy: GPUs needed, the interval, and the GPUs saved."""
    rows: list[Row] = []
    for plan in plans:
        limit = plan.found.get(ORACLE)
        reference = plan.found[question.reference]
        for found in plan.found.values():
            needed = found.search.needed
            row: Row = {
                "policy": found.policy,
                "distribution": plan.demand.mix.name,
                "model": plan.demand.mix.geometry.model,
                "demand_gpus": question.demand,
                "offered_gpus": plan.demand.offered_gpus,
                "target_rejected_share": question.target,
                "count": str(question.count),
                "runs": question.runs,
                "needed_gpus": needed,
                "needed_gpus_ci95": _interval(found, question.runs),
                "load": None if needed is None else plan.demand.offered_gpus / needed,
                **_shares(found, needed),
                "compared_with": question.reference,
            }
            _put_fewer(row, "saved_gpus", question, found, reference)
            row["saved_percent"] = saved_percent(needed, reference.search.needed)
            _put_fewer(row, "above_limit_gpus", question, limit, found)
            row["oracle_missing"] = plan.missing
            rows.append(row)
    return rows


def curve_rows(plans: Sequence[Plan]) -> list[Row]:
    """Return a row per cluster tried: the rejected share by mix, policy and size.

    With ``simulate_load`` as its load, the steady experiment draws the same requests.
    """
    return [
        {
            "policy": found.policy,
            "distribution": plan.demand.mix.name,
            "gpus": gpus,
            "load": plan.demand.offered_gpus / gpus,
            "simulate_load": plan.demand.load_on(gpus),
            **_shares(found, gpus),
        }
        for plan in plans
        for found in plan.found.values()
        for gpus in sorted(found.sums)
    ]


def _interval(found: Found, runs: int) -> list[int | None] | None:
    """Return the interval; its upper end is None if no size tried was certainly enough."""
    return list(found.search.interval) if runs > 1 and found.search.needed is not None else None


def _shares(found: Found, gpus: int | None) -> Row:
    """Return both rejected shares at a size, with their intervals."""
    row: Row = {}
    for count, name in (
        (Count.REQUESTS, "rejected_share"),
        (Count.SLICES, "rejected_slices_share"),
    ):
        share = None if gpus is None else found.share(gpus, count)
        row[name] = None if share is None else share.value
        known = share is not None and not math.isnan(share.low)
        row[f"{name}_ci95"] = [share.low, share.high] if share is not None and known else None
    return row


def saved_percent(needed: int | None, reference: int | None) -> float | None:
    """Return the reduction from the reference size, in percent."""
    if needed is None or reference is None:
        return None
    return 100 * (reference - needed) / reference


def _put_fewer(row: Row, name: str, question: Question, one: Found | None, other: Found) -> None:
    """Add the difference in GPUs needed, if both are known."""
    row[name] = row[f"{name}_ci95"] = None
    if one is None or one.search.needed is None or other.search.needed is None:
        return
    row[name] = other.search.needed - one.search.needed
    if question.runs > 1:
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(question.seed)))
        row[f"{name}_ci95"] = list(fewer(one.counted, other.counted, question.target, rng))
