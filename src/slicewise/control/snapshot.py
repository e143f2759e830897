"""A snapshot of the state after an entry of the journal.

It is restored by applying entries, so there is only one way to build a state. Later decisions are
the same as without it, down to the GPU ids of new nodes.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from slicewise.control.demand_state import DemandSnapshot
from slicewise.control.geometries import record_of
from slicewise.control.policy_state import PolicySnapshot
from slicewise.control.state import State
from slicewise.control.status import AgentStatus
from slicewise.journal.agent_entries import (
    AgentJoined,
    Foreign,
    ForeignEvicted,
    ForeignSeen,
    GeometryAccepted,
    GpuHeld,
    NodeHeld,
)
from slicewise.journal.entries import (
    Allocated,
    AllocationRecord,
    AnyEntry,
    GeometryRecord,
    ModelEntered,
    ModelForgotten,
    NodeAdded,
    NodePhase,
    NodeRemoved,
    NodeTurned,
    ProfileRecord,
    Queued,
    Reserved,
    Row,
    Seconds,
    TenantSet,
    TokenIssued,
    TurnTaken,
)


class _AgentSnapshot(msgspec.Struct, frozen=True):
    joined: AgentJoined
    accepted: bool
    gpu_holds: dict[int, dict[str, str]]
    foreign: dict[str, Foreign]
    evicted: tuple[str, ...]


class _NodeSnapshot(msgspec.Struct, frozen=True):
    name: str
    model: str
    first: int
    gpus: int
    phase: NodePhase
    labels: dict[str, str]
    agent: _AgentSnapshot | None = None
    holds: dict[str, str] = {}


class Snapshot(msgspec.Struct, frozen=True):
    """The contents of a state."""

    seq: int
    at: Seconds
    clock_offset: Seconds
    geometries: tuple[GeometryRecord, ...]
    nodes: tuple[_NodeSnapshot, ...]
    spare: tuple[tuple[int, int], ...]
    """Free ranges of GPU ids that removed nodes left, as first and count, in order of removal."""
    tenants: tuple[TenantSet, ...]
    tokens: tuple[TokenIssued, ...]
    allocations: tuple[AllocationRecord, ...]
    waiting: dict[str, int]
    """The ticket numbers of queued allocations, by allocation."""
    reserved: tuple[Reserved, ...]
    """The reserved windows, by line."""
    latest: dict[str, Seconds]
    """By GPU model: the time of the latest request that was placed."""
    last_ticket: int
    turn: int
    leaving: tuple[AllocationRecord, ...] = ()
    demand: DemandSnapshot = DemandSnapshot()
    policy: PolicySnapshot = PolicySnapshot()


def snapshot_of(state: State) -> Snapshot:
    """Return a snapshot of a state."""
    return Snapshot(
        seq=state.seq,
        at=state.at,
        clock_offset=state.clock_offset,
        geometries=tuple(record_of(geometry) for geometry in state.geometries.values()),
        nodes=tuple(
            _NodeSnapshot(
                node.name,
                node.geometry.model,
                node.gpus.start,
                len(node.gpus),
                node.phase,
                node.labels,
                None if node.agent is None else _agent_snapshot(node.name, node.agent),
                node.holds,
            )
            for node in state.nodes.values()
        ),
        spare=tuple((ids.start, len(ids)) for ids in state.cluster.spare_gpus),
        tenants=tuple(TenantSet(tenant.ref, tenant.quota) for tenant in state.tenants.values()),
        tokens=tuple(state.tokens.values()),
        allocations=tuple(state.allocations.values()),
        waiting=dict(state.tickets),
        reserved=tuple(
            Reserved(
                state.tenants[line.tenant].ref,
                state.want_of(line),
                line.instances,
                state.window_records(pool),
            )
            for line, pool in state.reservations
        ),
        latest={geometry.model: at for geometry, at in state.waiting.latest.items()},
        last_ticket=state.last_ticket,
        turn=state.turn,
        leaving=tuple(state.leaving.values()),
        demand=state.demand.snapshot(),
        policy=state.policy.snapshot(),
    )


def _agent_snapshot(node: str, agent: AgentStatus) -> _AgentSnapshot:
    return _AgentSnapshot(
        AgentJoined(
            node,
            agent.session,
            agent.boot,
            agent.driver,
            agent.version,
            agent.since,
            agent.gpus,
        ),
        agent.accepted,
        dict(agent.gpu_holds),
        dict(agent.foreign),
        tuple(agent.evicted),
    )


def restore_snapshot(snapshot: Snapshot, state: State) -> State:
    """Restore a snapshot into a new state, and return it."""

    def enter(entry: AnyEntry) -> None:
        state.apply(Row(state.seq + 1, 0, "", entry))

    for geometry in snapshot.geometries:
        enter(ModelEntered(geometry))
    # Placeholder nodes take all GPU ids in order. Removing one frees its ids for the node that is
    # added next, so every node gets its former ids, and the remaining ranges stay free.
    placeholders = sorted([*((node.first, node.gpus) for node in snapshot.nodes), *snapshot.spare])
    model = _placeholder_model(snapshot)
    if placeholders:
        enter(ModelEntered(model))
    for first, gpus in placeholders:
        enter(NodeAdded(_placeholder(first), model.model, gpus, first))
    for node in snapshot.nodes:
        enter(NodeRemoved(_placeholder(node.first)))
        enter(NodeAdded(node.name, node.model, node.gpus, node.first, node.labels))
        if node.agent is not None:
            enter(node.agent.joined)
    for first, _ in snapshot.spare:
        enter(NodeRemoved(_placeholder(first)))
    if placeholders:
        enter(ModelForgotten(model.model))
    for tenant in snapshot.tenants:
        enter(tenant)
    for token in snapshot.tokens:
        enter(token)
    for allocation in snapshot.allocations:
        waits = snapshot.waiting.get(allocation.id)
        enter(Allocated(allocation) if waits is None else Queued(allocation, waits))
    enter(TurnTaken(snapshot.turn))
    for record in snapshot.leaving:
        state.placements.restore_leaving(record)
    for node in snapshot.nodes:
        if node.agent is not None:
            for entry in _reported(node, node.agent):
                enter(entry)
        if node.phase is not NodePhase.READY:
            enter(NodeTurned(node.name, node.phase))
    for reserved in snapshot.reserved:
        enter(reserved)
    for name, at in snapshot.latest.items():
        state.waiting.placed(state.geometries[name], at)
    state.demand.restore(snapshot.demand)
    state.policy.restore(snapshot.policy)
    state.last_ticket = snapshot.last_ticket
    state.seq = snapshot.seq
    state.at = snapshot.at
    state.clock_offset = snapshot.clock_offset
    for status in state.nodes.values():
        status.desired = snapshot.seq  # an upper bound: at worst an agent reads it once more
    return state


def _reported(node: _NodeSnapshot, agent: _AgentSnapshot) -> Iterator[AnyEntry]:
    """Yield the entries that restore what an agent reported."""
    if agent.accepted:
        yield GeometryAccepted(node.name)
    for name, foreign in agent.foreign.items():
        yield ForeignSeen(node.name, name, foreign)
    for name in agent.evicted:
        yield ForeignEvicted(node.name, name)
    for gpu, reasons in agent.gpu_holds.items():
        yield GpuHeld(node.name, gpu, reasons)
    if node.holds:
        yield NodeHeld(node.name, node.holds)


def _placeholder_model(snapshot: Snapshot) -> GeometryRecord:
    """Return the model of placeholders; its name is longer than the names of all models."""
    longest = max((len(geometry.model) for geometry in snapshot.geometries), default=0)
    profile = ProfileRecord("1g", size=1, compute=1, memory_gb=1, starts=(0,))
    return GeometryRecord("x" * (longest + 1), 1, 1, (profile,), 1)


def _placeholder(first: int) -> str:
    return f" {first}"  # node names never begin with a blank


encode_snapshot = msgspec.json.Encoder().encode
decode_snapshot = msgspec.json.Decoder(Snapshot).decode
