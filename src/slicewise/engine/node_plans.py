"""Several instances on one node: a search over the state tables, which changes nothing.

An external scheduler may ask about a thousand nodes at a time, so the search is bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from slicewise.core.cluster import Cluster, Node
from slicewise.core.geometry import Profile
from slicewise.core.request import Request
from slicewise.core.states import ILLEGAL, GpuState
from slicewise.core.tables import cached
from slicewise.engine.timed_offers import Offer, PlannedEnds, Term
from slicewise.policies.lease_aware import LeaseAware
from slicewise.policies.ranking import Ranking

MOST_STEPS = 2_000
"""The number of placements considered on a node before it counts as one without room for all."""


@cached(1 << 16)
def most_of(gpu: GpuState, profiles: tuple[Profile, ...]) -> int:
    """The largest number of instances of these profiles that fit on a GPU in this state."""
    found = 0
    for profile in profiles:
        for start in gpu.feasible_starts(profile):
            placement = gpu.geometry.placement(profile.name, start)
            assert placement is not None  # a feasible start is a legal one
            found = max(found, 1 + most_of(gpu.after(placement), profiles))
    return found


class NodePlans:
    """Plans for one call, during which policy and states stay as they are."""

    def __init__(self, ranking: Ranking, cluster: Cluster, term: Term) -> None:
        self._ranking = ranking
        self._cluster = cluster
        self._term = term
        policy = ranking.table()
        self._policy = policy if isinstance(policy, LeaseAware) else None
        self._ranks: dict[Request, dict[int, int]] = {}
        self._rooms: dict[tuple[Request, int], int] = {}
        self.steps = 0
        """The placements considered so far."""

    def gpus(self, node: Node) -> list[int]:
        """The GPUs of a node that take instances."""
        return [gpu for gpu in node.gpus if gpu in self._cluster.schedulable]

    def may_fit(self, states: Sequence[int], kinds: Counter[Request]) -> bool:
        """Whether each kind of request would fit if it were the only kind."""
        return all(
            sum(self._most(state, kind) for state in states) >= count
            for kind, count in kinds.items()
        )

    def plan(self, node: Node, ordered: Sequence[Request]) -> list[Offer] | None:
        """Places for all requests on a node, in order; the policy's preferences are tried first."""
        gpus = self.gpus(node)
        states = [self._cluster.state_of[gpu] for gpu in gpus]
        left = [Counter(ordered[depth:]) for depth in range(len(ordered))]
        ends = None
        if self._policy is not None and gpus:
            ends = PlannedEnds(self._cluster, self._policy, node, gpus, self._term)
        plan: list[Offer] = []
        vain: set[tuple[int, tuple[int, ...]]] = set()
        last = self.steps + MOST_STEPS

        def go_on() -> bool:
            depth = len(plan)
            if depth == len(ordered):
                return True
            key = depth, tuple(sorted(states))
            if key in vain or not self.may_fit(states, left[depth]):
                return False
            for index, placement, following in self._choices(states, ordered[depth], node, ends):
                if self.steps == last:
                    return False
                self.steps += 1
                before, states[index] = states[index], following
                known = None if ends is None else ends.place(index, placement)
                plan.append(Offer(gpus[index], placement))
                if go_on():
                    return True
                plan.pop()
                states[index] = before
                if ends is not None and known is not None:
                    ends.undo(index, known)
            vain.add(key)
            return False

        return plan if go_on() else None

    def _choices(
        self, states: list[int], request: Request, node: Node, ends: PlannedEnds | None
    ) -> list[tuple[int, int, int]]:
        """GPU index, placement and resulting state of each choice, the policy's preferences first.

        Of GPUs in the same state, only one is included: what fails on one fails on all.
        """
        after = self._cluster.after_place
        distinct = {state: states.index(state) for state in states}
        liked = self._liked(states, request, distinct, ends)
        distinct |= {states[index]: index for index, _ in liked}
        found = [(index, number, after[states[index]][number]) for index, number in liked]
        chosen = {states[index]: number for index, number in liked}
        for _, profile in sorted(request.candidates(node.geometry), key=lambda one: one[0]):
            for placement in node.geometry.placements:
                if placement.profile is profile:
                    for state, index in distinct.items():
                        following = after[state][placement.number]
                        if following != ILLEGAL and placement.number != chosen.get(state):
                            found.append((index, placement.number, following))
        return found

    def _liked(
        self,
        states: list[int],
        request: Request,
        distinct: dict[int, int],
        ends: PlannedEnds | None,
    ) -> list[tuple[int, int]]:
        """A GPU index for each state that the policy considers, and its placement, best first."""
        row = self._ranking.row(request)
        ranks = self._ranks.get(request)
        if ranks is None:
            ranks = dict(zip(row.states.tolist(), row.ranks.tolist(), strict=True))
            self._ranks[request] = ranks
        if ends is not None:
            return ends.liked(row, ranks, states)
        considered = [state for state in distinct if row.placement[state] >= 0]
        considered.sort(key=lambda state: (ranks[state], distinct[state]))
        return [(distinct[state], row.placement[state]) for state in considered]

    def _most(self, number: int, request: Request) -> int:
        most = self._rooms.get((request, number))
        if most is None:
            state = self._cluster.states[number]
            profiles = tuple(profile for _, profile in request.candidates(state.geometry))
            most = self._rooms[request, number] = most_of(state, profiles)
        return most
