"""The steady experiment with migration: a rejected request may have others moved out of its way.

Moves are paid from a budget: every arrival earns a share of a move, and what is not spent is
saved. So at no time have there been more moves than that share of the arrivals, and neither have
there been at the end of the measured part, counted from its beginning. The arrivals are those of
`Steady`, run by run, so the two can be compared run by run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from slicewise.core.cluster import Cluster, Instance
from slicewise.core.errors import SlicewiseError
from slicewise.core.request import Rejection, Request
from slicewise.engine.defrag import Plan, Planner
from slicewise.engine.moves import carry_out
from slicewise.engine.scheduler import Scheduler
from slicewise.engine.spending import Budget, worth
from slicewise.policies.base import Policy
from slicewise.sim.experiment import STEADY_COLUMNS, Advance, Steady, Tick
from slicewise.sim.mix import Mix
from slicewise.sim.results import Row, steady_rows
from slicewise.sim.runner import Outcome
from slicewise.sim.statistics import Ratio
from slicewise.sim.workload import Arrivals, Ints, SmallInts

MIGRATION_COLUMNS = (*STEADY_COLUMNS, "moves", "moved_slices")
"""What is summed over the measured slots."""

SHARE = 0.02
"""Moves an arrival earns unless said otherwise: two in a hundred."""

SPARED_FROM = 2
"""Moves that must be saved before one is spent to keep the last empty GPU empty."""


class MigratingRun:
    """A scheduler, the instances that will leave it, and a planner that moves some of them."""

    def __init__(
        self, scheduler: Scheduler, mix: Mix, share: float, settled: int, measured: int
    ) -> None:
        self.scheduler = scheduler
        self.moves = self.moved_slices = 0
        """Counted from the slot in which measuring begins."""
        self._settled, self._measured = settled, measured
        self._mix = mix
        self._budget = Budget(share)
        # Where instances move to is the planner's own choice, so that it is the same for every
        # policy, table or not.
        self._planner = Planner(scheduler.cluster)
        self._requests = [Request(profile.name) for profile in mix.profiles]
        self._leaving: defaultdict[int, set[int]] = defaultdict(set)
        self._until: dict[int, int] = {}
        """By instance: the slot it leaves in."""

    def slot(self, slot: int, kind: int, lifetime: int) -> bool:
        """Terminations first, then the arrival; whether it was accepted."""
        for identity in sorted(self._leaving.pop(slot, ())):
            self.scheduler.release(identity)
            del self._until[identity]
        if slot == self._settled:
            self.moves = self.moved_slices = 0
            self._budget.confine(self._measured)
        self._budget.earn()
        instance: Instance | None
        outcome = self.scheduler.submit(self._requests[kind])
        if isinstance(outcome, Rejection):
            instance = self._rescue(kind)
        elif self._budget.saved >= SPARED_FROM and self._took_last_empty(outcome):
            instance = self._elsewhere(kind, outcome)
        else:
            instance = outcome
        if instance is None:
            return False
        self._stays(instance, slot + lifetime)
        return True

    def _rescue(self, kind: int) -> Instance | None:
        """Make room for a rejected request, if that is possible and worth its price."""
        cluster, geometry = self.scheduler.cluster, self._mix.geometry
        size = self._mix.profiles[kind].size
        gain = worth(size, geometry.slices, cluster.free_slices, cluster.slices)
        longest = self._budget.longest_plan(gain)
        plan = self._planner.to_fit(self._requests[kind], longest) if longest else None
        # Without a move to make, a window was open and a strict policy did not want it.
        return self._carry_out(plan) if plan is not None and plan.moves else None

    def _took_last_empty(self, instance: Instance) -> bool:
        """Whether an instance is alone on a GPU that a larger one may miss: the last empty one."""
        cluster = self.scheduler.cluster
        return (
            cluster.active_gpus == cluster.gpus
            and instance.size < self._mix.geometry.slices
            and len(cluster.instances_on(instance.gpu)) == 1
        )

    def _elsewhere(self, kind: int, instance: Instance) -> Instance:
        """Give a request that has just been placed another place for one move, if there is one."""
        cluster = self.scheduler.cluster
        cluster.undo_place(instance)
        plan = self._planner.to_fit(self._requests[kind], 1, elsewhere=True)
        if plan is None or plan.moves[0].gpu == instance.gpu:
            return cluster.place(instance.gpu, instance.profile, instance.start)
        return self._carry_out(plan)

    def _carry_out(self, plan: Plan) -> Instance:
        """Make the moves of a plan, pay them, and place the request they were made for."""
        cluster = self.scheduler.cluster
        made = carry_out(cluster, plan.moves)
        for move, instance in zip(plan.moves, made, strict=True):
            until = self._until.pop(move.instance.id)
            self._leaving[until].remove(move.instance.id)
            self._stays(instance, until)
        self._budget.spend(len(plan.moves))
        self.moves += len(plan.moves)
        self.moved_slices += plan.moved_slices
        assert plan.gpu is not None
        assert plan.placement is not None
        return cluster.put(plan.gpu, plan.placement.number)

    def _stays(self, instance: Instance, until: int) -> None:
        self._until[instance.id] = until
        self._leaving[until].add(instance.id)

    def advance(self, arrivals: Arrivals, begin: int, trace: SmallInts) -> None:
        """Go through the slots from ``begin`` on and fill in the trace, as `EngineRun` does."""
        cluster = self.scheduler.cluster
        pairs = zip(arrivals.kinds.tolist(), arrivals.lifetimes.tolist(), strict=True)
        for i, (kind, lifetime) in enumerate(pairs):
            trace[i, 0] = self.slot(begin + i, kind, lifetime)
            trace[i, 2] = cluster.occupied_slices
            trace[i, 3] = cluster.active_gpus
            trace[i, 4] = round(cluster.fragmentation() * cluster.gpus)


@dataclass(frozen=True)
class Migration(Steady):
    """Sustained load, where a rejected request may have others moved, within a budget."""

    share: float = SHARE
    """Moves an arrival earns."""
    _runs: list[MigratingRun] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.share <= 100:
            raise SlicewiseError(
                f"share {self.share} is not in 0..100 (0.02 is 2 moves in 100 arrivals)"
            )

    def runs_on_engine(self, policy: Policy) -> bool:
        """Every policy is: migration is not compiled."""
        return True

    def simulate(self, mix: int, policy: int, run: int, tick: Tick) -> Ints:
        """Sums over the measured slots by `MIGRATION_COLUMNS`; the oracle's moves are not known."""
        self._runs.clear()
        sums = super().simulate(mix, policy, run, tick)
        moved = [(done.moves, done.moved_slices) for done in self._runs] or [(0, 0)]
        return np.concatenate([sums, np.array(moved[0], np.int64)])

    def _fresh_cluster(self, mix: int, policy: int, longest: int) -> Advance:
        if policy >= len(self.policies):
            return super()._fresh_cluster(mix, policy, longest)
        chosen = self.mixes[mix]
        cluster = Cluster.of(chosen.geometry, self.gpus, self.gpus_per_node)
        scheduler = Scheduler(cluster, self.policies[policy])
        settled = self.warmup * longest
        measured = self.units(mix) - settled
        self._runs.append(MigratingRun(scheduler, chosen, self.share, settled, measured))
        return self._runs[-1].advance


def migration_rows(outcome: Outcome) -> list[Row]:
    """The rows of the steady experiment, with moves for every arrival and slices for every move.

    ``migrated_share`` is moves over arrivals, ``moved_slices_share`` the slices moved over those
    asked for; None in the oracle's row.
    """
    experiment = outcome.experiment
    assert isinstance(experiment, Migration)
    mixes = [mix.name for mix in experiment.mixes]
    names = [policy.name for policy in experiment.policies]
    moves, slices = len(STEADY_COLUMNS), len(STEADY_COLUMNS) + 1
    rows = steady_rows(outcome)
    for row in rows:
        mix = mixes.index(str(row["distribution"]))
        row["share"] = experiment.share
        for figure, above, below in (
            ("migrated_share", moves, 0),
            ("moved_slices_share", slices, 2),
        ):
            row[figure] = row[f"{figure}_ci95"] = None
            if row["policy"] in names:
                cell = outcome.samples[mix, names.index(str(row["policy"]))]
                sums = np.array([cell[run] for run in outcome.paired_runs(mix)], np.float64)
                estimate = Ratio(sums[:, above], sums[:, below]).estimate()
                row[figure] = estimate.value
                if not math.isnan(estimate.low):
                    row[f"{figure}_ci95"] = [estimate.low, estimate.high]
    return rows
