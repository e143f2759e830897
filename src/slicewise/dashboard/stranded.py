"""Stranded slices: free ones that nobody can use as things stand, though the amount would do.

A GPU has so many free slices and so much compute left. Take the plain profiles that would fit by
these amounts. If none of the largest of them finds an open window, every free slice of the GPU is
stranded: they are enough, and lie wrong. Otherwise those are that no open window of any of them
covers. The browser works out the same (`static/look/geometry.js`), and a test holds them equal.
"""

from __future__ import annotations

from slicewise.core.states import GpuState
from slicewise.core.tables import kept


@kept(1 << 16)
def stranded(state: GpuState) -> int:
    """The stranded slices of a GPU in this state, as a mask."""
    geometry = state.geometry
    free = geometry.full & ~state.mask
    fitting = [
        profile
        for profile in geometry.plain_profiles
        if profile.size <= state.free_slices and state.within_budgets(profile)
    ]
    if not fitting:
        return 0
    largest = max(profile.size for profile in fitting)
    if not any(state.feasible_starts(p) for p in fitting if p.size == largest):
        return free
    covered = 0
    for profile in fitting:
        for start in state.feasible_starts(profile):
            covered |= profile.window(start)
    return free & ~covered
