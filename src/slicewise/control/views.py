"""The state as people and programs see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import msgspec

from slicewise.control.agent_wire import DesiredInstance, DesiredView, Eviction, ForeignView
from slicewise.control.entries import (
    AllocationRecord,
    Cause,
    Part,
    Row,
    TokenIssued,
    concerns,
    kind,
)
from slicewise.control.hardware import Foreign, Phase
from slicewise.control.managed import evictions
from slicewise.control.reports import EventView
from slicewise.control.standings import AgentStanding
from slicewise.control.state import NodeStanding, State, TenantStanding
from slicewise.control.wire import (
    AllocationView,
    NeedBody,
    NodeView,
    PartView,
    Quota,
    TenantView,
    TokenView,
    UsageView,
    WaitView,
    WantView,
    moment,
)

SERVICE_ACTORS = frozenset({"clock", "extender", "queue", "service"})
"""Those in the journal that are no tokens."""


def allocation_view(state: State, record: AllocationRecord) -> AllocationView:
    """An allocation, living or ended."""
    first = record.parts[0] if record.parts else None
    want = record.want
    need = None
    if want.profile is None:
        need = NeedBody(compute=want.compute or 0, memory_gb=want.memory_gb or 0)
    waiting = None
    standing = record.state
    if standing == "queued":
        number = state.tickets.get(record.id)
        waiting = WaitView(
            position=None if number is None else state.waiting.position(number) + 1,
            reason=record.reason,
            detail=record.detail,
            deadline=moment(record.deadline),
        )
    view = AllocationView(
        id=record.id,
        state=standing,
        tenant=record.tenant,
        node=first.node if first else None,
        gpu=first.gpu if first else None,
        model=first.model if first else None,
        profile=first.profile if first else want.profile,
        start=first.start if first else None,
        size=first.size if first else None,
        count=record.count,
        instances=cast("tuple[PartView, ...]", record.parts),
        wanted=WantView(profile=want.profile, need=need, models=want.models),
        priority=record.priority,
        labels=record.labels,
        requested_at=moment(record.requested) or "",
        placed_at=moment(record.placed),
        ends_at=moment(record.ends),
        ended_at=moment(record.ended),
        cause=record.cause,
        waiting=waiting,
    )
    if first is None or (first.phase is None and len(record.parts) == 1):
        return view
    return _in_full(view, record)


def _in_full(view: AllocationView, record: AllocationRecord) -> AllocationView:
    """What an agent has to do with an allocation, added to it."""
    parts = tuple(part if part.phase is None else part_view(part) for part in record.parts)
    detail = record.detail if record.cause is Cause.FAILED else None
    only = parts[0] if len(parts) == 1 else None
    if not isinstance(only, PartView):
        return msgspec.structs.replace(view, instances=parts, detail=detail)
    return msgspec.structs.replace(
        view,
        instances=parts,
        detail=detail,
        phase=only.phase,
        uuid=only.uuid,
        gpu_uuid=only.gpu_uuid,
        attempts=only.attempts,
        env=only.env,
        cdi=only.cdi,
    )


def part_view(part: Part) -> PartView:
    """An instance, with how to use it once it is active."""
    usable = part.phase is Phase.ACTIVE
    return PartView(
        **msgspec.structs.asdict(part),
        env=f"CUDA_VISIBLE_DEVICES={part.uuid}" if usable else "",
        cdi=f"slicewise.dev/mig={part.uuid}" if usable else "",
    )


def node_view(state: State, node: NodeStanding, taken: int | None = None) -> NodeView:
    """A node; ``taken`` are its slices in use, where the caller has counted them."""
    slices = len(node.gpus) * node.geometry.slices
    if taken is None:
        taken = slices - sum(state.cluster.state(gpu).free_slices for gpu in node.gpus)
    return NodeView(
        name=node.name,
        model=node.geometry.model,
        gpus=len(node.gpus),
        state=node.phase,
        instances=node.instances,
        slices=slices,
        free_slices=slices - taken,
        labels=node.labels,
        managed=node.agent is not None,
        holds=node.holds,
        held_gpus=len(node.agent.gpu_holds) if node.agent else 0,
        foreign=len(node.agent.foreign) if node.agent else 0,
    )


def tenant_view(state: State, tenant: TenantStanding) -> TenantView:
    """A tenant."""
    quota, usage = tenant.quota, tenant.usage
    return TenantView(
        name=tenant.name,
        quota=Quota(
            memory_slices=quota.memory_slices,
            compute_slices=quota.compute_slices,
            instances=quota.instances,
            requests_per_second=quota.requests_per_second,
            max_priority=quota.max_priority,
        ),
        usage=UsageView(
            memory_slices=usage.memory_slices,
            compute_slices=usage.compute_slices,
            instances=usage.instances,
            waiting=tenant.waiting,
        ),
    )


def event_view(tokens: Mapping[str, TokenIssued], row: Row, tenant: str | None = None) -> EventView:
    """A row of the journal, as those may see it who see everything, or as this tenant may.

    ``tokens`` are those whose notes are known. The digest of a token stays here. A tenant is not
    told which of the operators' tokens did something to it, nor the address of anyone.
    """
    entry, actor, origin = row.entry, row.actor, row.origin
    if isinstance(entry, TokenIssued):
        entry = msgspec.structs.replace(entry, digest="")
    token = tokens.get(actor)
    if tenant is not None:
        origin = ""
        if token is None or token.tenant != tenant:
            token = None
            actor = actor if actor in SERVICE_ACTORS else "operator"
    whose, subject = concerns(row.entry)
    return EventView(
        seq=row.seq,
        at=moment(row.at) or "",
        actor=actor,
        role=None if token is None else token.role,
        note="" if token is None else token.note,
        origin=origin,
        kind=kind(entry),
        tenant=whose,
        subject=subject,
        entry=entry,
    )


def foreign_view(name: str, found: Foreign, evicting: bool) -> ForeignView:
    """An instance that is no allocation's."""
    return ForeignView(
        name=name,
        gpu=found.gpu,
        uuid=found.uuid,
        profile=found.profile,
        start=found.start,
        size=found.size,
        why="stray" if found.why == "stray" else "foreign",
        blocks=found.blocks,
        evicting=evicting,
    )


def desired_view(state: State, node: NodeStanding, agent: AgentStanding) -> DesiredView:
    """All that should be on a managed node."""
    instances = []
    for identity, index in state.on_node(node):
        record = state.record(identity)
        part = record.parts[index]
        instances.append(
            DesiredInstance(
                allocation=identity,
                index=index,
                gpu=part.gpu_uuid,
                profile=part.profile,
                start=part.start,
                size=part.size,
                wanted="present" if record.ended is None else "absent",
                uuid=part.uuid,
            )
        )
    evict = tuple(
        Eviction(gpu=agent.gpus[one.gpu], uuid=one.uuid, profile=one.profile, start=one.start)
        for one in evictions(agent)
    )
    return DesiredView(seq=state.seq, instances=tuple(instances), evict=evict)


def token_view(token: TokenIssued) -> TokenView:
    """A token, without its secret."""
    return TokenView(
        id=token.token,
        role=token.role,
        tenant=token.tenant,
        node=token.node,
        note=token.note,
        expires_at=moment(token.expires),
    )
