"""What the published experiment measures of a cluster: how much is in use, how fragmented it is.

``memory`` follows the paper's text: memory slices, and F (partial) over all GPUs at the end of
each bin of demand. ``compute`` follows its numbers: the mean of memory and compute, and F in
compute slices over the active GPUs after every request.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from slicewise.core.cluster import Cluster
from slicewise.core.compute_fragmentation import ComputeReading, Use, compute_score_table
from slicewise.core.fragmentation import Reading, score_table
from slicewise.core.geometry import Geometry
from slicewise.core.states import GpuState
from slicewise.lab.workload import BINS, Ints, SmallInts

PARTS = 1_000_000
"""F per active GPU is kept in whole parts of this size, because results are integers."""


class Measure(StrEnum):
    """What is added up over the GPUs."""

    MEMORY = "memory"
    COMPUTE = "compute"

    def weights(self, states: Sequence[GpuState]) -> list[tuple[int, int]]:
        """Return the units in use and F, by state."""
        if self is Measure.MEMORY:
            return [
                (state.mask.bit_count(), score_table(state.geometry, Reading.PARTIAL)[state.mask])
                for state in states
            ]
        weights: list[tuple[int, int]] = []
        for state in states:
            geometry, used = state.geometry, state.used[0]
            table = compute_score_table(geometry, ComputeReading.COMPUTE)
            in_use = state.mask.bit_count() * geometry.compute + used * geometry.slices
            weights.append((in_use, table[Use(state.mask, used)]))
        return weights

    def units(self, geometry: Geometry) -> int:
        """Return the units of a GPU; for the mean, both kinds of slices count for half of them."""
        if self is Measure.MEMORY:
            return geometry.slices
        return 2 * geometry.slices * geometry.compute

    def severity(self, trace: SmallInts, bins: Ints, ends: Ints) -> Ints:
        """Return the fragmentation by bin: the sum of F at its end, or of all slots in `PARTS`."""
        fragmentation, active = trace[:, 4].astype(np.int64), trace[:, 3]
        if self is Measure.MEMORY:
            return np.concatenate([[0], fragmentation])[ends]
        per_active = np.rint(PARTS * fragmentation / np.maximum(active, 1))
        return np.bincount(bins, per_active, BINS).astype(np.int64)

    def totals(self, cluster: Cluster) -> tuple[int, int]:
        """Return the units in use and the sum of F, GPU by GPU."""
        weights = self.weights([cluster.state(gpu) for gpu in range(cluster.gpus)])
        return sum(used for used, _ in weights), sum(score for _, score in weights)
