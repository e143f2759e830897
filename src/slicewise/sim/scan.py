"""MFI as the paper runs it: look at every GPU for every request. Here to be measured against.

Generous to the scan: F comes from a table of all masks, not from recomputation. Once compiled
with the same compiler as our kernel, once vectorised with NumPy. Both decide exactly as `mfi`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from slicewise.core.fragmentation import Reading, score_table
from slicewise.core.geometry import Geometry, Profile
from slicewise.sim.kernel import Ints, SmallInts

NOWHERE = -1
NOBODY = -1


class ScanTables(NamedTuple):
    """What the scan reads: F of every mask, and the windows of every kind of request."""

    score: SmallInts
    window_at: SmallInts
    """By kind: its first window; one longer than there are kinds."""
    windows: SmallInts
    """The windows of every kind, by ascending start."""


def scan_tables(geometry: Geometry, profiles: tuple[Profile, ...]) -> ScanTables:
    """The tables for these kinds of requests on one model."""
    windows = [[profile.window(start) for start in profile.starts] for profile in profiles]
    return ScanTables(
        np.array(score_table(geometry, Reading.PARTIAL), np.int32),
        np.cumsum([0, *map(len, windows)], dtype=np.int32),
        np.array([window for each in windows for window in each], np.int32),
    )


@njit(cache=True, nogil=True)
def scan_compiled(
    score: SmallInts, window_at: SmallInts, windows: SmallInts, masks: SmallInts, kind: int
) -> tuple[int, int]:
    """The GPU with the smallest growth of F, and the window to take there; or NOWHERE."""
    best = np.int32(1 << 30)
    chosen = NOWHERE
    taken = 0
    for gpu in range(masks.size):
        mask = masks[gpu]
        for i in range(window_at[kind], window_at[kind + 1]):
            if mask & windows[i] == 0:
                growth = score[mask | windows[i]] - score[mask]
                if growth < best:
                    best = growth
                    chosen = gpu
                    taken = windows[i]
    return chosen, taken


def scan_numpy(tables: ScanTables, masks: SmallInts, kind: int) -> tuple[int, int]:
    """The same, a vector operation over all GPUs for each start."""
    before = tables.score[masks]
    best = (1 << 30, 0, 0, 0)
    for window in tables.windows[tables.window_at[kind] : tables.window_at[kind + 1]].tolist():
        growth = tables.score[masks | window] - before
        growth[masks & window != 0] = 1 << 30
        gpu = int(growth.argmin())
        best = min(best, (int(growth[gpu]), gpu, len(bin(window)), window))
    if best[0] == 1 << 30:
        return NOWHERE, 0
    return best[1], best[3]


class ScanRun:
    """The paper's scan in place of our decision, on a cluster that came from elsewhere.

    Departures are kept as in `loops.advance`, with windows for placements.
    """

    def __init__(
        self, tables: ScanTables, masks: SmallInts, guests: SmallInts, leaving: SmallInts, slot: int
    ) -> None:
        self.tables = tables
        self.masks = masks
        self.guests = guests
        self.leaving = leaving
        self.slot = slot

    def by_numpy(self, kinds: Ints, lifetimes: Ints) -> None:
        """A slot for each arrival, decided by the vectorised scan."""
        masks, guests, leaving = self.masks, self.guests, self.leaving
        for kind, lifetime in zip(kinds.tolist(), lifetimes.tolist(), strict=True):
            at = self.slot % len(leaving)
            who = int(leaving[at])
            leaving[at] = NOBODY
            while who != NOBODY:
                masks[guests[who, 0]] &= ~guests[who, 1]
                who = int(guests[who, 2])
            gpu, window = scan_numpy(self.tables, masks, kind)
            if gpu != NOWHERE:
                masks[gpu] |= window
                end = (at + lifetime) % len(leaving)
                guests[at, :3] = gpu, window, leaving[end]
                leaving[end] = at
            self.slot += 1

    def compiled(self, kinds: Ints, lifetimes: Ints) -> None:
        """A slot for each arrival, decided by the compiled scan."""
        state = (self.masks, self.guests, self.leaving)
        _advance(*self.tables, *state, kinds, lifetimes, self.slot)
        self.slot += len(kinds)


@njit(cache=True, nogil=True)
def _advance(
    score: SmallInts,
    window_at: SmallInts,
    windows: SmallInts,
    masks: SmallInts,
    guests: SmallInts,
    leaving: SmallInts,
    kinds: Ints,
    lifetimes: Ints,
    begin: int,
) -> None:
    for i in range(kinds.size):
        at = (begin + i) % leaving.size
        who = leaving[at]
        leaving[at] = NOBODY
        while who != NOBODY:
            masks[guests[who, 0]] &= ~guests[who, 1]
            who = guests[who, 2]
        gpu, window = scan_compiled(score, window_at, windows, masks, kinds[i])
        if gpu != NOWHERE:
            masks[gpu] |= window
            end = (at + lifetimes[i]) % leaving.size
            guests[at, 0] = gpu
            guests[at, 1] = window
            guests[at, 2] = leaving[end]
            leaving[end] = at
