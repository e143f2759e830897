"""The part of the state that agents change: sessions, holds, phases, foreign instances.

Leaving and foreign instances occupy slices in the same cluster that decisions read, so they block
a placement exactly as an allocation does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from slicewise.control.status import AgentStatus, NodeStatus
from slicewise.core.errors import SlicewiseError
from slicewise.journal.agent_entries import (
    AgentJoined,
    Foreign,
    ForeignEvicted,
    ForeignGone,
    ForeignSeen,
    GeometryAccepted,
    GpuHeld,
    NodeHeld,
    PartTurned,
    Phase,
)
from slicewise.journal.entries import AllocationRecord, Part, Row
from slicewise.journal.records import Entry

if TYPE_CHECKING:
    from slicewise.control.state import State

NO_INSTANCE = -1
"""Stands in for the id of an instance that no longer occupies slices."""


class AgentEntries:
    """Applies the entries that agents cause to a state."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.handlers: dict[type[Entry], Callable[[Any, Row], None]] = {
            AgentJoined: self._joined,
            GeometryAccepted: self._accepted,
            NodeHeld: self._node_held,
            GpuHeld: self._gpu_held,
            PartTurned: self._part_turned,
            ForeignSeen: self._foreign_seen,
            ForeignEvicted: self._foreign_evicted,
            ForeignGone: self._foreign_gone,
        }

    def _managed(self, name: str) -> tuple[NodeStatus, AgentStatus]:
        node = self._state.nodes[name]
        if node.agent is None:
            raise SlicewiseError(f"node {name!r} has no agent")
        return node, node.agent

    # Sessions and holds

    def _joined(self, entry: AgentJoined, row: Row) -> None:
        state = self._state
        node = state.nodes[entry.node]
        if len(entry.gpus) != len(node.gpus):
            raise SlicewiseError(
                f"node {node.name!r} has {len(node.gpus)} GPUs, and its agent reports "
                f"{len(entry.gpus)}"
            )
        agent = AgentStatus(
            entry.session, entry.boot, entry.driver, entry.version, entry.since, entry.gpus
        )
        old, node.agent = node.agent, agent
        if old is not None:
            agent.accepted = old.accepted
            agent.gpu_holds, agent.foreign = old.gpu_holds, old.foreign
            agent.evicted, agent.blocks = old.evicted, old.blocks
        for identity, index in list(state.on_node(node)):
            record = state.record(identity)
            part = record.parts[index]
            if part.phase is None:
                part = msgspec.structs.replace(
                    part, phase=Phase.PLACED, gpu_uuid=agent.gpus[part.gpu]
                )
            elif entry.rebooted:
                phase = Phase.PLACED if record.ended is None else Phase.RELEASING
                part = turned(part, phase)
            state.placements.set_part(record, index, part)
        state.desired_changed(node)

    def _accepted(self, entry: GeometryAccepted, row: Row) -> None:
        self._managed(entry.node)[1].accepted = True

    def _node_held(self, entry: NodeHeld, row: Row) -> None:
        node, agent = self._managed(entry.node)
        node.holds = entry.reasons
        self._state.mark_changed(node.name)
        for index in range(len(node.gpus)):
            self._hold(node, agent, index)

    def _gpu_held(self, entry: GpuHeld, row: Row) -> None:
        node, agent = self._managed(entry.node)
        if entry.reasons:
            agent.gpu_holds[entry.gpu] = entry.reasons
        else:
            agent.gpu_holds.pop(entry.gpu, None)
        self._hold(node, agent, entry.gpu)
        self._state.mark_changed(node.name)

    def _hold(self, node: NodeStatus, agent: AgentStatus, index: int) -> None:
        cluster = self._state.cluster
        if node.holds or index in agent.gpu_holds:
            cluster.hold(node.gpus[index])
        else:
            cluster.unhold(node.gpus[index])

    # Instances

    def _part_turned(self, entry: PartTurned, row: Row) -> None:
        state = self._state
        record = state.record(entry.allocation)
        old = record.parts[entry.index]
        leaves = entry.phase in (Phase.RELEASING, Phase.QUARANTINED, Phase.GONE)
        if leaves != (record.ended is not None) or old.phase in (None, Phase.GONE):
            raise SlicewiseError(
                f"instance {entry.index} of allocation {record.id} was {old.phase} and cannot be "
                f"{entry.phase}"
            )
        part = turned(old, entry.phase, entry.uuid, entry.detail, entry.attempts)
        if entry.phase is not Phase.GONE:
            state.placements.set_part(record, entry.index, part)
        else:
            state.placements.vacate(record, entry.index, part)

    # Foreign instances

    def _foreign_seen(self, entry: ForeignSeen, row: Row) -> None:
        node, agent = self._managed(entry.node)
        self._unblock(agent, entry.name)
        self._state.mark_changed(node.name)
        found = entry.foreign
        agent.foreign[entry.name] = found
        if found.blocks:
            placement = node.geometry.placement(found.profile, found.start)
            if placement is None:
                raise SlicewiseError(
                    f"{found.profile} cannot start at slice {found.start} on {node.geometry.model}"
                )
            made = self._state.cluster.put(node.gpus[found.gpu], placement.number)
            agent.blocks[entry.name] = made.id

    def _foreign_evicted(self, entry: ForeignEvicted, row: Row) -> None:
        node, agent = self._managed(entry.node)
        agent.evicted[entry.name] = None
        self._state.desired_changed(node)

    def _foreign_gone(self, entry: ForeignGone, row: Row) -> None:
        node, agent = self._managed(entry.node)
        self._state.mark_changed(node.name)
        self._unblock(agent, entry.name)
        del agent.foreign[entry.name]
        agent.evicted.pop(entry.name, None)

    def _unblock(self, agent: AgentStatus, name: str) -> None:
        made = agent.blocks.pop(name, None)
        if made is not None:
            self._state.cluster.release(made)

    def unblock_all(self, node: NodeStatus) -> None:
        """Free the slices of all foreign instances of a node that is being removed."""
        if node.agent is not None:
            for name in list(node.agent.blocks):
                self._unblock(node.agent, name)


def turned(part: Part, phase: Phase, uuid: str = "", detail: str = "", attempts: int = 0) -> Part:
    """Return an instance in another phase."""
    return msgspec.structs.replace(part, phase=phase, uuid=uuid, detail=detail, attempts=attempts)


def as_leaving(record: AllocationRecord) -> AllocationRecord:
    """Return an ended allocation whose instances may still exist."""
    parts = tuple(
        part if part.phase is None else turned(part, Phase.RELEASING, part.uuid)
        for part in record.parts
    )
    return msgspec.structs.replace(record, parts=parts)


def as_gone(record: AllocationRecord) -> AllocationRecord:
    """Return an ended allocation whose instances are all gone."""
    if all(part.phase is None for part in record.parts):
        return record
    parts = tuple(
        part if part.phase is None else msgspec.structs.replace(part, phase=Phase.GONE)
        for part in record.parts
    )
    return msgspec.structs.replace(record, parts=parts)


def evictions(agent: AgentStatus) -> Iterator[Foreign]:
    """Yield the foreign instances that an operator ordered the agent to destroy."""
    for name in agent.evicted:
        yield agent.foreign[name]
