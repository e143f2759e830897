"""Defragmentation by budget: which instances to move so that a request fits, or to win room back.

The planner tries moves on the cluster itself and takes them back, so every plan it proposes has
been carried out once, step by step, by the code that will carry it out again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain, permutations
from typing import NamedTuple

from slicewise.core.cluster import Cluster, Instance
from slicewise.core.geometry import Placement
from slicewise.core.request import Request
from slicewise.core.states import ILLEGAL
from slicewise.engine.destinations import Destinations
from slicewise.engine.moves import Move, Trail
from slicewise.engine.openings import Opening, Openings
from slicewise.engine.room import room, room_of
from slicewise.policies.base import AdaptivePolicy, TablePolicy

EXACT = 2
"""Up to so many moves, no shorter plan exists than the one proposed."""

EFFORT = 500
"""Steps of the search for a longer plan before it gives up."""

COMPARED = 256
"""How many plans of equal length are compared before the best of them is taken."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Moves in the order to make them, and what they win."""

    moves: tuple[Move, ...]
    room_before: int
    room_after: int
    """The cluster's room once the moves are made (and before the request is placed)."""
    gpu: int | None = None
    """Where the request then fits, when the plan was made for one."""
    placement: Placement | None = None

    @property
    def moved_slices(self) -> int:
        """Memory slices of the instances that move."""
        return sum(move.instance.size for move in self.moves)


class _Task(NamedTuple):
    """An instance that has to move: to this place, or wherever there is one."""

    instance: Instance
    to: tuple[int, Placement] | None = None


class _Goal(NamedTuple):
    """What a search is for: this opening, in how many moves more than it has blockers."""

    opening: Opening
    exact: bool
    """Whether every possibility is tried."""


_Order = tuple[Instance, int, int]
"""An instance, and the GPU and the number of the placement it goes to."""

_Kept = tuple[tuple[int, int], ...]
"""GPUs and windows on them that are being freed: nothing may move in there."""


class Planner:
    """Plans moves on one cluster; where instances go is ranked by a policy."""

    def __init__(
        self,
        cluster: Cluster,
        policy: TablePolicy | AdaptivePolicy | None = None,
        pinned: Collection[int] = (),
        effort: int = EFFORT,
    ) -> None:
        self.pinned = set(pinned)
        """Ids of the instances that stay where they are."""
        self._cluster = cluster
        self._homes = Destinations(cluster, policy)
        self._roomiest = self._homes if policy is None else Destinations(cluster)
        self._openings = Openings(cluster)
        self._trail = Trail(cluster)
        self._effort = effort
        self._left = 0
        self._placeable: dict[Request, bool] = {}

    def to_fit(self, request: Request, budget: int, elsewhere: bool = False) -> Plan | None:
        """The fewest moves after which the request fits, at most ``budget``; None without any.

        Among plans of as many moves, the one that leaves the most room once the request is
        placed. Up to two moves the number is the smallest possible; beyond that the search is
        bounded and may miss a plan, or a shorter one. With ``elsewhere`` the windows that are
        open already are left alone, and the request is to have another.
        """
        before = room(self._cluster)
        self._left = self._effort
        self._placeable.clear()
        for count in range(elsewhere, budget + 1):
            plan = self._best_of(count, request, before, elsewhere)
            if plan is not None:
                return plan
        return None

    def to_win_room(self, budget: int) -> Plan:
        """At most ``budget`` moves that win back room, step by step.

        A step is the single move that wins the most, or several moves that together free a
        window, whichever wins more a move. With a budget of one this is the best there is;
        beyond that it is not promised.
        """
        before = room(self._cluster)
        try:
            while len(self._trail.moves) < budget:
                step = self._best_step(budget - len(self._trail.moves))
                if not step:
                    break
                for move in step:
                    self._trail.make(*move)
            return Plan(tuple(self._trail.moves), before, before + self._trail.won)
        finally:
            self._trail.back_to(0)

    def _best_of(self, count: int, request: Request, before: int, elsewhere: bool) -> Plan | None:
        """The best plan of so many moves."""
        best: tuple[int, Plan] | None = None
        found = 0
        exact = count <= EXACT
        for opening in self._openings.of(request, count, self.pinned):
            if elsewhere and not opening.blockers:
                continue
            try:
                if not self._opens(_Goal(opening, exact), count):
                    continue
                gpu, placement, _ = opening
                state = self._cluster.state(gpu)
                won = self._trail.won
                left = won - room_of(state) + room_of(state.after(placement))
                if best is None or left > best[0]:
                    moves = tuple(self._trail.moves)
                    best = left, Plan(moves, before, before + won, gpu, placement)
            finally:
                self._trail.back_to(0)
            found += 1
            if found == COMPARED:
                break
        return best[1] if best else None

    def _opens(self, goal: _Goal, count: int) -> bool:
        """Find moves that free an opening, and leave them made."""
        blockers = goal.opening.blockers
        kept = ((goal.opening.gpu, goal.opening.placement.window),)
        orders = permutations(blockers) if goal.exact else [_largest_first(blockers)]
        return any(
            self._solve(goal, tuple(map(_Task, order)), kept, count - len(blockers))
            for order in orders
        )

    def _solve(self, goal: _Goal, tasks: tuple[_Task, ...], kept: _Kept, spare: int) -> bool:
        """Do the tasks in order, with ``spare`` moves more where others must make room first."""
        if not tasks:
            return self._legal(goal.opening.gpu, goal.opening.placement)
        if not goal.exact:
            self._left -= 1
            if self._left < 0:
                return False
        (instance, to), rest = tasks[0], tasks[1:]
        if to is not None:
            return self._legal(*to) and self._try(goal, tasks, to, kept, spare)
        if self._trail.moves or self._has_home(instance):
            # Where it goes matters only to those who have to find a place after it.
            after = [t.instance for t in rest if t.to is None] if goal.exact else []
            for home in self._homes.of(instance, kept, after):
                if self._try(goal, tasks, home, kept, spare):
                    return True
        return spare > 0 and self._make_room(goal, tasks, kept, spare)

    def _try(
        self,
        goal: _Goal,
        tasks: tuple[_Task, ...],
        to: tuple[int, Placement],
        kept: _Kept,
        spare: int,
    ) -> bool:
        """Make the first move and go on with the other tasks; taken back when that fails."""
        made = len(self._trail.moves)
        self._trail.make(tasks[0].instance, to[0], to[1].number)
        if self._solve(goal, tasks[1:], kept, spare):
            return True
        self._trail.back_to(made)
        return False

    def _make_room(self, goal: _Goal, tasks: tuple[_Task, ...], kept: _Kept, spare: int) -> bool:
        """Have others move away first, so that the first task's instance finds a place."""
        instance = tasks[0].instance
        fixed = {task.instance.id for task in tasks} | {made.id for made in self._trail.made}
        apart = {gpu for gpu, _ in kept}
        request = self._homes.request(instance)
        for gpu, placement, blockers in self._openings.of(
            request, spare, self.pinned | fixed, apart
        ):
            clash = any(gpu == at and placement.window & window for at, window in kept)
            if clash or not blockers:  # without blockers it is a home, and was tried as one
                continue
            first = (*map(_Task, _largest_first(blockers)), _Task(instance, (gpu, placement)))
            freed = (*kept, (gpu, placement.window))
            if self._solve(goal, first + tasks[1:], freed, spare - len(blockers)):
                return True
        return False

    def _has_home(self, instance: Instance) -> bool:
        """Whether any place is open for an instance before the first move."""
        request = self._homes.request(instance)
        known = self._placeable.get(request)
        if known is None:
            known = self._placeable[request] = self._homes.best(instance, ()) is not None
        return known

    def _best_step(self, limit: int) -> list[_Order]:
        """The moves that win the most room a move; none where nothing wins any."""
        best: tuple[float, int, list[_Order]] = (0, 0, [])
        trail = self._trail
        won, made = trail.won, len(trail.moves)
        fixed = self.pinned | {instance.id for instance in trail.made}
        for moves in chain(self._single_moves(fixed), self._freeing_moves(limit, fixed)):
            # Among equals the shorter, then the one of the lower ids.
            best = min(best, ((won - trail.won) / len(moves), len(moves), moves))
            trail.back_to(made)
        return best[2]

    def _single_moves(self, fixed: Collection[int]) -> Iterator[list[_Order]]:
        """Make every move that may be the best, one after the other."""
        for instance in self._openings.movable(fixed):
            for gpu, placement in self._roomiest.of(instance, ((instance.gpu, 0),), ()):
                self._trail.make(instance, gpu, placement.number)
                yield [(instance, gpu, placement.number)]

    def _freeing_moves(self, limit: int, fixed: Collection[int]) -> Iterator[list[_Order]]:
        """Make moves that free a window with several instances in it, largest windows first."""
        self._left = self._effort
        made = len(self._trail.moves)
        for model in self._cluster.models:
            for profile in sorted(model.plain_profiles, key=lambda p: -p.size):
                request = Request(profile.name, (model.model,))
                for opening in self._openings.of(request, limit, fixed):
                    several = len(opening.blockers) > 1
                    if several and self._opens(_Goal(opening, False), len(opening.blockers)):
                        yield [self._order(move) for move in self._trail.moves[made:]]

    def _order(self, move: Move) -> _Order:
        """A move as the trail takes it."""
        geometry = self._cluster.state(move.gpu).geometry
        placement = geometry.placement(move.instance.profile, move.start)
        assert placement is not None  # the move was made
        return move.instance, move.gpu, placement.number

    def _legal(self, gpu: int, placement: Placement) -> bool:
        cluster = self._cluster
        return cluster.after_place[cluster.state_of[gpu]][placement.number] != ILLEGAL


def _largest_first(instances: Collection[Instance]) -> tuple[Instance, ...]:
    """The order in which the bounded search moves instances: the hardest to place first."""
    return tuple(sorted(instances, key=lambda i: (-i.size, i.id)))
