"""How much room a GPU has lost to fragmentation: the score F, in two readings.

For every plain profile whose size fits in the number of free slices, every legal start whose
window is blocked adds the profile's size. The readings differ in what *blocked* means:
``overlap`` counts any window with an occupied slice, ``partial`` only windows with both free and
occupied slices, since a fully occupied window strands nothing.

`is_fragmented` tells whether one profile finds no window. Rejections are in `engine.reasons`.
"""

from __future__ import annotations

from enum import StrEnum

from slicewise.core.geometry import Geometry, Profile
from slicewise.core.tables import cached


class Reading(StrEnum):
    """What counts as a blocked window."""

    PARTIAL = "partial"
    OVERLAP = "overlap"


def blocked_starts(
    geometry: Geometry, profile: Profile, mask: int, reading: Reading
) -> tuple[int, ...]:
    """The starts at which ``profile`` adds to F: none when it would not fit by size anyway."""
    if profile.size > free_slices(geometry, mask):
        return ()
    return tuple(s for s in profile.starts if _blocked(profile.window(s), mask, reading))


def _blocked(window: int, mask: int, reading: Reading) -> bool:
    taken = window & mask
    return taken != 0 and (reading is Reading.OVERLAP or taken != window)


def score_by_profile(geometry: Geometry, mask: int, reading: Reading) -> dict[str, int]:
    """What each plain profile adds to F."""
    return {
        profile.name: profile.size * len(blocked_starts(geometry, profile, mask, reading))
        for profile in geometry.plain_profiles
    }


def score(geometry: Geometry, mask: int, reading: Reading = Reading.PARTIAL) -> int:
    """F of a GPU with these slices occupied, straight from the definition."""
    return sum(score_by_profile(geometry, mask, reading).values())


@cached(256)
def score_table(geometry: Geometry, reading: Reading) -> tuple[int, ...]:
    """F of every mask: the fast twin of ``score``."""
    table = [0] * (geometry.full + 1)
    free = [geometry.slices - mask.bit_count() for mask in range(geometry.full + 1)]
    overlap = reading is Reading.OVERLAP
    for profile in geometry.plain_profiles:
        size = profile.size
        for window in map(profile.window, profile.starts):
            for mask, room in enumerate(free):
                taken = mask & window
                if taken and room >= size and (overlap or taken != window):
                    table[mask] += size
    return tuple(table)


def free_slices(geometry: Geometry, mask: int) -> int:
    """How many slices are free."""
    return geometry.slices - mask.bit_count()


def is_fragmented(geometry: Geometry, profile: Profile, mask: int) -> bool:
    """Whether ``profile`` finds no window although enough slices are free."""
    return profile.size <= free_slices(geometry, mask) and all(
        profile.window(start) & mask for start in profile.starts
    )
