"""The free capacity of the cluster, by model, profile and node.

The placements that a GPU can take depend on its state only. The open windows of a profile are
therefore one product: GPUs in each state, times windows open in that state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slicewise.api.cluster import ModelUse
from slicewise.control.state import NodeStatus, State
from slicewise.core.cluster import Cluster
from slicewise.core.geometry import Geometry

_Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Table:
    """The GPU states of one model, and the windows open in each."""

    geometry: Geometry
    states: slice
    open: _Array
    """Number of feasible starts, by state and profile."""


class FreeCapacity:
    """Computes the free capacity of a state of the service."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._cluster: Cluster = state.cluster
        self._tables: list[_Table] = []
        self._models_seen = 0
        self._slices_in_use: _Array = np.empty(0, np.int64)
        """Occupied slices by GPU state. The last element, 0, is for removed GPUs."""

    def models(self) -> tuple[ModelUse, ...]:
        """The use and the free capacity of every model in the cluster."""
        self._update_tables()
        members = np.array([len(ids) for ids in self._cluster.members], np.int64)
        gpus: dict[Geometry, int] = {}
        occupied: dict[Geometry, int] = {}
        nodes = tuple(self._state.nodes.values())
        for node, slices in zip(nodes, self.occupied_slices(nodes), strict=True):
            gpus[node.geometry] = gpus.get(node.geometry, 0) + len(node.gpus)
            occupied[node.geometry] = occupied.get(node.geometry, 0) + slices
        # Some GPUs with a reserved window take no requests of others, and are members of no state.
        hidden = Counter(
            self._cluster.state(gpu).geometry
            for gpu in self._reserved()
            if self._cluster.takes_instances(gpu) and gpu not in self._cluster.schedulable
        )
        return tuple(
            _use(
                table,
                members[table.states],
                gpus[table.geometry],
                occupied[table.geometry],
                hidden[table.geometry],
            )
            for table in self._tables
            if table.geometry in gpus
        )

    def occupied_slices(self, nodes: Sequence[NodeStatus]) -> list[int]:
        """The occupied slices of each node."""
        self._update_tables()
        # A removed GPU has state -1, which is the last element.
        states = np.array(self._cluster.state_of, np.int64)
        for gpu in self._reserved():  # it counts as occupied in the cluster, though it is not yet
            states[gpu] = self._cluster.actual_state(gpu)
        by_gpu = self._slices_in_use.take(states, mode="wrap")
        cumulative = np.concatenate([np.zeros(1, np.int64), np.cumsum(by_gpu)])
        first = np.array([node.gpus.start for node in nodes], np.int64)
        end = np.array([node.gpus.stop for node in nodes], np.int64)
        counts: list[int] = (cumulative[end] - cumulative[first]).tolist()
        return counts

    def _reserved(self) -> Iterator[int]:
        """The GPUs with a reserved window."""
        return (window.gpu for _, pool in self._state.reservations for window in pool)

    def _update_tables(self) -> None:
        """Add tables for new models, and drop those of removed models."""
        if self._models_seen == self._cluster.models_seen:
            return
        self._models_seen = self._cluster.models_seen
        states = self._cluster.states
        known = {table.geometry: table.open for table in self._tables}
        self._tables = []
        done = 0
        while done < len(states):
            geometry = states[done].geometry
            end = done
            while end < len(states) and states[end].geometry is geometry:
                end += 1
            counts = known.get(geometry)
            if counts is None:
                counts = np.array(
                    [
                        [len(state.feasible_starts(profile)) for profile in geometry.profiles]
                        for state in states[done:end]
                    ],
                    np.int64,
                )
            self._tables.append(_Table(geometry, slice(done, end), counts))
            done = end
        slices = [state.mask.bit_count() for state in states]
        self._slices_in_use = np.array([*slices, 0], np.int64)


def _use(table: _Table, members: _Array, gpus: int, occupied: int, hidden: int) -> ModelUse:
    geometry = table.geometry
    names = [profile.name for profile in geometry.profiles]
    slices = gpus * geometry.slices
    return ModelUse(
        model=geometry.model,
        gpus=gpus,
        schedulable_gpus=int(members.sum()) + hidden,
        slices=slices,
        free_slices=slices - occupied,
        placements=dict(zip(names, (members @ table.open).tolist(), strict=True)),
        fits=dict(zip(names, (members @ (table.open > 0)).tolist(), strict=True)),
    )
