"""The states of all GPU models in a cluster, numbered together, and the GPUs in each of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slicewise.core.errors import SlicewiseError
from slicewise.core.fragmentation import Reading, score_table
from slicewise.core.geometry import Geometry
from slicewise.core.idset import NONE, IdSet
from slicewise.core.states import ILLEGAL, GpuState, state_space


class StateIndex:
    """Tables by state, for every GPU model that was added."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[GpuState] = []
        """Every state of every model in the cluster; all tables below are indexed by it."""
        self.members: list[IdSet] = []
        """The schedulable GPUs in each state."""
        self.first: npt.NDArray[np.int64] = np.empty(0, np.int64)
        """The lowest schedulable GPU in each state, or NONE."""
        self.after_place: list[tuple[int, ...]] = []
        """State by placement: the state that follows, or ILLEGAL."""
        self.after_release: list[tuple[int, ...]] = []
        """State by placement: the state left when that instance ends, or ILLEGAL."""
        self._taken: list[int] = []
        self._f_partial: list[int] = []
        self._f_overlap: list[int] = []
        self._empty_state: dict[Geometry, int] = {}
        self.models_seen = 0
        """Counts the models added and forgotten; each renumbers states."""

    @property
    def models(self) -> tuple[Geometry, ...]:
        """The GPU models known, whether or not a node has them."""
        return tuple(self._empty_state)

    def know(self, geometry: Geometry) -> int:
        """Add a GPU model, with or without a node of it; returns the number of its empty state."""
        known = self._empty_state.get(geometry)
        if known is not None:
            return known
        if any(other.model == geometry.model for other in self._empty_state):
            raise SlicewiseError(
                f"another geometry named {geometry.model!r} is in the cluster already"
            )
        base = len(self.states)
        space = state_space(geometry)
        self.states.extend(space.states)
        self.members.extend(IdSet() for _ in space.states)
        self.first = np.concatenate([self.first, np.full(len(space), NONE, np.int64)])
        for table, rows in (
            (self.after_place, space.after_place),
            (self.after_release, space.after_release),
        ):
            table.extend(tuple(t if t == ILLEGAL else t + base for t in row) for row in rows)
        masks = [state.mask for state in space.states]
        self._taken.extend(mask.bit_count() for mask in masks)
        partial = score_table(geometry, Reading.PARTIAL)
        overlap = score_table(geometry, Reading.OVERLAP)
        self._f_partial.extend(partial[mask] for mask in masks)
        self._f_overlap.extend(overlap[mask] for mask in masks)
        self._empty_state[geometry] = base
        self.models_seen += 1
        return base

    def _drop(self, geometry: Geometry) -> range:
        """Remove a model; returns its former states. Later ones now have lower numbers."""
        base = self._empty_state.pop(geometry)
        later = [other for other in self._empty_state.values() if other > base]
        end = min(later, default=len(self.states))
        gone = end - base
        for table in (self.states, self.members, self._taken, self._f_partial, self._f_overlap):
            del table[base:end]
        self.first = np.delete(self.first, slice(base, end))
        for rows in (self.after_place, self.after_release):
            rows[base:] = [
                tuple(t if t == ILLEGAL else t - gone for t in row) for row in rows[end:]
            ]
        for other, empty in self._empty_state.items():
            if empty > base:
                self._empty_state[other] = empty - gone
        self.models_seen += 1
        return range(base, end)

    def _leave(self, gpu: int, state: int) -> None:
        members = self.members[state]
        members.remove(gpu)
        self.first[state] = members.first

    def _join(self, gpu: int, state: int) -> None:
        members = self.members[state]
        members.add(gpu)
        self.first[state] = members.first
