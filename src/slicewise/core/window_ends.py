"""When the windows of GPUs will be free, as far as the ends of their instances are known.

For each window of a GPU: when the last of its instances with a known end leaves, and how many
there are whose end is not known. The rows are worked out when they are asked for, and again after
the GPU has changed, so placing and releasing cost next to nothing. An instance that is still there
at its end was promised wrongly: its end counts as not known from then on.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from slicewise.core.geometry import Geometry
from slicewise.core.tables import cached

if TYPE_CHECKING:
    from slicewise.core.states import GpuState

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int8]

_CHANGED = -math.inf


class Occupancy(Protocol):
    """The GPUs and what is on them."""

    @property
    def models(self) -> tuple[Geometry, ...]:
        """The GPU models known."""

    models_seen: int
    state_of: list[int]
    states: list[GpuState]

    def ends_on(self, gpu: int) -> list[tuple[int, float]]:
        """The placements on a GPU, and when each ends."""


class WindowEnds:
    """A row for every GPU, over the windows of its model.

    It is part of the occupancy, which is passed in: a reference back would keep clusters that are
    gone in memory until the garbage collector finds them.
    """

    def __init__(self) -> None:
        self._count = 0
        self._models_seen = 0
        self._last: Floats = np.empty((0, 0))
        self._unknown: Counts = np.empty((0, 0), np.int8)
        self._until: Floats = np.empty(0)
        """By GPU: the row holds until then, when the first of its known ends has come."""

    def add_gpus(self, count: int) -> None:
        """Make room for GPUs."""
        self._count += count

    def forget(self, gpu: int) -> None:
        """Something has changed on a GPU."""
        if gpu < len(self._until):
            self._until[gpu] = _CHANGED

    def rows(self, occupancy: Occupancy, gpus: Ints, now: float) -> tuple[Floats, Counts]:
        """By GPU and window: the last known end (not after ``now`` if none), and how many unknown.

        Columns are in the order of ``Geometry.windows``; a model with fewer has its own first.
        """
        if self._count > len(self._until) or occupancy.models_seen != self._models_seen:
            self._make_room(occupancy)
        for gpu in gpus[self._until[gpus] <= now].tolist():
            self._work_out(occupancy, gpu, now)
        return self._last[gpus], self._unknown[gpus]

    def _make_room(self, occupancy: Occupancy) -> None:
        """Begin with new rows: GPUs were added, or models with more windows.

        Memory that is never written to takes no room: only GPUs that are looked at do.
        """
        self._models_seen = occupancy.models_seen
        width = max(len(geometry.windows) for geometry in occupancy.models)
        size = max(self._count, 2 * len(self._until))
        self._last = np.zeros((size, width))
        self._unknown = np.zeros((size, width), np.int8)
        self._until = np.full(size, _CHANGED)

    def _work_out(self, occupancy: Occupancy, gpu: int, now: float) -> None:
        touched = touched_windows(occupancy.states[occupancy.state_of[gpu]].geometry)
        last = [_CHANGED] * self._last.shape[1]
        unknown = [0] * len(last)
        until = math.inf
        for placement, end in occupancy.ends_on(gpu):
            if now < end < math.inf:
                until = min(until, end)
                for window in touched[placement]:
                    last[window] = max(last[window], end)
            else:
                for window in touched[placement]:
                    unknown[window] += 1
        self._last[gpu] = last
        self._unknown[gpu] = unknown
        self._until[gpu] = until


@cached(256)
def touched_windows(geometry: Geometry) -> tuple[tuple[int, ...], ...]:
    """By placement: the numbers of the windows that it touches."""
    return tuple(
        tuple(n for n, window in enumerate(geometry.windows) if window & placement.window)
        for placement in geometry.placements
    )
