"""The limit: an oracle that may move every instance, at no cost, whenever a request arrives.

It accepts a request if and only if the running instances and the request could be arranged
anew, together, on the cluster. No fragmentation is left then: what it rejects is rejected for
want of room, and what a policy rejects beyond that is the price of where it placed things. It is
the limit of placing well, not of choosing whom to serve: it turns no large request away to keep
room for small ones. Which counting rule is exact for a model is said in `repacking`.

Where instances are does not matter here, so the cluster is a handful of counts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

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


def counting(repacking: Repacking, gpus: int) -> Counting:
    """The rule for a cluster of so many GPUs."""
    arrays = (repacking.columns, repacking.sizes, repacking.room)
    return Counting(int(repacking.rule), gpus, *(np.array(each, np.int64) for each in arrays))


def new_counts(rule: Counting, longest: int) -> Counts:
    """No one is there yet."""
    width = len(rule.sizes)
    return Counts(np.zeros(width, np.int64), np.zeros((longest + 1, width), np.int32))


_inner = njit(cache=True, nogil=True)


@_inner
def fits_halves(running: Ints, gpus: int) -> bool:
    """Whether GPUs of two unequal halves hold these counts, in the order of `HALVES_SHAPES`.

    A lower half is four slices: two pairs that hold anything of their size. An upper half is
    such a pair and a last one, slices 6 and 7, that holds a double 1g or one 1g. Nothing but a
    whole GPU crosses halves and nothing but a half crosses pairs, so each kind is given what is
    of least use to those after it, largest first.
    """
    whole, lower_only, half, full_only, pair, single = running
    gpus -= whole
    if gpus < 0:
        return False
    # A half goes to an upper half while there is one: a lower half would be worth more later.
    upper = gpus - min(half, gpus)
    lower = gpus - lower_only - (half - min(half, gpus))
    if lower < 0:
        return False
    # In the same way a pair goes to a last pair first, where only one single could be.
    last = upper - min(pair, upper)
    full = 2 * lower + upper - full_only - (pair - min(pair, upper))
    if full < 0:
        return False
    return bool(single <= 2 * full + last)


@_inner
def fits_aligned(running: Ints, sizes: Ints, room: Ints, gpus: int) -> bool:
    """Whether aligned windows of nested sizes fit, columns from the largest size down.

    Larger windows are made of whole smaller ones, so wherever they are they leave the same
    number of those: only the volume counts, against what windows of a size can cover.
    """
    volume = 0
    for column in range(sizes.size):
        volume += running[column] * sizes[column]
        if volume > room[column] * gpus:
            return False
    return True


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
