"""The limit: an oracle that may move every instance, at no cost, whenever a request arrives.

It accepts a request if and only if the running instances and the request could be arranged
anew, together, on the cluster. No fragmentation is left then: what it rejects is rejected for
want of room, and what a policy rejects beyond that is the price of where it placed things. It is
the limit of placing well, not of choosing whom to serve: it turns no large request away to keep
room for small ones. The counting rules, and which is exact for a model, are in `repacking`.

Where instances are does not matter here, so the cluster is a handful of counts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from slicewise.sim import repacking
from slicewise.sim.kernel import Ints, SmallInts
from slicewise.sim.repacking import Repacking, Rule

_HALVES = int(Rule.HALVES)


class Counting(NamedTuple):
    """A `Repacking` as arrays, and the number of GPUs."""

    rule: int
    gpus: int
    columns: Ints
    sizes: Ints
    room: Ints


class Counts(NamedTuple):
    """What changes: how many instances there are, and how many of them leave when."""

    running: Ints
    """By column: the instances that are there."""
    leaving: SmallInts
    """By slot and column: how many leave then. A ring, one longer than the longest lifetime."""


def counting(chosen: Repacking, gpus: int) -> Counting:
    """The rule for a cluster of so many GPUs."""
    arrays = (chosen.columns, chosen.sizes, chosen.room)
    return Counting(int(chosen.rule), gpus, *(np.array(each, np.int64) for each in arrays))


def new_counts(rule: Counting, longest: int) -> Counts:
    """No one is there yet."""
    width = len(rule.sizes)
    return Counts(np.zeros(width, np.int64), np.zeros((longest + 1, width), np.int32))


_inner = njit(cache=True, nogil=True)


fits_halves: Any = _inner(repacking.fits_halves)
fits_aligned: Any = _inner(repacking.fits_aligned)


@_inner
def advance(
    rule: Counting, counts: Counts, kinds: Ints, lifetimes: Ints, begin: int, trace: SmallInts
) -> None:
    """Go through the slots from ``begin`` on and fill in the trace, as `loops.advance` does.

    There are no states and no GPUs to look at: of the trace, only whether the request was
    accepted and the occupied slices are filled in.
    """
    which, gpus, columns, sizes, room = rule
    running, leaving = counts
    ring = leaving.shape[0]
    at = begin % ring
    for i in range(kinds.size):
        # Terminations first.
        for column in range(sizes.size):
            running[column] -= leaving[at, column]
            leaving[at, column] = 0

        # Then the arrival.
        mine = columns[kinds[i]]
        running[mine] += 1
        if which == _HALVES:
            accepted = fits_halves(running, gpus)
        else:
            accepted = fits_aligned(running, sizes, room, gpus)
        if accepted:
            end = at + lifetimes[i]
            leaving[end if end < ring else end - ring, mine] += 1
        else:
            running[mine] -= 1

        occupied = 0
        for column in range(sizes.size):
            occupied += running[column] * sizes[column]
        trace[i, 0] = accepted
        trace[i, 2] = occupied
        at += 1
        if at == ring:
            at = 0
