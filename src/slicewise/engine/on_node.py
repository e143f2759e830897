"""Nodes that have room for several instances together, and placing them on the one that is named.

Others choose the node here, such as a scheduler that looks at processors and memory as well: it
asks which nodes would do and which the policy likes best, and comes back with one of them. It may
ask about a thousand nodes at a time, so nothing is tried on the cluster itself: what would follow
from a placement is looked up, state by state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence

from slicewise.core.cluster import Instance, Node
from slicewise.core.fragmentation import is_fragmented
from slicewise.core.geometry import Profile
from slicewise.core.request import Reason, Rejection, Request
from slicewise.core.states import ILLEGAL, GpuState
from slicewise.core.tables import kept
from slicewise.engine.offers import Offer, Offers
from slicewise.engine.scheduler import Scheduler

MOST_STEPS = 2_000
"""So many placements are looked at on a node before it counts as one without room for all."""
MOST_STEPS_IN_ALL = 10_000
"""So many on all nodes together, before the rest is judged by what each kind of request needs."""


@kept(1 << 16)
def most_of(gpu: GpuState, profiles: tuple[Profile, ...]) -> int:
    """How many instances of these profiles such a GPU could take."""
    found = 0
    for profile in profiles:
        for start in gpu.feasible_starts(profile):
            placement = gpu.geometry.placement(profile.name, start)
            assert placement is not None  # a feasible start is a legal one
            found = max(found, 1 + most_of(gpu.after(placement), profiles))
    return found


class NodeOffers(Offers):
    """The nodes of a cluster, in the order in which its scheduler's policy likes them."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._ranks: dict[Request, dict[int, int]] = {}
        self._rooms: dict[tuple[Request, int], int] = {}
        self._steps = 0
        """Those left for all nodes together."""

    def nodes(self, requests: Sequence[Request], among: Container[str]) -> list[str]:
        """Those of the named nodes that have room for all requests together, the best first.

        Several requests are ordered by where the policy would put the largest of them. Where that
        takes too long to find out, a node may be named that turns out to have no room.
        """
        first = requests[self._order(requests)[0]]
        found: dict[str, Node] = {}
        for gpu, _ in self(first):
            node = self._cluster.node_of(gpu)
            if node.name not in found and node.name in among:
                found[node.name] = node
        if len(requests) == 1:
            return list(found)
        kinds = Counter(requests)
        self._steps = MOST_STEPS_IN_ALL if len(kinds) > 1 else 0
        return [name for name, node in found.items() if self._fits(node, requests, kinds)]

    def _fits(self, node: Node, requests: Sequence[Request], kinds: Counter[Request]) -> bool:
        """Whether a node has room for all: for one kind of request, it is enough to count."""
        states = [self._cluster.state_of[gpu] for gpu in self._gpus(node)]
        if not self._may_fit(states, kinds):
            return False
        return self._steps <= 0 or self._plan(node, requests) is not None

    def place_on(self, name: str, requests: Sequence[Request]) -> tuple[Instance, ...] | Rejection:
        """Place all requests on this node, or none of them and say why."""
        plan = self._plan(self._cluster.node(name), requests)
        if plan is None:
            why = self.why_not(name, requests)
            return Rejection(why.request, why.reason, f"node {name!r}: {why.detail}")
        order = self._order(requests)
        placed = [self._put(*offer) for offer in plan]
        return tuple(one for _, one in sorted(zip(order, placed, strict=True)))

    def take_back(self, placed: Sequence[Instance], requests: Sequence[Request]) -> None:
        """Take back what was just placed for these requests, as if it had never been."""
        for index in reversed(self._order(requests)):
            self._cluster.undo_place(placed[index])

    def why_not(self, name: str, requests: Sequence[Request]) -> Rejection:
        """Why a node has no room for all requests together.

        The sentence does not name the node, so that nodes alike can be told of together.
        """
        node = self._cluster.node(name)
        kinds = Counter(requests)
        for request in kinds:
            if not request.candidates(node.geometry):
                sentence = f"{node.geometry.model} has no {request}"
                return Rejection(request, Reason.UNKNOWN_PROFILE, sentence)
        states = [self._cluster.state_of[gpu] for gpu in self._gpus(node)]
        for request in kinds:
            row = self._ranking.row(request)
            if any(row.placement[state] >= 0 for state in states):
                continue
            if any(self._is_fragmented(state, request) for state in states):
                sentence = f"no window for {request} is open, although a GPU has enough free slices"
                return Rejection(request, Reason.FRAGMENTED, sentence)
            sentence = f"no GPU has enough free for {request}"
            return Rejection(request, Reason.CAPACITY, sentence)
        words = " and ".join(f"{n} x {one}" if n > 1 else str(one) for one, n in kinds.items())
        sentence = f"there is no room for {words} together"
        return Rejection(requests[0], Reason.CAPACITY, sentence)

    def _order(self, requests: Sequence[Request]) -> list[int]:
        """The order in which requests are placed: the largest first, and those alike together."""
        first = {request: index for index, request in reversed(list(enumerate(requests)))}
        sizes = {request: -self._size(request) for request in first}
        return sorted(range(len(requests)), key=lambda i: (sizes[requests[i]], first[requests[i]]))

    def _gpus(self, node: Node) -> list[int]:
        return [gpu for gpu in node.gpus if gpu in self._cluster.schedulable]

    def _is_fragmented(self, number: int, request: Request) -> bool:
        state = self._cluster.states[number]
        return any(
            is_fragmented(state.geometry, profile, state.mask)
            for _, profile in request.candidates(state.geometry)
        )

    # Several on one node

    def _plan(self, node: Node, requests: Sequence[Request]) -> list[Offer] | None:
        """Where all requests would go on a node, in order; as the policy likes best if it works."""
        cluster = self._cluster
        ordered = [requests[i] for i in self._order(requests)]
        gpus = self._gpus(node)
        states = [cluster.state_of[gpu] for gpu in gpus]
        left = [Counter(ordered[depth:]) for depth in range(len(ordered))]
        plan: list[Offer] = []
        vain: set[tuple[int, tuple[int, ...]]] = set()
        steps = MOST_STEPS

        def go_on() -> bool:
            nonlocal steps
            depth = len(plan)
            if depth == len(ordered):
                return True
            key = depth, tuple(sorted(states))
            if key in vain or not self._may_fit(states, left[depth]):
                return False
            for index, placement, following in self._choices(states, ordered[depth], node):
                steps -= 1
                if steps < 0:
                    return False
                before, states[index] = states[index], following
                plan.append(Offer(gpus[index], placement))
                if go_on():
                    return True
                plan.pop()
                states[index] = before
            vain.add(key)
            return False

        found = go_on()
        self._steps -= MOST_STEPS - steps
        return plan if found else None

    def _may_fit(self, states: Sequence[int], kinds: Counter[Request]) -> bool:
        """Whether each kind of request would find room enough if it were alone."""
        return all(
            sum(self._most(state, kind) for state in states) >= count
            for kind, count in kinds.items()
        )

    def _choices(
        self, states: list[int], request: Request, node: Node
    ) -> list[tuple[int, int, int]]:
        """A GPU by index, a placement and the state that follows: what the policy prefers first.

        Of GPUs in the same state, only the first is named: what fails on one fails on all.
        """
        chosen = self._ranking.row(request).placement
        ranks = self._rank_of(request)
        after = self._cluster.after_place
        distinct = {state: states.index(state) for state in states}
        liked = sorted(
            (ranks[state], index, state) for state, index in distinct.items() if chosen[state] >= 0
        )
        found = [(index, chosen[state], after[state][chosen[state]]) for _, index, state in liked]
        profiles = {profile for _, profile in request.candidates(node.geometry)}
        for placement in node.geometry.placements:
            if placement.profile in profiles:
                for state, index in distinct.items():
                    following = after[state][placement.number]
                    if following != ILLEGAL and placement.number != chosen[state]:
                        found.append((index, placement.number, following))
        return found

    def _most(self, number: int, request: Request) -> int:
        most = self._rooms.get((request, number))
        if most is None:
            state = self._cluster.states[number]
            profiles = tuple(profile for _, profile in request.candidates(state.geometry))
            most = self._rooms[request, number] = most_of(state, profiles)
        return most

    def _rank_of(self, request: Request) -> dict[int, int]:
        ranks = self._ranks.get(request)
        if ranks is None:
            row = self._ranking.row(request)
            ranks = dict(zip(row.states.tolist(), row.ranks.tolist(), strict=True))
            self._ranks[request] = ranks
        return ranks
