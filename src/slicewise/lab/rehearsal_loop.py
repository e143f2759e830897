"""The compiled loop of rehearsals: a small cluster, searched GPU by GPU.

With a hundred GPUs a look at each of them takes less time than the index of `kernel`, and nothing
needs to be kept up to date. Decisions are the same: best rank, then lowest id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit

from slicewise.core.request import Request
from slicewise.lab.kernel import Ints, SmallInts
from slicewise.lab.packed_tables import Models
from slicewise.policies.base import TablePolicy
from slicewise.policies.ranking import RANK_SHIFT, build_row

_LEFT_OUT = np.iinfo(np.int32).max


class Table(NamedTuple):
    """A table for each kind of request, by state."""

    rank: SmallInts
    """Lower is better; the largest number where such a GPU is left out."""
    placement: SmallInts
    after_place: SmallInts
    after_release: SmallInts


def table(models: Models, policy: TablePolicy, requests: Sequence[Request]) -> Table:
    """Return a policy's table for some requests."""
    shape = len(requests), len(models.states)
    rank, placement = np.full(shape, _LEFT_OUT, np.int32), np.zeros(shape, np.int32)
    for kind, request in enumerate(requests):
        row = build_row(policy, models.states, request)
        rank[kind, row.states] = row.ranks >> RANK_SHIFT
        placement[kind] = row.placement
    return Table(rank, placement, *models.transitions)


@njit(cache=True, nogil=True)
def run(table: Table, states: SmallInts, kinds: Ints, lifetimes: Ints, rejected: SmallInts) -> None:
    """Run one arrival per slot on GPUs in these states; mark the rejected ones."""
    rank, placement, after_place, after_release = table
    slots = kinds.size
    ending = np.full(slots, -1, np.int32)
    following = np.empty(slots, np.int32)
    gpu_of = np.empty(slots, np.int32)
    placed = np.empty(slots, np.int32)
    for slot in range(slots):
        instance = ending[slot]
        while instance >= 0:
            gpu = gpu_of[instance]
            states[gpu] = after_release[states[gpu], placed[instance]]
            instance = following[instance]
        kind = kinds[slot]
        best, chosen = _LEFT_OUT, -1
        for gpu in range(states.size):
            here = rank[kind, states[gpu]]
            if here < best:
                best, chosen = here, gpu
        if chosen < 0:
            rejected[slot] = 1
            continue
        where = placement[kind, states[chosen]]
        states[chosen] = after_place[states[chosen], where]
        end = slot + lifetimes[slot]
        if end < slots:
            gpu_of[slot] = chosen
            placed[slot] = where
            following[slot] = ending[end]
            ending[end] = slot
