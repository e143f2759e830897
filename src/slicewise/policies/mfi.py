"""MFI, minimum fragmentation increment: go where F grows least.

Follows Zambianco, Fasol and Doriguzzi-Corin, "An Online Fragmentation-Aware GPU Scheduler for
Multi-Tenant MIG-based Clouds" (2025), Algorithm 2.
"""

from __future__ import annotations

from typing import ClassVar

from slicewise.core.fragmentation import Reading, score_table
from slicewise.core.geometry import Geometry, Profile
from slicewise.policies.base import Key, ScorePolicy


class Mfi(ScorePolicy):
    """MFI with F as in the paper's worked example."""

    name = "mfi"
    summary = "Smallest growth of fragmentation, windows blocked in part (the paper's MFI)."
    reading: ClassVar[Reading] = Reading.PARTIAL

    def score(self, geometry: Geometry, profile: Profile, mask: int, start: int) -> int:
        """By how much F grows."""
        table = score_table(geometry, self.reading)
        return table[mask | profile.window(start)] - table[mask]

    def in_words(self, key: Key, geometry: Geometry) -> str:
        """The growth of F."""
        return f"F grows by {key}"


class MfiOverlap(Mfi):
    """MFI with F as in the paper's Algorithm 1."""

    name = "mfi-overlap"
    summary = "Smallest growth of fragmentation, every overlapped window counted (Algorithm 1)."
    reading = Reading.OVERLAP
