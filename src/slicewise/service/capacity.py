"""How much room is left, by model, profile and node, in work that hardly grows with the GPUs.

What could be placed on a GPU depends on its state alone. So the number of open windows is, for
each profile, one product: how many GPUs are in each state, times how many windows are open there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slicewise.control.reports import ModelUse
from slicewise.control.state import NodeStanding, State
from slicewise.core.cluster import Cluster
from slicewise.core.geometry import Geometry

_Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Table:
    """What the states of one model offer."""

    geometry: Geometry
    states: slice
    open: _Array
    """State by profile: the starts open to it."""


class Capacity:
    """Measures one state of the service."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._cluster: Cluster = state.cluster
        self._tables: list[_Table] = []
        self._models_seen = 0
        self._taken: _Array = np.empty(0, np.int64)
        """By state of a GPU: slices taken; the last stands for GPUs that are not there."""

    def models(self) -> tuple[ModelUse, ...]:
        """Every model in use, and what its GPUs have left."""
        self._look_at_models()
        members = np.array([len(ids) for ids in self._cluster.members], np.int64)
        gpus: dict[Geometry, int] = {}
        taken: dict[Geometry, int] = {}
        nodes = tuple(self._state.nodes.values())
        for node, occupied in zip(nodes, self.taken(nodes), strict=True):
            gpus[node.geometry] = gpus.get(node.geometry, 0) + len(node.gpus)
            taken[node.geometry] = taken.get(node.geometry, 0) + occupied
        return tuple(
            _use(table, members[table.states], gpus[table.geometry], taken[table.geometry])
            for table in self._tables
            if table.geometry in gpus
        )

    def taken(self, nodes: Sequence[NodeStanding]) -> list[int]:
        """By node: the slices taken on its GPUs."""
        self._look_at_models()
        # GPUs that left have state -1, which is the last entry: nothing is taken there.
        by_gpu = self._taken.take(np.array(self._cluster.state_of, np.int64), mode="wrap")
        up_to = np.concatenate([np.zeros(1, np.int64), np.cumsum(by_gpu)])
        first = np.array([node.gpus.start for node in nodes], np.int64)
        behind = np.array([node.gpus.stop for node in nodes], np.int64)
        counts: list[int] = (up_to[behind] - up_to[first]).tolist()
        return counts

    def _look_at_models(self) -> None:
        """Make the tables of models that joined since the last time, and drop those that left."""
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
            offered = known.get(geometry)
            if offered is None:
                counts = [
                    [len(state.feasible_starts(profile)) for profile in geometry.profiles]
                    for state in states[done:end]
                ]
                offered = np.array(counts, np.int64)
            self._tables.append(_Table(geometry, slice(done, end), offered))
            done = end
        masks = [state.mask.bit_count() for state in states]
        self._taken = np.array([*masks, 0], np.int64)


def _use(table: _Table, members: _Array, gpus: int, taken: int) -> ModelUse:
    geometry = table.geometry
    names = [profile.name for profile in geometry.profiles]
    slices = gpus * geometry.slices
    return ModelUse(
        model=geometry.model,
        gpus=gpus,
        schedulable_gpus=int(members.sum()),
        slices=slices,
        free_slices=slices - taken,
        placements=dict(zip(names, (members @ table.open).tolist(), strict=True)),
        fits=dict(zip(names, (members @ (table.open > 0)).tolist(), strict=True)),
    )
