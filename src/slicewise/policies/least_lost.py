"""Least lost placements: leave as many places open as possible, and empty GPUs for last.

MFI looks at how blocked a GPU becomes. This policy counts what is actually lost: the legal
placements that are open now and would not be open any more. A slice that is left free where no
placement can use it counts as two more, since it stays of no use until the neighbour goes. Fuller
GPUs are preferred, since they have less left to lose: four times the share of the GPU that is
occupied is taken off, so half a GPU makes up for two lost placements. An empty GPU is opened only
when no other has a window: it is all that a whole-GPU profile can use.

How it was found and what else was tried: docs/study.md.
"""

from __future__ import annotations

from slicewise.core.geometry import Geometry, Profile
from slicewise.core.tables import cached
from slicewise.policies.base import Key, ScorePolicy

MADE_UP = 4
"""How many lost placements a whole GPU of occupied slices makes up for, a part in proportion."""

STRANDED = 2
"""How many lost placements a slice counts for that is free, and that no placement can use."""


class LeastLost(ScorePolicy):
    """Goes where the fewest legal placements are lost."""

    name = "least-lost"
    summary = "Fewest legal placements lost, rather on fuller GPUs, empty ones last (the default)."

    def score(
        self, geometry: Geometry, profile: Profile, mask: int, start: int
    ) -> tuple[bool, int]:
        """Whether the GPU is empty; then what is lost less `MADE_UP` times the share occupied.

        Both times the number of slices, to stay with whole numbers.
        """
        places, stranded = open_places(geometry), stranded_slices(geometry)
        after = mask | profile.window(start)
        lost = places[mask] - places[after] + STRANDED * (stranded[after] - stranded[mask])
        return mask == 0, geometry.slices * lost - MADE_UP * mask.bit_count()

    def in_words(self, key: Key, geometry: Geometry) -> str:
        """Placements lost, less what the occupied slices make up for."""
        empty, lost = key
        loss = f"{lost / geometry.slices:g} placements lost on balance"
        return f"{loss} on an empty GPU, which is opened last" if empty else loss


@cached(256)
def open_places(geometry: Geometry) -> tuple[int, ...]:
    """By mask: how many legal placements of plain profiles are open."""
    windows = _windows(geometry)
    return tuple(sum(not window & mask for window in windows) for mask in range(geometry.full + 1))


@cached(256)
def stranded_slices(geometry: Geometry) -> tuple[int, ...]:
    """By mask: how many slices are free that no open placement of a plain profile covers."""
    found = []
    for mask in range(geometry.full + 1):
        usable = 0
        for window in _windows(geometry):
            if not window & mask:
                usable |= window
        found.append((geometry.full & ~mask & ~usable).bit_count())
    return tuple(found)


def _windows(geometry: Geometry) -> list[int]:
    return [
        profile.window(start) for profile in geometry.plain_profiles for start in profile.starts
    ]
