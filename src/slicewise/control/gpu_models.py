"""The GPU models of a running cluster, and the limits on them; the catalog has the known ones.

The tables of a model grow with its number of states. Agents report the models of their GPUs, so
without limits a faulty agent could exhaust the memory of every process and slow down every start.
"""

from __future__ import annotations

from slicewise.control.answers import RefusedError
from slicewise.control.geometries import geometry_of
from slicewise.control.state import State
from slicewise.control.unit_of_work import UnitOfWork
from slicewise.core.geometry import Geometry
from slicewise.core.states import state_space
from slicewise.journal.entries import GeometryRecord, ModelEntered, ModelForgotten

MAX_MODELS = 64
MAX_CLUSTER_STATES = 50_000
"""Default limits on the number of models, and on the states of all models together."""


def refuse_too_many(state: State, limit: int, leaving: Geometry | None = None) -> None:
    """Refuse one more model at the limit; ``leaving`` is a model that is removed for it."""
    if len(state.geometries) - (leaving is not None) >= limit:
        raise RefusedError(
            409,
            f"the cluster has {len(state.geometries)} GPU models, and limits.models allows no "
            "more: remove the nodes of a model that is not needed",
            reason="models",
        )


class GpuModels:
    """Adds models, and removes those that no node has any more."""

    def __init__(self, work: UnitOfWork, max_models: int, max_states: int) -> None:
        self._work = work
        self._state = work.state
        self._max_models = max_models
        self._max_states = max_states

    def check(self, record: GeometryRecord, leaving: Geometry | None = None) -> None:
        """Refuse a model beyond the limits; ``leaving`` is one that may lose its last node."""
        state = self._state
        if record.model in state.geometries:
            return
        if leaving is not None and not self._has_one_node(leaving):
            leaving = None
        refuse_too_many(state, self._max_models, leaving)
        states = len(state.cluster.states) + len(state_space(geometry_of(record)))
        if leaving is not None:
            states -= len(state_space(leaving))
        if states > self._max_states:
            raise RefusedError(
                409,
                f"with {record.model} the GPU models of the cluster would have {states:,} states, "
                f"and limits.states allows {self._max_states:,}",
                reason="models",
            )

    def enter(self, record: GeometryRecord) -> None:
        """Add a model unless it is known."""
        if record.model not in self._state.geometries:
            self._work.enter(ModelEntered(record))

    def forget(self, geometry: Geometry) -> None:
        """Remove a model if no node has it."""
        if not self._state.gpus[geometry]:
            self._work.enter(ModelForgotten(geometry.model))

    def _has_one_node(self, geometry: Geometry) -> bool:
        nodes = self._state.nodes.values()
        return sum(node.geometry == geometry for node in nodes) == 1
