"""Placements in the policy's order, for requests that are restricted to certain nodes.

`Scheduler.submit` takes the best place in the cluster. A pod, or several instances that must share
a node, cannot use every node, so here the caller goes through the best place, the next best and so
on until a node is suitable. An external scheduler, which also considers CPUs and memory, may ask
which nodes have room and return with one of them. Several instances are planned on the state
tables, and the cluster is changed only at the end.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge

import numpy as np

from slicewise.core.cluster import Instance, Node
from slicewise.core.errors import SlicewiseError
from slicewise.core.idset import NONE
from slicewise.core.request import Reason, Rejection, Request
from slicewise.engine.node_plans import NodePlans
from slicewise.engine.reasons import fragmented_for
from slicewise.engine.scheduler import Scheduler
from slicewise.engine.timed_offers import Offer, Takes, Term, timed_offers
from slicewise.policies.lease_aware import LeaseAware
from slicewise.policies.ranking import Ranking, Row

MOST_STEPS_IN_ALL = 10_000
"""The number of placements considered on all nodes together; after that, kinds of requests are
checked alone."""


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

    def __call__(
        self,
        request: Request,
        takes: Takes = lambda gpu: True,
        *,
        now: float = 0.0,
        ends: float = math.inf,
    ) -> Iterator[Offer]:
        """Every GPU with room for a request that the caller takes, the best first.

        With it comes the policy's placement there. ``ends`` is when the instance will leave, if
        that is known. The cluster must not change during the iteration.
        """
        row, policy = self._ranking.row(request), self._ranking.table()
        if isinstance(policy, LeaseAware):
            return timed_offers(self._cluster, policy, row, takes, Term(now, ends))
        return filter(lambda offer: takes(offer.gpu), self._ranked(row))

    def _ranked(self, row: Row) -> Iterator[Offer]:
        """Every GPU with room, by the rank of its state."""
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
        self,
        requests: Sequence[Request],
        fits: Callable[[str], bool],
        *,
        now: float = 0.0,
        ends: float = math.inf,
    ) -> tuple[Instance, ...] | Rejection | Unfit:
        """Place all requests together on one node that ``fits`` accepts, or none of them.

        Several requests go to the first such node with room for all. Nodes are tried in the
        policy's order for the largest request. ``ends`` is when the instances will leave, if that
        is known.
        """
        if not requests:
            raise SlicewiseError("there is nothing to place")
        ordered = [requests[index] for index in self._order(requests)]
        plans = NodePlans(self._ranking, self._cluster, Term(now, ends))
        verdicts: dict[str, bool] = {}
        tried: set[str] = set()

        def takes(gpu: int) -> bool:
            name = self._cluster.node_of(gpu).name
            if name not in verdicts:
                verdicts[name] = fits(name)
            return verdicts[name]

        for offer in self(ordered[0], takes, now=now, ends=ends):
            if len(requests) == 1:
                return (self._put(offer, ends),)
            node = self._cluster.node_of(offer.gpu)
            if node.name in tried:
                continue
            tried.add(node.name)
            plan = plans.plan(node, ordered)
            if plan is not None:
                return self._carry_out(plan, requests, ends)
        unfit = [name for name, fine in verdicts.items() if not fine]
        if len(requests) > 1:
            unfit = [name for name in unfit if plans.plan(self._cluster.node(name), ordered)]
        return Unfit(tuple(unfit)) if unfit else self._refusal(requests, bool(verdicts))

    def _carry_out(
        self, plan: Sequence[Offer], requests: Sequence[Request], ends: float
    ) -> tuple[Instance, ...]:
        """Make the placements of a plan; returns the instances in the order of the requests."""
        placed = [self._put(offer, ends) for offer in plan]
        return tuple(one for _, one in sorted(zip(self._order(requests), placed, strict=True)))

    def _put(self, offer: Offer, ends: float) -> Instance:
        self._ranking.turn = offer.gpu + 1
        return self._cluster.put(*offer, ends)

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

    def nodes(
        self,
        requests: Sequence[Request],
        among: Container[str],
        *,
        now: float = 0.0,
        ends: float = math.inf,
    ) -> list[str]:
        """The nodes in ``among`` with room for all requests together, the best first.

        For several requests, the order is that of the policy for the largest of them. If the search
        takes too long, the result may include a node without room.
        """
        ordered = [requests[index] for index in self._order(requests)]

        def takes(gpu: int) -> bool:
            return self._cluster.node_of(gpu).name in among

        found: dict[str, Node] = {}
        for gpu, _ in self(ordered[0], takes, now=now, ends=ends):
            node = self._cluster.node_of(gpu)
            found.setdefault(node.name, node)
        if len(requests) == 1:
            return list(found)
        kinds = Counter(requests)
        plans = NodePlans(self._ranking, self._cluster, Term(now, ends))
        return [name for name, node in found.items() if self._fits(node, ordered, kinds, plans)]

    def _fits(
        self, node: Node, ordered: Sequence[Request], kinds: Counter[Request], plans: NodePlans
    ) -> bool:
        """Whether a node has room for all; for a single kind of request, counting is enough."""
        states = [self._cluster.state_of[gpu] for gpu in plans.gpus(node)]
        if not plans.may_fit(states, kinds):
            return False
        if len(kinds) == 1 or plans.steps >= MOST_STEPS_IN_ALL:
            return True
        return plans.plan(node, ordered) is not None

    def place_on(
        self,
        name: str,
        requests: Sequence[Request],
        *,
        now: float = 0.0,
        ends: float = math.inf,
    ) -> tuple[Instance, ...] | Rejection:
        """Place all requests on this node, or none and return the rejection."""
        ordered = [requests[index] for index in self._order(requests)]
        plans = NodePlans(self._ranking, self._cluster, Term(now, ends))
        plan = plans.plan(self._cluster.node(name), ordered)
        if plan is None:
            why = self.why_not(name, requests)
            return Rejection(why.request, why.reason, f"node {name!r}: {why.detail}")
        return self._carry_out(plan, requests, ends)

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
        states = [
            self._cluster.state_of[gpu] for gpu in node.gpus if gpu in self._cluster.schedulable
        ]
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

    def _is_fragmented(self, number: int, request: Request) -> bool:
        state = self._cluster.states[number]
        return fragmented_for(state, request.candidates(state.geometry))
