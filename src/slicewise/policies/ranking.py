"""A table policy's preferences, compiled: for each kind of request, every state in order.

Policies judge a GPU by its state, so their judgement of the whole cluster is one row of ranks
over the states. The best choice is then the smallest ``rank + lowest GPU in that state``: one
vector operation whose length is the number of states, however many GPUs there are.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slicewise.core.cluster import Cluster
from slicewise.core.idset import NONE
from slicewise.core.request import Request
from slicewise.core.states import GpuState
from slicewise.policies.base import AdaptivePolicy, Key, TablePolicy, Ties
from slicewise.policies.lease_aware import LeaseAware
from slicewise.policies.lease_times import TimedRow, cheapest, timed_row

RANK_SHIFT = 40
"""Ranks are shifted above all GPU ids, so that a sum orders by rank first and id second."""

PICKED_ONLY = -1
"""The policy picks GPUs in this state and then finds no window: a strict rejection."""
LEFT_OUT = -2
"""The policy does not consider GPUs in this state."""

_MOST_CELLS = 1 << 21
"""States times rows that are kept: where models have very many states, fewer rows are."""

_LOOK_AHEAD = 32
"""How many GPUs in turn are looked at one by one before the index is asked."""


@dataclass(frozen=True, slots=True)
class Row:
    """What a policy wants for one kind of request, over every state of a cluster."""

    states: npt.NDArray[np.int64]
    """The states considered, best first."""
    ranks: npt.NDArray[np.int64]
    """Their ranks, shifted; equal ranks tie."""
    placement: list[int]
    """By state: the placement to make, PICKED_ONLY or LEFT_OUT."""
    keys: list[Key]
    """By rank: (waste, the policy's key)."""
    rotates: bool
    """Whether ties go to the next GPU in turn instead of the lowest id."""
    timed: TimedRow | None = None
    """What a policy that knows the ends of leases needs beyond this."""


def build_row(policy: TablePolicy, states: Sequence[GpuState], request: Request) -> Row:
    """Ask the policy about every state once and sort what it says."""
    wanted: list[tuple[tuple[Key, ...], int, int]] = []
    placement = [LEFT_OUT] * len(states)
    candidates = {g: request.candidates(g) for g in {gpu.geometry for gpu in states}}
    for number, gpu in enumerate(states):
        best = None
        for waste, profile in candidates[gpu.geometry]:
            choice = policy.prefer(gpu, profile)
            if choice is not None and (best is None or (waste, choice.key) < best[0]):
                best = (waste, choice.key), profile, choice.start
        if best is not None:
            key, profile, start = best
            at = None if start is None else gpu.geometry.placement(profile.name, start)
            placement[number] = PICKED_ONLY if at is None else at.number
            wanted.append((key, number, placement[number]))
    wanted.sort(key=lambda item: item[:2])
    keys: list[Key] = []
    ranks: list[int] = []
    for key, _, _ in wanted:
        if not keys or keys[-1] != key:
            keys.append(key)
        ranks.append(len(keys) - 1 << RANK_SHIFT)
    return Row(
        states=np.array([number for _, number, _ in wanted], np.int64),
        ranks=np.array(ranks, np.int64),
        placement=placement,
        keys=keys,
        rotates=policy.ties is Ties.ROTATE,
        timed=(
            timed_row(policy.base, states, request, [waste for waste, _ in keys])
            if isinstance(policy, LeaseAware)
            else None
        ),
    )


class Ranking:
    """The rows of a policy over one cluster, made when first asked for, and its choices."""

    def __init__(
        self, policy: TablePolicy | AdaptivePolicy, cluster: Cluster, keep: int = 256
    ) -> None:
        self.turn = 0
        """Where a policy that goes round continues."""
        self._policy = policy
        self._cluster = cluster
        self._keep = keep
        self._rows: OrderedDict[tuple[bool, TablePolicy, Request], Row] = OrderedDict()
        self._models_seen = 0

    def row(self, request: Request) -> Row:
        """The row for this kind of request, as the policy ranks it now."""
        return self._row(self.table(), request)

    def table(self) -> TablePolicy:
        """The table policy that decides now."""
        policy = self._policy
        return policy.table(self._cluster) if isinstance(policy, AdaptivePolicy) else policy

    def _row(self, policy: TablePolicy, request: Request) -> Row:
        states = self._cluster.states
        if self._cluster.models_seen != self._models_seen:
            self._rows.clear()  # a model joined or left: states have other numbers
            self._models_seen = self._cluster.models_seen
        # The mean lifetime may change any time, and no row depends on it.
        timed = isinstance(policy, LeaseAware)
        key = timed, policy.base if isinstance(policy, LeaseAware) else policy, request
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = build_row(policy, states, request)
            if len(self._rows) > min(self._keep, 1 + _MOST_CELLS // (len(states) + 1)):
                self._rows.popitem(last=False)
        return row

    def has_room(self, request: Request) -> bool:
        """Whether a GPU is in a state that the policy considers for a request."""
        states = self.row(request).states
        return bool((self._cluster.first.take(states) < NONE).any())

    def choose(self, request: Request, now: float = 0.0, ends: float = math.inf) -> tuple[int, int]:
        """The GPU picked and the placement on it; NONE, LEFT_OUT when there is none.

        ``ends`` is when the instance will leave, if that is known.
        """
        policy = self.table()
        row = self._row(policy, request)
        cluster = self._cluster
        if isinstance(policy, LeaseAware) and row.timed is not None:
            states = best_states(cluster, row, row.timed.same_waste, policy.most)
            if not states:
                return NONE, LEFT_OUT
            return cheapest(cluster, policy, row.timed, states, now, ends)
        if row.rotates:
            gpu = choose_in_turn(cluster, row, self.turn)
            if gpu != NONE:
                self.turn = gpu + 1
        else:
            gpu = choose_lowest(cluster, row)
        if gpu == NONE:
            return NONE, LEFT_OUT
        return gpu, row.placement[cluster.state_of[gpu]]


def choose_lowest(cluster: Cluster, row: Row) -> int:
    """The GPU of best rank with the lowest id, or NONE."""
    if not len(row.states):
        return NONE
    best = int((cluster.first.take(row.states) + row.ranks).min())
    return NONE if best >= NONE else best & (1 << RANK_SHIFT) - 1


def best_states(cluster: Cluster, row: Row, same_waste: list[int], most: int) -> list[int]:
    """The states with a GPU that waste least, best rank first and then by their lowest GPU."""
    best = cluster.first.take(row.states) + row.ranks
    lowest = int(best.min(initial=NONE))
    if lowest >= NONE:
        return []
    near = np.flatnonzero(best < same_waste[lowest >> RANK_SHIFT] << RANK_SHIFT)
    order = near[np.argsort(best[near])]
    states: list[int] = row.states[order[:most]].tolist()
    return states


def choose_in_turn(cluster: Cluster, row: Row, turn: int) -> int:
    """The GPU of best rank that comes next from ``turn`` on, going round, or NONE."""
    if len(row.keys) == 1:  # all tie: most often one of the next few GPUs will do
        gpu = turn
        for _ in range(_LOOK_AHEAD):
            gpu = cluster.schedulable.next(gpu)
            if gpu == NONE:
                break
            if row.placement[cluster.state_of[gpu]] != LEFT_OUT:
                return gpu
            gpu += 1
    lowest = choose_lowest(cluster, row)
    if lowest == NONE:
        return NONE
    best = row.ranks[row.states == cluster.state_of[lowest]][0]
    following = min(cluster.members[n].next(turn) for n in row.states[row.ranks == best])
    return lowest if following == NONE else following
