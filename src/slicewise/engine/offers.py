"""Places in the policy's order, for those who cannot take every node: a pod, or several instances
that must be together.

`Scheduler.submit` asks for the best place of the cluster. Here one goes on asking: the best place,
the next best, until one is on a node that will do. As long as most nodes do, that is the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from typing import NamedTuple

import numpy as np

from slicewise.core.cluster import Instance, Node
from slicewise.core.errors import SlicewiseError
from slicewise.core.idset import NONE
from slicewise.core.request import Reason, Rejection, Request
from slicewise.core.states import ILLEGAL
from slicewise.engine.scheduler import Scheduler
from slicewise.policies.ranking import Ranking, Row

MOST_STEPS = 20_000
"""So many placements are tried on a node before it counts as one without room for all."""


class Offer(NamedTuple):
    """A GPU and the number of a placement on it."""

    gpu: int
    placement: int


@dataclass(frozen=True, slots=True)
class Unfit:
    """There is room, but on no node that will do."""

    nodes: tuple[str, ...]
    """The nodes with room for it, the policy's first choice first."""

    def __bool__(self) -> bool:
        return False


class Offers:
    """The places of a cluster in the order in which its scheduler's policy likes them."""

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

    def __call__(self, request: Request) -> Iterator[Offer]:
        """Every GPU with room for a request, the best first, with the place the policy prefers.

        The cluster must stay as it is while this goes on.
        """
        row = self._ranking.row(request)
        cluster = self._cluster
        taken = np.nonzero(cluster.first.take(row.states) < NONE)[0] if len(row.states) else ()
        alike: list[int] = []
        rank = -1
        for index in taken:
            state = int(row.states[index])
            if row.placement[state] < 0:
                continue  # a strict policy gives up there
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
        """Place all requests together on one node that ``fits``, or none of them.

        Several requests go to the first node with room for all, in the policy's order for the
        largest of them.
        """
        if not requests:
            raise SlicewiseError("there is nothing to place")
        order = sorted(range(len(requests)), key=lambda i: -self._size(requests[i]))
        verdicts: dict[str, bool] = {}
        unfit: list[str] = []
        found = False
        for gpu, placement in self(requests[order[0]]):
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
            placed = self._together(node, [requests[i] for i in order])
            if placed is None:
                continue
            if will_do:
                return tuple(one for _, one in sorted(zip(order, placed, strict=True)))
            for instance in reversed(placed):
                self._cluster.undo_place(instance)
            unfit.append(node.name)
        if unfit:
            return Unfit(tuple(unfit))
        return self._refusal(requests, found)

    def _put(self, gpu: int, placement: int) -> Instance:
        self._ranking.turn = gpu + 1
        return self._cluster.put(gpu, placement)

    def _size(self, request: Request) -> int:
        sizes = [p.size for g in self._cluster.models for _, p in request.candidates(g)]
        return min(sizes, default=0)

    def _refusal(self, requests: Sequence[Request], found: bool) -> Rejection:
        """Why no node has room for all of it."""
        if found:
            for request in requests:
                if next(self(request), None) is None:
                    return self._reasons.nowhere(request)
            words = " and ".join(map(str, requests))
            return Rejection(requests[0], Reason.CAPACITY, f"no node has room for {words} together")
        largest = max(requests, key=self._size)
        return self._reasons.nowhere(largest)

    def _together(self, node: Node, requests: Sequence[Request]) -> list[Instance] | None:
        """Place all on one node, as the policy likes best if that works, or not at all."""
        placed: list[Instance] = []
        steps = MOST_STEPS

        def go_on() -> bool:
            nonlocal steps
            if len(placed) == len(requests):
                return True
            for gpu, placement in self._on(node, requests[len(placed)]):
                steps -= 1
                if steps < 0:
                    return False
                placed.append(self._put(gpu, placement))
                if go_on():
                    return True
                self._cluster.undo_place(placed.pop())
            return False

        return placed if go_on() else None

    def _on(self, node: Node, request: Request) -> list[Offer]:
        """The places on one node: those the policy prefers, in order, then all others.

        Of GPUs in the same state, only the first is named: what fails on one fails on all.
        """
        row = self._ranking.row(request)
        cluster = self._cluster
        gpus: dict[int, int] = {}
        for gpu in node.gpus:
            if gpu in cluster.schedulable:
                gpus.setdefault(cluster.state_of[gpu], gpu)
        liked = []
        for state, gpu in gpus.items():
            if row.placement[state] >= 0:
                rank = int(row.ranks[np.nonzero(row.states == state)[0][0]])
                liked.append((rank, gpu, row.placement[state]))
        preferred = [Offer(gpu, placement) for _, gpu, placement in sorted(liked)]
        others = [
            Offer(gpu, placement.number)
            for state, gpu in gpus.items()
            for _, profile in sorted(request.candidates(node.geometry), key=lambda c: c[0])
            for placement in node.geometry.placements
            if placement.profile is profile
            and cluster.after_place[state][placement.number] != ILLEGAL
            and placement.number != row.placement[state]
        ]
        return preferred + others
