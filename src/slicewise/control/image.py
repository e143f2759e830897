"""An image of the state: everything the journal said up to an entry, in one piece.

It is restored by way of entries, so that there is one way in which a state comes about. What
decides later, down to which GPU ids a new node gets, is the same as before.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from slicewise.control.entries import (
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
    Overtaken,
    ProfileRecord,
    Queued,
    QuotaRecord,
    Row,
    Seconds,
    TenantSet,
    TokenIssued,
    TurnTaken,
)
from slicewise.control.geometries import record_of
from slicewise.control.hardware import (
    AgentJoined,
    Foreign,
    ForeignEvicted,
    ForeignSeen,
    GeometryAccepted,
    GpuHeld,
    NodeHeld,
)
from slicewise.control.standings import AgentStanding
from slicewise.control.state import State


class _AgentImage(msgspec.Struct, frozen=True):
    joined: AgentJoined
    accepted: bool
    gpu_holds: dict[int, dict[str, str]]
    foreign: dict[str, Foreign]
    evicted: tuple[str, ...]


class _NodeImage(msgspec.Struct, frozen=True):
    name: str
    model: str
    first: int
    gpus: int
    phase: NodePhase
    labels: dict[str, str]
    agent: _AgentImage | None = None
    holds: dict[str, str] = {}


class _Waiting(msgspec.Struct, frozen=True):
    number: int
    overtaken: int


class Image(msgspec.Struct, frozen=True):
    """What a state consists of."""

    seq: int
    at: Seconds
    accepted: Seconds
    geometries: tuple[GeometryRecord, ...]
    nodes: tuple[_NodeImage, ...]
    spare: tuple[tuple[int, int], ...]
    """GPU ids that removed nodes left, as first and count, in the order they were left."""
    tenants: dict[str, QuotaRecord]
    tokens: tuple[TokenIssued, ...]
    allocations: tuple[AllocationRecord, ...]
    waiting: dict[str, _Waiting]
    """By waiting allocation."""
    last_ticket: int
    turn: int
    leaving: tuple[AllocationRecord, ...] = ()
    since: dict[str, int] | None = None
    """By tenant: the entry that created it. Older versions did not say so: see `writer.load`."""


def image_of(state: State) -> Image:
    """The state as it is."""
    return Image(
        seq=state.seq,
        at=state.at,
        accepted=state.accepted,
        geometries=tuple(record_of(geometry) for geometry in state.geometries.values()),
        nodes=tuple(
            _NodeImage(
                node.name,
                node.geometry.model,
                node.gpus.start,
                len(node.gpus),
                node.phase,
                node.labels,
                None if node.agent is None else _agent_image(node.name, node.agent),
                node.holds,
            )
            for node in state.nodes.values()
        ),
        spare=tuple((ids.start, len(ids)) for ids in state.cluster.spare_gpus),
        tenants={tenant.name: tenant.quota for tenant in state.tenants.values()},
        tokens=tuple(state.tokens.values()),
        allocations=tuple(state.allocations.values()),
        waiting={
            identity: _Waiting(number, state.waiting.overtaken(number))
            for identity, number in state.tickets.items()
        },
        last_ticket=state.last_ticket,
        turn=state.turn,
        leaving=tuple(state.leaving.values()),
        since={tenant.name: tenant.since for tenant in state.tenants.values()},
    )


def _agent_image(node: str, agent: AgentStanding) -> _AgentImage:
    return _AgentImage(
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


def restore(image: Image, state: State) -> State:
    """Bring a fresh state to where the image was made."""

    def enter(entry: AnyEntry) -> None:
        state.apply(Row(state.seq + 1, 0, "", entry))

    for geometry in image.geometries:
        enter(ModelEntered(geometry))
    # Stand-ins take all GPU ids there ever were, in order. Removing one leaves its ids to the
    # node that is added next, so every node gets its own again, and the rest stays spare.
    stand_ins = sorted([*((node.first, node.gpus) for node in image.nodes), *image.spare])
    model = _stand_in_model(image)
    if stand_ins:
        enter(ModelEntered(model))
    for first, gpus in stand_ins:
        enter(NodeAdded(_stand_in(first), model.model, gpus, first))
    for node in image.nodes:
        enter(NodeRemoved(_stand_in(node.first)))
        enter(NodeAdded(node.name, node.model, node.gpus, node.first, node.labels))
        if node.agent is not None:
            enter(node.agent.joined)
    for first, _ in image.spare:
        enter(NodeRemoved(_stand_in(first)))
    if stand_ins:
        enter(ModelForgotten(model.model))
    for tenant, quota in image.tenants.items():
        enter(TenantSet(tenant, quota))
        state.tenants[tenant].since = (image.since or {}).get(tenant, 0)
    for token in image.tokens:
        enter(token)
    for allocation in image.allocations:
        waits = image.waiting.get(allocation.id)
        enter(Allocated(allocation) if waits is None else Queued(allocation, waits.number))
    enter(Overtaken({waits.number: waits.overtaken for waits in image.waiting.values()}))
    enter(TurnTaken(image.turn))
    for record in image.leaving:
        state.let_leave(record)
    for node in image.nodes:
        if node.agent is not None:
            for entry in _found(node, node.agent):
                enter(entry)
        if node.phase is not NodePhase.READY:
            enter(NodeTurned(node.name, node.phase))
    state.last_ticket = image.last_ticket
    state.seq = image.seq
    state.at = image.at
    state.accepted = image.accepted
    for standing in state.nodes.values():
        standing.desired = image.seq  # or earlier: whoever asks is told once more
    return state


def _found(node: _NodeImage, agent: _AgentImage) -> Iterator[AnyEntry]:
    """What an agent found, entry by entry."""
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


def _stand_in_model(image: Image) -> GeometryRecord:
    """What the GPUs of stand-ins are, by a name that is longer than those of all models."""
    longest = max((len(geometry.model) for geometry in image.geometries), default=0)
    profile = ProfileRecord("1g", size=1, compute=1, memory_gb=1, starts=(0,))
    return GeometryRecord("x" * (longest + 1), 1, 1, (profile,), 1)


def _stand_in(first: int) -> str:
    return f" {first}"  # no node's name begins with a blank


encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(Image).decode
