"""Which GPU models are known: those that nodes have, and only so many of them.

What a model can do takes tables whose size is that of its states. Agents tell what their GPUs
are, so without a bound one of them could fill the memory of every process, and make every later
start slow as well.
"""

from __future__ import annotations

from slicewise.control.answers import RefusedError
from slicewise.control.entries import GeometryRecord, ModelEntered, ModelForgotten
from slicewise.control.geometries import geometry_of
from slicewise.control.ledger import Ledger
from slicewise.control.state import State
from slicewise.core.geometry import Geometry
from slicewise.core.states import state_space

MOST_MODELS = 64
MOST_STATES = 50_000
"""How many models there may be, and how many states all of them may have, unless told otherwise."""


def refuse_too_many(state: State, most: int, leaving: Geometry | None = None) -> None:
    """Refuse one more model where there are so many; ``leaving`` makes room for it."""
    if len(state.geometries) - (leaving is not None) >= most:
        raise RefusedError(
            409,
            f"the cluster has {len(state.geometries)} GPU models, and limits.models allows no "
            "more: remove the nodes of a model that is not needed",
            reason="models",
        )


class Models:
    """Enters models, and forgets those that no node has any more."""

    def __init__(self, ledger: Ledger, most: int, most_states: int) -> None:
        self._ledger = ledger
        self._state = ledger.state
        self._most = most
        self._most_states = most_states

    def check(self, record: GeometryRecord, leaving: Geometry | None = None) -> None:
        """Refuse a model that would be one too many; ``leaving`` is one whose last node goes."""
        state = self._state
        if record.model in state.geometries:
            return
        if leaving is not None and not self._unused_without(leaving):
            leaving = None
        refuse_too_many(state, self._most, leaving)
        states = len(state.cluster.states) + len(state_space(geometry_of(record)))
        if leaving is not None:
            states -= len(state_space(leaving))
        if states > self._most_states:
            raise RefusedError(
                409,
                f"with {record.model} the GPU models of the cluster would have {states:,} states, "
                f"and limits.states allows {self._most_states:,}",
                reason="models",
            )

    def enter(self, record: GeometryRecord) -> None:
        """Let a model be known, if it is not."""
        if record.model not in self._state.geometries:
            self._ledger.enter(ModelEntered(record))

    def forget(self, geometry: Geometry) -> None:
        """Forget a model if no node has it."""
        if not self._state.gpus[geometry]:
            self._ledger.enter(ModelForgotten(geometry.model))

    def _unused_without(self, geometry: Geometry) -> bool:
        """Whether a single node has this model."""
        nodes = self._state.nodes.values()
        return sum(node.geometry == geometry for node in nodes) == 1
