"""MFI as the paper runs it, for comparison: every request examines every GPU.

F comes from a table of all masks instead of being recomputed, which favours the scan. There are
two versions, compiled with numba and vectorised with NumPy. Both decide exactly as `mfi`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from slicewise.core.fragmentation import Reading, score_table
from slicewise.core.geometry import Geometry, Profile
from slicewise.lab.kernel import Ints, SmallInts

NOWHERE = -1
END = -1


class ScanTables(NamedTuple):
    """F of every mask, and the windows of every kind of request."""

    score: SmallInts
    window_at: SmallInts
    """By kind: its first window; has one more element than there are kinds."""
    windows: SmallInts
    """The windows of every kind, by ascending start."""


def scan_tables(geometry: Geometry, profiles: tuple[Profile, ...]) -> ScanTables:
    """Return the tables for these kinds of requests on one model."""
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
    """Return the GPU with the smallest increase of F, or NOWHERE; and the window to take."""
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
    """Return the same, by a vector operation over all GPUs for each start."""
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
    """The paper's scan on a given cluster.

    Departures are stored as in `compiled_loops.advance`, with windows instead of placements.
    """

    def __init__(
        self,
        tables: ScanTables,
        masks: SmallInts,
        instances: SmallInts,
        ending: SmallInts,
        slot: int,
    ) -> None:
        self.tables = tables
        self.masks = masks
        self.instances = instances
        self.ending = ending
        self.slot = slot

    def by_numpy(self, kinds: Ints, lifetimes: Ints) -> None:
        """Run a slot per arrival with the vectorised scan."""
        masks, instances, ending = self.masks, self.instances, self.ending
        for kind, lifetime in zip(kinds.tolist(), lifetimes.tolist(), strict=True):
            at = self.slot % len(ending)
            instance = int(ending[at])
            ending[at] = END
            while instance != END:
                masks[instances[instance, 0]] &= ~instances[instance, 1]
                instance = int(instances[instance, 2])
            gpu, window = scan_numpy(self.tables, masks, kind)
            if gpu != NOWHERE:
                masks[gpu] |= window
                end = (at + lifetime) % len(ending)
                instances[at, :3] = gpu, window, ending[end]
                ending[end] = at
            self.slot += 1

    def compiled(self, kinds: Ints, lifetimes: Ints) -> None:
        """Run a slot per arrival with the compiled scan."""
        state = (self.masks, self.instances, self.ending)
        _advance(*self.tables, *state, kinds, lifetimes, self.slot)
        self.slot += len(kinds)


@njit(cache=True, nogil=True)
def _advance(
    score: SmallInts,
    window_at: SmallInts,
    windows: SmallInts,
    masks: SmallInts,
    instances: SmallInts,
    ending: SmallInts,
    kinds: Ints,
    lifetimes: Ints,
    begin: int,
) -> None:
    for i in range(kinds.size):
        at = (begin + i) % ending.size
        instance = ending[at]
        ending[at] = END
        while instance != END:
            masks[instances[instance, 0]] &= ~instances[instance, 1]
            instance = instances[instance, 2]
        gpu, window = scan_compiled(score, window_at, windows, masks, kinds[i])
        if gpu != NOWHERE:
            masks[gpu] |= window
            end = (at + lifetimes[i]) % ending.size
            instances[at, 0] = gpu
            instances[at, 1] = window
            instances[at, 2] = ending[end]
            ending[end] = at
