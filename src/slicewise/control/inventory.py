"""The inventory of nodes, and the service clock."""

from __future__ import annotations

from slicewise.api.base import moment
from slicewise.api.health import ClockStepView
from slicewise.control.allocations import Allocations
from slicewise.control.answers import Answer, RefusedError, json_answer
from slicewise.control.commands import (
    AddNode,
    Drain,
    RemoveNode,
    SetClock,
)
from slicewise.control.geometries import record_of
from slicewise.control.gpu_models import GpuModels
from slicewise.control.unit_of_work import UnitOfWork
from slicewise.control.views import node_view
from slicewise.journal.entries import (
    EARLIEST,
    LATEST,
    STEP_SECONDS,
    Cause,
    ClockSet,
    NodeAdded,
    NodePhase,
    NodeRemoved,
    NodeTurned,
)


class Inventory:
    """Adds, cordons, drains and removes nodes; sets the clock."""

    def __init__(self, work: UnitOfWork, allocations: Allocations, models: GpuModels) -> None:
        self._models = models
        self._work = work
        self._state = work.state
        self._allocations = allocations

    # Nodes

    def add_node(self, command: AddNode) -> Answer:
        """Add a node, and its GPU model unless it is known."""
        state, geometry = self._state, command.geometry
        if command.node in state.nodes:
            raise RefusedError(409, f"node {command.node!r} already exists", reason="exists")
        known = state.geometries.get(geometry.model)
        if known is not None and record_of(known) != geometry:
            raise RefusedError(
                409,
                f"another geometry named {geometry.model!r} is in use: nodes of one model must "
                "agree on it",
                reason="geometry",
            )
        self._models.check(geometry)
        self._models.enter(geometry)
        first = state.cluster.next_gpus(command.gpus)
        self._work.enter(
            NodeAdded(command.node, geometry.model, command.gpus, first, command.labels)
        )
        self._work.room_appeared = True
        return json_answer(201, node_view(state, state.nodes[command.node]))

    def set_phase(self, name: str, phase: NodePhase) -> Answer:
        """Change the phase of a node."""
        node = self._work.node(name)
        if node.phase is not phase:
            self._work.enter(NodeTurned(name, phase))
            self._work.room_appeared = True  # or a reservation is lost, which makes room, too
        return json_answer(200, node_view(self._state, node))

    def drain(self, command: Drain) -> Answer:
        """Drain a node. Its phase is `draining` until it is empty, then `drained`."""
        node = self._work.node(command.node)
        if not node.instances:
            return self.set_phase(command.node, NodePhase.DRAINED)
        answer = self.set_phase(command.node, NodePhase.DRAINING)
        if command.evict:
            for identity in sorted({identity for identity, _ in self._state.on_node(node)}):
                allocation = self._state.allocations.get(identity)
                if allocation is not None:  # otherwise it is already leaving
                    self._allocations.end(allocation, Cause.EVICTED)
            answer = json_answer(200, node_view(self._state, node))
        return answer

    def remove_node(self, command: RemoveNode) -> Answer:
        """Remove an empty node."""
        node = self._work.node(command.node)
        if node.instances:
            raise RefusedError(
                409,
                f"node {node.name!r} still has {node.instances} instances: drain it first",
                reason="busy",
            )
        view = node_view(self._state, node)
        self._allocations.dispatcher.removed(node.gpus)
        self._work.enter(NodeRemoved(node.name))
        self._models.forget(node.geometry)
        return json_answer(200, view)

    # The clock

    def set_clock(self, command: SetClock) -> Answer:
        """Move service time to the wall clock. Leases that are over by then end next."""
        by, before = command.by, self._work.now
        after = before + by
        if abs(by) < STEP_SECONDS:
            raise RefusedError(
                409,
                "the wall clock agrees with service time: there is no step to accept",
                reason="clock",
            )
        if abs(by - command.seen) >= STEP_SECONDS:
            raise RefusedError(
                409,
                f"the leader's wall clock is {by:+.3f} seconds from service time, and "
                f"the request accepts {command.seen:+.3f}: check the clock again",
                reason="clock",
            )
        if not EARLIEST <= after <= LATEST:
            raise RefusedError(
                409, "the wall clock is outside the years 2000 to 2100", reason="clock"
            )
        self._work.enter(ClockSet(by))
        return json_answer(
            200,
            ClockStepView(before=moment(before) or "", after=moment(after) or "", step_seconds=by),
        )
