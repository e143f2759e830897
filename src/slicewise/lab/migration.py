"""The steady experiment with migration: instances may be moved to place a rejected request.

Moves are paid from a budget: every arrival earns a share of a move, and unspent moves are saved.
So the number of moves never exceeds that share of the arrivals, in the whole run and in its
measured part. The arrivals are those of `Steady`, so results can be compared run by run.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from slicewise.core.cluster import Cluster, Instance
from slicewise.core.errors import SlicewiseError
from slicewise.core.request import Rejection, Request
from slicewise.engine.defrag import Plan, Planner
from slicewise.engine.move_budget import MoveBudget, worth
from slicewise.engine.moves import carry_out
from slicewise.engine.scheduler import Scheduler
from slicewise.lab.engine_loop import advance_slots
from slicewise.lab.experiment import STEADY_COLUMNS, Advance, Steady, Tick
from slicewise.lab.mix import Mix
from slicewise.lab.results import Row, put_estimate, steady_rows
from slicewise.lab.runner import Outcome
from slicewise.lab.statistics import Ratio
from slicewise.lab.workload import Arrivals, Ints, SmallInts
from slicewise.policies.base import Policy

MIGRATION_COLUMNS = (*STEADY_COLUMNS, "moves", "moved_slices")
"""The columns that are summed over the measured slots."""

SHARE = 0.02
"""The default number of moves that an arrival earns: two in a hundred."""

SPARED_FROM = 2
"""The number of saved moves from which one may be spent to keep the last empty GPU empty."""


class MigratingRun:
    """A scheduler, its instances by the slot in which they end, and a planner of moves."""

    def __init__(
        self, scheduler: Scheduler, mix: Mix, share: float, settled: int, measured: int
    ) -> None:
        self.scheduler = scheduler
        self.moves = self.moved_slices = 0
        """Counted from the beginning of the measurement."""
        self._settled, self._measured = settled, measured
        self._mix = mix
        self._budget = MoveBudget(share)
        # The planner chooses the targets of moves, so they are the same for every policy.
        self._planner = Planner(scheduler.cluster)
        self._requests = [Request(profile.name) for profile in mix.profiles]
        self._ending: defaultdict[int, set[int]] = defaultdict(set)
        self._until: dict[int, int] = {}
        """By instance: the slot in which it ends."""

    def slot(self, slot: int, kind: int, lifetime: int) -> bool:
        """Release what ends in this slot, decide the arrival; return whether it is accepted."""
        for identity in sorted(self._ending.pop(slot, ())):
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
            instance = self._replace(kind, outcome)
        else:
            instance = outcome
        if instance is None:
            return False
        self._schedule_end(instance, slot + lifetime)
        return True

    def _rescue(self, kind: int) -> Instance | None:
        """Make room for a rejected request if possible and worth the moves."""
        cluster, geometry = self.scheduler.cluster, self._mix.geometry
        size = self._mix.profiles[kind].size
        gain = worth(size, geometry.slices, cluster.free_slices, cluster.slices)
        longest = self._budget.longest_plan(gain)
        plan = self._planner.to_fit(self._requests[kind], longest) if longest else None
        # A plan without moves means that a strict policy rejected an open window.
        return self._carry_out(plan) if plan is not None and plan.moves else None

    def _took_last_empty(self, instance: Instance) -> bool:
        """Return whether an instance took the last empty GPU, which larger ones may need."""
        cluster = self.scheduler.cluster
        return (
            cluster.active_gpus == cluster.gpus
            and instance.size < self._mix.geometry.slices
            and len(cluster.instances_on(instance.gpu)) == 1
        )

    def _replace(self, kind: int, instance: Instance) -> Instance:
        """Place a request that was just placed on another GPU instead, if one move suffices."""
        cluster = self.scheduler.cluster
        cluster.undo_place(instance)
        plan = self._planner.to_fit(self._requests[kind], 1, elsewhere=True)
        if plan is None or plan.moves[0].gpu == instance.gpu:
            return cluster.place(instance.gpu, instance.profile, instance.start)
        return self._carry_out(plan)

    def _carry_out(self, plan: Plan) -> Instance:
        """Execute the moves of a plan, pay for them, and place the request."""
        cluster = self.scheduler.cluster
        made = carry_out(cluster, plan.moves)
        for move, instance in zip(plan.moves, made, strict=True):
            until = self._until.pop(move.instance.id)
            self._ending[until].remove(move.instance.id)
            self._schedule_end(instance, until)
        self._budget.spend(len(plan.moves))
        self.moves += len(plan.moves)
        self.moved_slices += plan.moved_slices
        assert plan.gpu is not None
        assert plan.placement is not None
        return cluster.put(plan.gpu, plan.placement.number)

    def _schedule_end(self, instance: Instance, until: int) -> None:
        self._until[instance.id] = until
        self._ending[until].add(instance.id)

    def advance(self, arrivals: Arrivals, begin: int, trace: SmallInts) -> None:
        """Run the slots from ``begin`` and fill in the trace, as `EngineRun` does."""
        advance_slots(self.slot, self.scheduler.cluster, arrivals, begin, trace)


@dataclass(frozen=True)
class Migration(Steady):
    """Sustained load with moves for rejected requests, within a budget."""

    share: float = SHARE
    """The moves that an arrival earns."""
    _runs: list[MigratingRun] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.share <= 100:
            raise SlicewiseError(
                f"share {self.share} is not in 0..100 (0.02 is 2 moves in 100 arrivals)"
            )

    def runs_on_engine(self, policy: Policy) -> bool:
        """Return True: migration is not compiled."""
        return True

    def simulate(self, mix: int, policy: int, run: int, tick: Tick) -> Ints:
        """Return sums over the measured slots by `MIGRATION_COLUMNS`; an oracle has no moves."""
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
    """Return the rows of the steady experiment with the share of moves and of moved slices.

    ``migrated_share`` is moves per arrival, ``moved_slices_share`` moved slices per requested
    slice; both are None in the oracle's row.
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
                put_estimate(row, figure, Ratio(sums[:, above], sums[:, below]).estimate())
    return rows
