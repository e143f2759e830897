"""Explaining a decision before it is made: where a request would go, what that costs, why not
elsewhere.

Nothing changes by it, not even whose turn it is. GPUs in the same state are alike, and so are those
that only differ in what the policy does not look at: one stands for all of them, and for table
policies the work does not grow with the cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from typing import NamedTuple

import numpy as np

from slicewise.core.errors import SlicewiseError
from slicewise.core.fragmentation import Reading, score_table
from slicewise.core.geometry import Placement
from slicewise.core.idset import NONE
from slicewise.core.request import Rejection, Request
from slicewise.core.states import GpuState
from slicewise.core.tables import cached
from slicewise.engine.reasons import Reasons, gpu_name
from slicewise.engine.scheduler import Scheduler
from slicewise.policies.base import (
    AdaptivePolicy,
    Key,
    Policy,
    ScanPolicy,
    ScorePolicy,
    TablePolicy,
    Ties,
)
from slicewise.policies.ranking import PICKED_ONLY, RANK_SHIFT, Ranking


class Cost(NamedTuple):
    """What a placement takes from those who come after."""

    partial: int
    """By how much F of the GPU grows, windows blocked in part."""
    overlap: int
    """The same with every overlapped window counted."""
    lost: int
    """Legal placements of plain profiles that are open now and would not be any more."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request would go."""

    gpu: int
    placement: Placement
    cost: Cost


@dataclass(frozen=True, slots=True)
class OtherPlace(Place):
    """Where it would not go."""

    alike: int
    """GPUs in this state; ``gpu`` is the lowest of them."""
    why: str
    """Why it lost, in a sentence."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """A decision, explained."""

    outcome: Place | Rejection
    others: tuple[OtherPlace, ...]
    """Other places that are open, the best first."""


@dataclass(frozen=True, slots=True)
class _Option:
    """An open place, and how the policy ranks it."""

    states: tuple[int, ...]
    """The states whose GPUs are alike to the policy: the same slices, budgets and key."""
    placement: Placement
    waste: Fraction
    key: Key
    """What the policy makes of it; None where it does not consider such a GPU."""
    own: bool
    """Whether it is what the policy would do on such a GPU."""


class Explainer:
    """Explains the decisions of a scheduler, and what other policies would decide."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._cluster = scheduler.cluster
        self._reasons = Reasons(scheduler.cluster)
        self._rankings: dict[Policy, Ranking] = {}

    def explain(self, request: Request, most: int = 5) -> Explanation:
        """Where the scheduler would place a request now, and at most so many other places."""
        policy = self._scheduler.policy
        picked, outcome = self._choose(request, policy)
        chosen: _Option | None = None
        options = []
        for option in self._options(request, policy):
            if isinstance(outcome, Place) and self._is(option, outcome):
                chosen = option
            else:
                options.append(option)
        options.sort(key=self._order)
        others = tuple(
            self._other(option, self._why(option, chosen, picked)) for option in options[:most]
        )
        return Explanation(outcome, others)

    def choice(self, request: Request, policy: Policy) -> Place | Rejection:
        """Where a policy would place a request now; the same object every time is the fastest."""
        return self._choose(request, policy)[1]

    def _choose(self, request: Request, policy: Policy) -> tuple[int, Place | Rejection]:
        """The GPU a policy picks (or NONE), and what comes of it."""
        cluster = self._cluster
        if isinstance(policy, ScanPolicy):
            spot = policy.choose(cluster, request)
            if spot is None:
                return NONE, self._reasons.for_cluster(request)
            return spot.gpu, self._place(*spot)
        ranking = self._ranking(policy)
        ranking.turn = self._scheduler.turn
        gpu, number = ranking.choose(request)
        if gpu == NONE:
            return NONE, self._reasons.for_cluster(request)
        if number == PICKED_ONLY:
            return gpu, self._reasons.for_gpu(request, gpu)
        return gpu, self._place(gpu, cluster.state(gpu).geometry.placements[number])

    def _ranking(self, policy: Policy) -> Ranking:
        if not isinstance(policy, TablePolicy | AdaptivePolicy):
            raise SlicewiseError(f"policy {policy.name!r} is of no kind that can be explained")
        ranking = self._rankings.get(policy)
        if ranking is None:
            ranking = self._rankings[policy] = Ranking(policy, self._cluster)
        return ranking

    def _place(self, gpu: int, placement: Placement) -> Place:
        return Place(gpu, placement, cost_of(self._cluster.state(gpu), placement))

    # Other places

    def _options(self, request: Request, policy: Policy) -> Iterator[_Option]:
        """Every place that is open, one for all states that are alike."""
        found: dict[tuple[object, ...], list[_Option]] = {}
        for option in self._open_places(request, policy):
            state = self._cluster.states[option.states[0]]
            same = found.setdefault((state.geometry, state.mask, state.used, option.placement), [])
            for at, known in enumerate(same):
                if (known.key, known.own) == (option.key, option.own):
                    same[at] = replace(known, states=known.states + option.states)
                    break
            else:
                same.append(option)
        return chain.from_iterable(found.values())

    def _open_places(self, request: Request, policy: Policy) -> Iterator[_Option]:
        """Every place that is open, one for each state, profile and start."""
        cluster = self._cluster
        table = self._table(policy)
        ranks = self._ranks(request, policy)
        for number in np.flatnonzero(cluster.first < NONE).tolist():
            state = cluster.states[number]
            key, chosen = ranks.get(number, (None, None))
            for waste, profile in request.candidates(state.geometry):
                for start in state.feasible_starts(profile):
                    placement = state.geometry.placement(profile.name, start)
                    assert placement is not None  # a feasible start is a legal one
                    own = placement.number == chosen
                    if isinstance(table, ScorePolicy):
                        own = True
                        key = table.score(state, profile, start)
                    yield _Option((number,), placement, waste, key, own)

    def _table(self, policy: Policy) -> Policy:
        """The policy that ranks right now."""
        return policy.table(self._cluster) if isinstance(policy, AdaptivePolicy) else policy

    def _ranks(self, request: Request, policy: Policy) -> dict[int, tuple[Key, int]]:
        """By state that a table policy considers: what it makes of it, and where it starts."""
        if isinstance(policy, ScanPolicy):
            return {}
        row = self._ranking(policy).row(request)
        return {
            state: (row.keys[rank >> RANK_SHIFT][1], row.placement[state])
            for state, rank in zip(row.states.tolist(), row.ranks.tolist(), strict=True)
        }

    def _order(self, option: _Option) -> tuple[object, ...]:
        """The best first; what the policy does not consider last."""
        unranked = option.key is None
        return (
            unranked,
            option.waste,
            0 if unranked else option.key,
            not option.own,
            self._lowest(option),
            option.placement.start,
        )

    def _lowest(self, option: _Option) -> int:
        """The lowest GPU in the states of an option."""
        return int(self._cluster.first[list(option.states)].min())

    def _is(self, option: _Option, place: Place) -> bool:
        here = self._cluster.state_of[place.gpu]
        return here in option.states and option.placement == place.placement

    def _other(self, option: _Option, why: str) -> OtherPlace:
        cluster = self._cluster
        return OtherPlace(
            self._lowest(option),
            option.placement,
            cost_of(cluster.states[option.states[0]], option.placement),
            sum(len(cluster.members[state]) for state in option.states),
            why,
        )

    def _why(self, option: _Option, chosen: _Option | None, picked: int) -> str:
        """Why an option lost to the one chosen, if one was."""
        policy = self._scheduler.policy
        name = policy.name
        if isinstance(policy, ScanPolicy):
            return f"{name} looks at every GPU itself, and chose otherwise"
        if option.key is None:
            return f"{name} does not consider such a GPU"
        if chosen is None:
            return f"{name} picked {gpu_name(self._cluster, picked)} and tries no other"
        if not option.own:
            return f"{name} would place it differently on such a GPU"
        if option.waste != chosen.waste:
            return (
                f"{option.placement.profile.name} is more than was asked for: it wastes "
                f"{float(option.waste):.0%} of a GPU, the chosen profile {float(chosen.waste):.0%}"
            )
        if option.key != chosen.key:
            here, there = (
                self._table(policy).in_words(one.key, self._cluster.states[one.states[0]].geometry)
                for one in (option, chosen)
            )
            return f"{name}: {here}; at the chosen place {there}"
        if self._cluster.state_of[picked] in option.states:
            return f"as good to {name}, but slice {chosen.placement.start} comes first"
        table = self._table(policy)
        turn = " in turn" if isinstance(table, TablePolicy) and table.ties is Ties.ROTATE else ""
        return f"as good to {name}, but {gpu_name(self._cluster, picked)} comes first{turn}"


def cost_of(state: GpuState, placement: Placement) -> Cost:
    """What it costs to make a placement on a GPU in this state."""
    geometry, before = state.geometry, state.mask
    after = before | placement.window
    partial = score_table(geometry, Reading.PARTIAL)
    overlap = score_table(geometry, Reading.OVERLAP)
    return Cost(
        partial[after] - partial[before],
        overlap[after] - overlap[before],
        open_places(state) - open_places(state.after(placement)),
    )


@cached(1 << 16)
def open_places(state: GpuState) -> int:
    """How many placements of plain profiles the hardware would accept on such a GPU."""
    return sum(len(state.feasible_starts(profile)) for profile in state.geometry.plain_profiles)
