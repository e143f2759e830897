"""MFI, minimum fragmentation increment: go where F grows least.

Follows Zambianco, Fasol and Doriguzzi-Corin, "An Online Fragmentation-Aware GPU Scheduler for
Multi-Tenant MIG-based Clouds" (2025), Algorithm 2.
"""

from __future__ import annotations

from typing import ClassVar

from slicewise.core.compute_fragmentation import ComputeReading, Use, compute_score_table
from slicewise.core.fragmentation import Reading, score_table
from slicewise.core.geometry import Geometry, Profile
from slicewise.core.states import GpuState
from slicewise.policies.base import Key, Preference, ScorePolicy, TablePolicy


class Mfi(ScorePolicy):
    """MFI with F as in the paper's worked example."""

    name = "mfi"
    summary = "Smallest growth of fragmentation, windows blocked in part (the paper's MFI)."
    reading: ClassVar[Reading] = Reading.PARTIAL

    def score(self, gpu: GpuState, profile: Profile, start: int) -> int:
        """By how much F grows."""
        table = score_table(gpu.geometry, self.reading)
        return table[gpu.mask | profile.window(start)] - table[gpu.mask]

    def in_words(self, key: Key, geometry: Geometry) -> str:
        """The growth of F."""
        return f"F grows by {key}"


class MfiOverlap(Mfi):
    """MFI with F as in the paper's Algorithm 1."""

    name = "mfi-overlap"
    summary = "Smallest growth of fragmentation, every overlapped window counted (Algorithm 1)."
    reading = Reading.OVERLAP


class MfiCompute(TablePolicy):
    """MFI with F in compute slices."""

    name = "mfi-compute"
    summary = "Smallest growth of fragmentation in compute slices (what Fig. 6 is consistent with)."
    reading: ClassVar[ComputeReading] = ComputeReading.COMPUTE

    def prefer(self, gpu: GpuState, profile: Profile) -> Preference | None:
        """The feasible start where F grows least, then the lowest."""
        table = compute_score_table(gpu.geometry, self.reading)
        used = gpu.used[0]
        before = table[Use(gpu.mask, used)]
        growth = [
            (table[Use(gpu.mask | profile.window(start), used + profile.compute)] - before, start)
            for start in gpu.feasible_starts(profile)
        ]
        return Preference(*min(growth)) if growth else None

    def in_words(self, key: Key, geometry: Geometry) -> str:
        """The growth of F."""
        return f"F in compute slices grows by {key}"


class MfiEither(MfiCompute):
    """MFI with F in compute slices, where free memory slices count as room, too."""

    name = "mfi-either"
    summary = "The same, with free memory slices as room, too (what the paper's MFI fits best)."
    reading = ComputeReading.EITHER
