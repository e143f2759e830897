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

from dataclasses import dataclass

from slicewise.core.geometry import Geometry, Profile
from slicewise.core.states import GpuState
from slicewise.policies.asked_for import AskedFor, open_places, stranded_slices
from slicewise.policies.base import Key, ScorePolicy

MADE_UP = 4
"""How many lost placements a whole GPU of occupied slices makes up for, a part in proportion."""

STRANDED = 2
"""How many lost placements a slice counts for that is free, and that no placement can use."""


@dataclass(frozen=True)
class LeastLost(ScorePolicy):
    """Goes where the fewest legal placements are lost."""

    asked_for: AskedFor = None
    """The profiles whose placements count."""

    name = "least-lost"
    summary = "Fewest legal placements lost, rather on fuller GPUs, empty ones last."

    def score(self, gpu: GpuState, profile: Profile, start: int) -> tuple[bool, int]:
        """Whether the GPU is empty; then what is lost less `MADE_UP` times the share occupied.

        Both times the number of slices, to stay with whole numbers.
        """
        geometry, mask = gpu.geometry, gpu.mask
        places = open_places(geometry, self.asked_for)
        stranded = stranded_slices(geometry, self.asked_for)
        after = mask | profile.window(start)
        more = stranded[after].bit_count() - stranded[mask].bit_count()
        lost = places[mask] - places[after] + STRANDED * more
        return mask == 0, geometry.slices * lost - MADE_UP * mask.bit_count()

    def in_words(self, key: Key, geometry: Geometry) -> str:
        """Placements lost, less what the occupied slices make up for."""
        empty, lost = key
        loss = f"{lost / geometry.slices:g} placements lost on balance"
        return f"{loss} on an empty GPU, which is opened last" if empty else loss
