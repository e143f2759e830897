"""The totals of a cluster, which change with every instance."""

from __future__ import annotations

from slicewise.core.fragmentation import Reading


class ClusterTotals:
    """GPUs and slices in use, and the sums of the fragmentation score."""

    def __init__(self) -> None:
        self._gpus = self._slices = self._occupied = self._active = 0
        self._sum_partial = self._sum_overlap = 0

    @property
    def gpus(self) -> int:
        """The number of GPUs."""
        return self._gpus

    @property
    def slices(self) -> int:
        """Memory slices of all GPUs together."""
        return self._slices

    @property
    def occupied_slices(self) -> int:
        """Memory slices taken by instances."""
        return self._occupied

    @property
    def free_slices(self) -> int:
        """Memory slices not taken."""
        return self._slices - self._occupied

    @property
    def active_gpus(self) -> int:
        """GPUs with at least one instance."""
        return self._active

    def fragmentation(self, reading: Reading = Reading.PARTIAL) -> float:
        """Mean F over all GPUs."""
        total = self._sum_partial if reading is Reading.PARTIAL else self._sum_overlap
        return total / self._gpus if self._gpus else 0.0
