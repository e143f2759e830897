"""The limit: an oracle that may move every instance, at no cost, whenever a request arrives.

It accepts a request if and only if all running instances and the request fit on the cluster in
some arrangement. It rejects for lack of capacity only; whatever a policy rejects beyond that is
the cost of its placements. It is the limit of placement, not of admission: it does not reject a
large request to keep room for small ones. `repacking` has the counting rules and the models for
which they are exact.

The positions of instances do not matter, so the cluster is a few counts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from slicewise.lab import repacking
from slicewise.lab.kernel import Ints, SmallInts
from slicewise.lab.repacking import Repacking, Rule

_HALVES = int(Rule.HALVES)


class Counting(NamedTuple):
    """A `Repacking` as arrays, and the number of GPUs."""

    rule: int
    gpus: int
    columns: Ints
    sizes: Ints
    room: Ints


class RunningCounts(NamedTuple):
    """The running instances, and when they end."""

    running: Ints
    """By column: the number of running instances."""
    ending: SmallInts
    """By slot and column: the number that end. A ring, one longer than the longest lifetime."""


def counting(chosen: Repacking, gpus: int) -> Counting:
    """Return the rule for a cluster."""
    arrays = (chosen.columns, chosen.sizes, chosen.room)
    return Counting(int(chosen.rule), gpus, *(np.array(each, np.int64) for each in arrays))


def new_counts(rule: Counting, longest: int) -> RunningCounts:
    """Return counts of an empty cluster."""
    width = len(rule.sizes)
    return RunningCounts(np.zeros(width, np.int64), np.zeros((longest + 1, width), np.int32))


_inner = njit(cache=True, nogil=True)


fits_halves: Any = _inner(repacking.fits_halves)
fits_aligned: Any = _inner(repacking.fits_aligned)


@_inner
def advance(
    rule: Counting,
    counts: RunningCounts,
    kinds: Ints,
    lifetimes: Ints,
    begin: int,
    trace: SmallInts,
) -> None:
    """Run the slots from ``begin`` and fill in the trace, as `compiled_loops.advance` does.

    Only two columns are written: whether the request was accepted, and the occupied slices.
    """
    which, gpus, columns, sizes, room = rule
    running, ending = counts
    ring = ending.shape[0]
    at = begin % ring
    for i in range(kinds.size):
        # Departures first.
        for column in range(sizes.size):
            running[column] -= ending[at, column]
            ending[at, column] = 0

        # Then the arrival.
        mine = columns[kinds[i]]
        running[mine] += 1
        if which == _HALVES:
            accepted = fits_halves(running, gpus)
        else:
            accepted = fits_aligned(running, sizes, room, gpus)
        if accepted:
            end = at + lifetimes[i]
            ending[end if end < ring else end - ring, mine] += 1
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
