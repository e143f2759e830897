"""The views of the API, made from the state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import msgspec

from slicewise.api.agents import DesiredInstance, DesiredView, Eviction, ForeignView
from slicewise.api.allocations import AllocationView, NeedBody, PartView, WaitView, WantView
from slicewise.api.base import moment
from slicewise.api.events import EventView
from slicewise.api.nodes import NodeView
from slicewise.api.tenants import Quota, TenantView, TokenView, UsageView
from slicewise.control.agent_state import evictions
from slicewise.control.identities import role_of
from slicewise.control.state import NodeStatus, State, TenantStatus
from slicewise.control.status import AgentStatus
from slicewise.journal.agent_entries import Foreign, Phase
from slicewise.journal.entries import (
    AllocationRecord,
    Cause,
    Part,
    Role,
    Row,
    TenantRef,
    TokenIssued,
    Want,
    concerns,
    kind,
)

SERVICE_ACTORS = frozenset({"clock", "extender", "queue", "rehearsal", "service"})
"""The actors in the journal that are parts of the service, not tokens."""

_EXPLAINED = (Cause.FAILED, Cause.RECLAIMED)
"""Causes that come with a sentence."""


def allocation_view(state: State, record: AllocationRecord) -> AllocationView:
    """Return the view of an allocation, ended or not."""
    first = record.parts[0] if record.parts else None
    want = record.want
    waiting = None
    shown = record.state
    if shown == "queued":
        number = state.tickets.get(record.id)
        waiting = WaitView(
            position=None if number is None else state.waiting.position(number) + 1,
            reason=record.reason,
            detail=record.detail,
            deadline=moment(record.deadline),
        )
    view = AllocationView(
        id=record.id,
        state=shown,
        tenant=record.tenant.name,
        node=first.node if first else None,
        gpu=first.gpu if first else None,
        model=first.model if first else None,
        profile=first.profile if first else want.profile,
        start=first.start if first else None,
        size=first.size if first else None,
        count=record.count,
        instances=cast("tuple[PartView, ...]", record.parts),
        wanted=want_view(want),
        priority=record.priority,
        labels=record.labels,
        requested_at=moment(record.requested) or "",
        placed_at=moment(record.placed),
        ends_at=moment(record.ends),
        ended_at=moment(record.ended),
        cause=record.cause,
        waiting=waiting,
        lease_seconds=record.lease,
        preemptible=record.preemptible,
        expected_seconds=record.expected_seconds,
        detail=record.detail if record.cause in _EXPLAINED else None,
        reclaimed_at=moment(record.reclaimed_at),
        replaces=record.replaces or None,
        reclaims=record.reclaims,
    )
    if first is None or (first.phase is None and len(record.parts) == 1):
        return view
    return _with_phases(view, record)


def want_view(want: Want) -> WantView:
    """Return the view of what was requested."""
    need = None
    if want.profile is None:
        need = NeedBody(compute=want.compute or 0, memory_gb=want.memory_gb or 0)
    return WantView(profile=want.profile, need=need, models=want.models)


def _with_phases(view: AllocationView, record: AllocationRecord) -> AllocationView:
    """Add the details of instances on managed nodes to a view."""
    parts = tuple(part if part.phase is None else part_view(part) for part in record.parts)
    only = parts[0] if len(parts) == 1 else None
    if not isinstance(only, PartView):
        return msgspec.structs.replace(view, instances=parts)
    return msgspec.structs.replace(
        view,
        instances=parts,
        phase=only.phase,
        uuid=only.uuid,
        gpu_uuid=only.gpu_uuid,
        attempts=only.attempts,
        env=only.env,
        cdi=only.cdi,
    )


def part_view(part: Part) -> PartView:
    """Return the view of an instance; once it is active, with the settings to use it."""
    usable = part.phase is Phase.ACTIVE
    return PartView(
        **msgspec.structs.asdict(part),
        env=f"CUDA_VISIBLE_DEVICES={part.uuid}" if usable else "",
        cdi=f"slicewise.dev/mig={part.uuid}" if usable else "",
    )


def node_view(state: State, node: NodeStatus, taken: int | None = None) -> NodeView:
    """Return the view of a node; ``taken`` is its number of used slices, if the caller knows it."""
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


def tenant_view(tenant: TenantStatus) -> TenantView:
    """Return the view of a tenant."""
    quota, usage = tenant.quota, tenant.usage
    return TenantView(
        id=tenant.ref.id,
        name=tenant.name,
        quota=Quota(
            memory_slices=quota.memory_slices,
            compute_slices=quota.compute_slices,
            instances=quota.instances,
            requests_per_second=quota.requests_per_second,
            max_priority=quota.max_priority,
            weight=quota.weight,
            guarantee=quota.guarantee,
            default_lease_seconds=quota.default_lease_seconds,
            max_lease_seconds=quota.max_lease_seconds,
        ),
        usage=UsageView(
            memory_slices=usage.memory_slices,
            compute_slices=usage.compute_slices,
            instances=usage.instances,
            waiting=tenant.waiting,
        ),
    )


def event_view(
    tokens: Mapping[str, TokenIssued], row: Row, tenant: TenantRef | None = None
) -> EventView:
    """Return the view of a journal row for callers that see everything, or for a tenant.

    ``tokens`` gives the role and note of the actor. Digests of tokens are never shown. Tenants do
    not see the tokens of operators, nor any client's address.
    """
    entry, actor, origin = row.entry, row.actor, row.origin
    if isinstance(entry, TokenIssued):
        entry = msgspec.structs.replace(entry, digest="")
    token = tokens.get(actor)
    role = role_of(actor) if token is None else token.role
    if tenant is not None:
        origin = ""
        # An identity in the role of a tenant acts for its own tenant only, which is this one.
        own = token.tenant == tenant if token is not None else role is Role.TENANT
        if not own:
            token, role = None, None
            actor = actor if actor in SERVICE_ACTORS else "operator"
    concerned, subject = concerns(row.entry)
    return EventView(
        seq=row.seq,
        at=moment(row.at) or "",
        actor=actor,
        role=role,
        note="" if token is None else token.note,
        origin=origin,
        kind=kind(entry),
        tenant=None if concerned is None else concerned.name,
        tenant_id=None if concerned is None else concerned.id,
        subject=subject,
        entry=entry,
    )


def foreign_view(name: str, found: Foreign, evicting: bool) -> ForeignView:
    """Return the view of a foreign instance."""
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


def desired_view(state: State, node: NodeStatus, agent: AgentStatus) -> DesiredView:
    """Return the desired state of a managed node."""
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
                notice=moment(record.reclaimed_at) or "",
            )
        )
    evict = tuple(
        Eviction(gpu=agent.gpus[one.gpu], uuid=one.uuid, profile=one.profile, start=one.start)
        for one in evictions(agent)
    )
    return DesiredView(seq=state.seq, instances=tuple(instances), evict=evict)


def token_view(token: TokenIssued) -> TokenView:
    """Return the view of a token, without its secret."""
    return TokenView(
        id=token.token,
        role=token.role,
        tenant=None if token.tenant is None else token.tenant.name,
        node=token.node,
        note=token.note,
        expires_at=moment(token.expires),
    )
