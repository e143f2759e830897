"""The experiments' inner loops, compiled. Their readable twins are in `by_engine`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from slicewise.sim.kernel import (
    ACTIVE,
    FRAGMENTATION,
    LEFT_OUT,
    OCCUPIED,
    Gpus,
    Ints,
    Tables,
    arrive,
    take_out,
)


class Departures(NamedTuple):
    """Who leaves when. One request arrives a slot, so an instance is known by its slot.

    All arrays are rings, one longer than the longest lifetime: when a slot's place comes round
    again, its instance is gone. Instances that leave in the same slot form a chain.
    """

    gpu: npt.NDArray[np.int32]
    placement: npt.NDArray[np.int32]
    chain: npt.NDArray[np.int32]
    """By slot of arrival: the next one that leaves in the same slot, or -1."""
    leaving: npt.NDArray[np.int32]
    """By slot: the first in the chain of those who leave then, or -1."""


def new_departures(longest: int) -> Departures:
    """No one is there yet."""
    ring = longest + 1
    return Departures(
        np.zeros(ring, np.int32),
        np.zeros(ring, np.int32),
        np.full(ring, -1, np.int32),
        np.full(ring, -1, np.int32),
    )


@njit(cache=True, nogil=True)
def _depart(tables: Tables, gpus: Gpus, departures: Departures, slot: int) -> None:
    at = slot % departures.leaving.size
    who = departures.leaving[at]
    departures.leaving[at] = -1
    while who >= 0:
        take_out(tables, gpus, departures.gpu[who], departures.placement[who])
        who = departures.chain[who]


@njit(cache=True, nogil=True)
def _stay(departures: Departures, slot: int, lifetime: int, gpu: int, placement: int) -> None:
    who = slot % departures.gpu.size
    end = (slot + lifetime) % departures.leaving.size
    departures.gpu[who] = gpu
    departures.placement[who] = placement
    departures.chain[who] = departures.leaving[end]
    departures.leaving[end] = who


PUBLISHED_COLUMNS = ("arrivals", "accepted", "scheduled", "occupied", "active", "fragmentation")
"""What `published` keeps per demand bin; the first two count, the others are read at its end."""


@njit(cache=True, nogil=True)
def published(
    tables: Tables,
    gpus: Gpus,
    departures: Departures,
    kinds: Ints,
    lifetimes: Ints,
    bins: Ints,
    out: Ints,
) -> None:
    """Fill the cluster up once; ``out`` (bin by column) must come zeroed."""
    scheduled = 0
    reached = 0
    for slot in range(kinds.size):
        _depart(tables, gpus, departures, slot)
        here = bins[slot]
        while reached < here:  # a bin that no request ends in keeps the state before it
            reached += 1
            out[reached, 2:] = out[reached - 1, 2:]
        gpu, placement, _ = arrive(tables, gpus, kinds[slot])
        out[here, 0] += 1
        if placement != LEFT_OUT:
            scheduled += 1
            out[here, 1] += 1
            _stay(departures, slot, lifetimes[slot], gpu, placement)
        out[here, 2] = scheduled
        out[here, 3] = gpus.totals[OCCUPIED]
        out[here, 4] = gpus.totals[ACTIVE]
        out[here, 5] = gpus.totals[FRAGMENTATION]


STEADY_COLUMNS = (
    "arrivals",
    "rejected",
    "slices",
    "rejected_slices",
    "occupied",
    "active",
    "fragmentation",
    "states_examined",
)
"""What `steady` sums over the measured slots."""


@njit(cache=True, nogil=True)
def steady(
    tables: Tables,
    gpus: Gpus,
    departures: Departures,
    kinds: Ints,
    lifetimes: Ints,
    sizes: Ints,
    begin: int,
    measure_from: int,
    sums: Ints,
) -> None:
    """Go through the slots from ``begin`` on, one for each arrival given, adding to ``sums``."""
    for i in range(kinds.size):
        slot = begin + i
        _depart(tables, gpus, departures, slot)
        gpu, placement, looked = arrive(tables, gpus, kinds[i])
        if placement != LEFT_OUT:
            _stay(departures, slot, lifetimes[i], gpu, placement)
        if slot >= measure_from:
            size = sizes[kinds[i]]
            sums[0] += 1
            sums[2] += size
            if placement == LEFT_OUT:
                sums[1] += 1
                sums[3] += size
            sums[4] += gpus.totals[OCCUPIED]
            sums[5] += gpus.totals[ACTIVE]
            sums[6] += gpus.totals[FRAGMENTATION]
            sums[7] += looked
