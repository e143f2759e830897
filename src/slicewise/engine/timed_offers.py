"""Offers where the ends of instances are known: the order of a lease-aware table.

`Scheduler.submit` compares a bounded number of GPUs in the best states and takes the cheapest. Here
only GPUs that the caller takes count. They come in batches: those that the scheduler would compare
if there were no others, cheapest first; then those that it would compare without these; and so on.
So the first is the scheduler's own choice on a cluster of the GPUs that the caller takes, and the
work for it does not grow with the cluster, apart from GPUs that are not taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import NamedTuple

import numpy as np

from slicewise.core.cluster import Cluster, Node
from slicewise.core.idset import NONE
from slicewise.core.window_ends import Counts, Floats, touched_windows
from slicewise.policies.lease_aware import LeaseAware
from slicewise.policies.lease_times import TimedRow, placement_costs
from slicewise.policies.ranking import RANK_SHIFT, Row

Takes = Callable[[int], bool]
"""Whether a GPU counts."""


class Offer(NamedTuple):
    """A GPU and the number of a placement on it."""

    gpu: int
    placement: int


class Term(NamedTuple):
    """When a decision is made, and when the instance will leave; infinity if that is unknown."""

    now: float = 0.0
    ends: float = math.inf


class _Members(NamedTuple):
    """The GPUs in a state that count and are not in a batch yet, lowest ids first."""

    rank: int
    lowest: int
    state: int
    others: Iterator[int]


def timed_offers(
    cluster: Cluster, policy: LeaseAware, row: Row, takes: Takes, term: Term
) -> Iterator[Offer]:
    """Every GPU with room that the caller takes, with the cheapest placement on it."""
    assert row.timed is not None  # it is the row of a lease-aware policy
    for batch in _batches(cluster, policy, row, row.timed, takes):
        gpus, states = (np.array(column, np.int64) for column in zip(*batch, strict=True))
        rows = cluster.window_ends.rows(cluster, gpus, term.now)
        costs = placement_costs(policy, row.timed, states, rows, *term)
        cheapest, columns = costs.min(axis=1).tolist(), costs.argmin(axis=1).tolist()
        for at in sorted(range(len(batch)), key=lambda at: (cheapest[at], batch[at][0])):
            gpu, state = batch[at]
            model = row.timed.models[row.timed.model_of[state]]
            yield Offer(gpu, model.placements[columns[at]].number)


def _batches(
    cluster: Cluster, policy: LeaseAware, row: Row, timed: TimedRow, takes: Takes
) -> Iterator[list[tuple[int, int]]]:
    """GPUs and their states: what is compared with each other. Waste counts before times."""
    there = np.flatnonzero(cluster.first.take(row.states) < NONE)
    ranks = (row.ranks[there] >> RANK_SHIFT).tolist()
    ranked = zip(ranks, row.states[there].tolist(), strict=True)

    def members(state: int) -> Iterator[int]:
        return filter(takes, cluster.members[state])

    for _, same_waste in groupby(ranked, key=lambda one: timed.same_waste[one[0]]):
        further = groupby(same_waste, key=lambda one: one[0])
        """The ranks that were not looked at, and their states."""
        waiting: list[_Members] = []
        while True:
            batch: list[tuple[int, int]] = []
            begun: list[_Members] = []
            while len(batch) < policy.most:
                if not waiting:
                    rank, alike = next(further, (0, None))
                    if alike is None:
                        break
                    waiting = _waiting((rank, state, members(state)) for _, state in alike)
                    continue
                one = waiting.pop(0)
                most = min(policy.per_state, policy.most - len(batch))
                gpus = [one.lowest, *islice(one.others, most - 1)]
                batch += [(gpu, one.state) for gpu in gpus]
                begun.append(one)
            if not batch:
                break
            yield batch
            waiting = sorted([*_waiting((m.rank, m.state, m.others) for m in begun), *waiting])


def _waiting(states: Iterator[tuple[int, int, Iterator[int]]]) -> list[_Members]:
    """Those states that have a GPU left, best first."""
    found = []
    for rank, state, gpus in states:
        lowest = next(gpus, None)
        if lowest is not None:
            found.append(_Members(rank, lowest, state, gpus))
    return sorted(found)


class PlannedEnds:
    """When the windows of a node's GPUs will be free, with what is planned there in place."""

    def __init__(
        self, cluster: Cluster, policy: LeaseAware, node: Node, gpus: Sequence[int], term: Term
    ) -> None:
        self._policy = policy
        self._term = term
        self._touched = touched_windows(node.geometry)
        self._last, self._unknown = cluster.window_ends.rows(
            cluster, np.array(gpus, np.int64), term.now
        )

    def place(self, index: int, placement: int) -> tuple[Floats, Counts]:
        """Plan an instance on a GPU, by its index; returns what `undo` needs."""
        last, unknown = self._last[index], self._unknown[index]
        before = last.copy(), unknown.copy()
        touched = list(self._touched[placement])
        if self._term.now < self._term.ends < math.inf:
            last[touched] = np.maximum(last[touched], self._term.ends)
        else:
            unknown[touched] += 1
        return before

    def undo(self, index: int, before: tuple[Floats, Counts]) -> None:
        """Undo the latest plan for a GPU."""
        self._last[index], self._unknown[index] = before

    def liked(
        self, row: Row, ranks: Mapping[int, int], states: Sequence[int]
    ) -> list[tuple[int, int]]:
        """A GPU of each state that can take a request, by its index, and the placement there.

        The best first, as the scheduler would choose if the node were all of the cluster.
        """
        assert row.timed is not None  # it is the row of a lease-aware policy
        of = np.array(states, np.int64)
        rows = self._last, self._unknown
        costs = placement_costs(self._policy, row.timed, of, rows, *self._term)
        lowest, columns = costs.min(axis=1).tolist(), costs.argmin(axis=1).tolist()
        order = sorted(
            (row.timed.same_waste[ranks[state] >> RANK_SHIFT], lowest[index], index)
            for index, state in enumerate(states)
            if state in ranks
        )
        best: dict[int, int] = {}
        for _, _, index in order:
            best.setdefault(states[index], index)
        model = row.timed.models[row.timed.model_of[states[0]]]
        return [(index, model.placements[columns[index]].number) for index in best.values()]
