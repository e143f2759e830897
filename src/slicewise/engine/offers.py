"""Placements in the policy's order, for requests that are restricted to certain nodes.

`Scheduler.submit` takes the best place in the cluster. A pod, or several instances that must share
a node, cannot use every node, so here the caller goes through the best place, the next best and so
on until a node is suitable. An external scheduler, which also considers CPUs and memory, may ask
which nodes have room and return with one of them. It may ask about a thousand nodes at a time, so
several instances are planned on the state tables, and the cluster is changed only at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from typing import NamedTuple

import numpy as np

from slicewise.core.cluster import Instance, Node
from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Profile
from slicewise.core.idset import NONE
from slicewise.core.request import Reason, Rejection, Request
from slicewise.core.states import ILLEGAL, GpuState
from slicewise.core.tables import cached
from slicewise.engine.reasons import fragmented_for
from slicewise.engine.scheduler import Scheduler
from slicewise.policies.ranking import Ranking, Row

MOST_STEPS = 2_000
"""The number of placements considered on a node before it counts as one without room for all."""
MOST_STEPS_IN_ALL = 10_000
"""The number considered on all nodes together; after that, kinds of requests are checked alone."""


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


class Offer(NamedTuple):
    """A GPU and the number of a placement on it."""

    gpu: int
    placement: int


@dataclass(frozen=True, slots=True)
class Unfit:
    """There is room, but only on unsuitable nodes."""

    nodes: tuple[str, ...]
    """The nodes with room, in the policy's order."""

    def __bool__(self) -> bool:
        return False


class Offers:
    """The free places of a cluster, in the order of its scheduler's policy."""

    def __init__(self, scheduler: Scheduler) -> None:
        ranking = scheduler.ranking
        if ranking is None:
            raise SlicewiseError(
                f"policy {scheduler.policy.name!r} looks at GPUs one by one and cannot say which "
                "place is the next best; choose a policy that ranks states"
            )
        self._ranking: Ranking = ranking
        self._cluster = scheduler.cluster
        self._reasons = scheduler.reasons
        self._ranks: dict[Request, dict[int, int]] = {}
        self._rooms: dict[tuple[Request, int], int] = {}
        self._steps = 0
        """The steps left for all nodes together."""

    def __call__(self, request: Request) -> Iterator[Offer]:
        """Every GPU with room for a request, the best first, with the policy's placement on it.

        The cluster must not change during the iteration.
        """
        row = self._ranking.row(request)
        cluster = self._cluster
        taken = np.nonzero(cluster.first.take(row.states) < NONE)[0] if len(row.states) else ()
        alike: list[int] = []
        rank = -1
        for index in taken:
            state = int(row.states[index])
            if row.placement[state] < 0:
                continue  # a strict policy rejects the request in this state
            if row.ranks[index] != rank:
                yield from self._members(row, alike)
                alike, rank = [], int(row.ranks[index])
            alike.append(state)
        yield from self._members(row, alike)

    def _members(self, row: Row, states: list[int]) -> Iterator[Offer]:
        """The GPUs in states that the policy likes equally, by its rule for ties."""
        cluster = self._cluster
        gpus: Iterator[int] = merge(*(cluster.members[state] for state in states))
        if row.rotates:
            turn = self._ranking.turn
            gpus = iter(sorted(gpus, key=lambda gpu: (gpu < turn, gpu)))
        for gpu in gpus:
            yield Offer(gpu, row.placement[cluster.state_of[gpu]])

    def place(
        self, requests: Sequence[Request], fits: Callable[[str], bool]
    ) -> tuple[Instance, ...] | Rejection | Unfit:
        """Place all requests together on one node that ``fits`` accepts, or none of them.

        Several requests go to the first such node with room for all. Nodes are tried in the
        policy's order for the largest request.
        """
        if not requests:
            raise SlicewiseError("there is nothing to place")
        self._forget()
        first = requests[self._order(requests)[0]]
        verdicts: dict[str, bool] = {}
        unfit: list[str] = []
        found = False
        for gpu, placement in self(first):
            found = True
            node = self._cluster.node_of(gpu)
            if node.name in verdicts:
                continue
            verdicts[node.name] = will_do = fits(node.name)
            if len(requests) == 1:
                if will_do:
                    return (self._put(gpu, placement),)
                unfit.append(node.name)
                continue
            plan = self._plan(node, requests)
            if plan is None:
                continue
            if will_do:
                return self._carry_out(plan, requests)
            unfit.append(node.name)
        if unfit:
            return Unfit(tuple(unfit))
        return self._refusal(requests, found)

    def _carry_out(
        self, plan: Sequence[Offer], requests: Sequence[Request]
    ) -> tuple[Instance, ...]:
        """Make the placements of a plan; returns the instances in the order of the requests."""
        placed = [self._put(*offer) for offer in plan]
        return tuple(one for _, one in sorted(zip(self._order(requests), placed, strict=True)))

    def _forget(self) -> None:
        """Forget ranks and rooms of an earlier call: policies and states may have changed."""
        self._ranks.clear()
        self._rooms.clear()

    def _put(self, gpu: int, placement: int) -> Instance:
        self._ranking.turn = gpu + 1
        return self._cluster.put(gpu, placement)

    def _size(self, request: Request) -> int:
        sizes = [p.size for g in self._cluster.models for _, p in request.candidates(g)]
        return min(sizes, default=0)

    def _refusal(self, requests: Sequence[Request], found: bool) -> Rejection:
        """Why no node has room for all requests."""
        if found:
            for request in requests:
                if next(self(request), None) is None:
                    return self._reasons.for_cluster(request)
            words = " and ".join(map(str, requests))
            return Rejection(requests[0], Reason.CAPACITY, f"no node has room for {words} together")
        largest = max(requests, key=self._size)
        return self._reasons.for_cluster(largest)

    # External schedulers

    def nodes(self, requests: Sequence[Request], among: Container[str]) -> list[str]:
        """The nodes in ``among`` with room for all requests together, the best first.

        For several requests, the order is that of the policy for the largest of them. If the search
        takes too long, the result may include a node without room.
        """
        self._forget()
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
        """Whether a node has room for all; for a single kind of request, counting is enough."""
        states = [self._cluster.state_of[gpu] for gpu in self._gpus(node)]
        if not self._may_fit(states, kinds):
            return False
        return self._steps <= 0 or self._plan(node, requests) is not None

    def place_on(self, name: str, requests: Sequence[Request]) -> tuple[Instance, ...] | Rejection:
        """Place all requests on this node, or none and return the rejection."""
        self._forget()
        plan = self._plan(self._cluster.node(name), requests)
        if plan is None:
            why = self.why_not(name, requests)
            return Rejection(why.request, why.reason, f"node {name!r}: {why.detail}")
        return self._carry_out(plan, requests)

    def take_back(self, placed: Sequence[Instance], requests: Sequence[Request]) -> None:
        """Undo the placements that were just made for these requests."""
        for index in reversed(self._order(requests)):
            self._cluster.undo_place(placed[index])

    def why_not(self, name: str, requests: Sequence[Request]) -> Rejection:
        """Why a node has no room for all requests together.

        The detail does not name the node, so that equal reasons can be grouped.
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
        """The order in which requests are placed: the largest first, equal requests together."""
        first = {request: index for index, request in reversed(list(enumerate(requests)))}
        sizes = {request: -self._size(request) for request in first}
        return sorted(range(len(requests)), key=lambda i: (sizes[requests[i]], first[requests[i]]))

    def _gpus(self, node: Node) -> list[int]:
        return [gpu for gpu in node.gpus if gpu in self._cluster.schedulable]

    def _is_fragmented(self, number: int, request: Request) -> bool:
        state = self._cluster.states[number]
        return fragmented_for(state, request.candidates(state.geometry))

    # Several on one node

    def _plan(self, node: Node, requests: Sequence[Request]) -> list[Offer] | None:
        """Places for all requests on a node, in order; the policy's preferences are tried first."""
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
        """Whether each kind of request would fit if it were the only kind."""
        return all(
            sum(self._most(state, kind) for state in states) >= count
            for kind, count in kinds.items()
        )

    def _choices(
        self, states: list[int], request: Request, node: Node
    ) -> list[tuple[int, int, int]]:
        """GPU index, placement and resulting state of each choice, the policy's preferences first.

        Of GPUs in the same state, only the first is included: what fails on one fails on all.
        """
        chosen = self._ranking.row(request).placement
        ranks = self._rank_of(request)
        after = self._cluster.after_place
        distinct = {state: states.index(state) for state in states}
        liked = sorted(
            (ranks[state], index, state) for state, index in distinct.items() if chosen[state] >= 0
        )
        found = [(index, chosen[state], after[state][chosen[state]]) for _, index, state in liked]
        for _, profile in sorted(request.candidates(node.geometry), key=lambda one: one[0]):
            for placement in node.geometry.placements:
                if placement.profile is profile:
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
