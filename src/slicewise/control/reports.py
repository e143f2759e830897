"""What is told about the whole: pages of things, the cluster, the queue, plans, events.

Bodies and answers as in `wire`, for everything beyond a single allocation, node, tenant or token.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType, field

from slicewise.control.agent_wire import AgentView, ForeignView
from slicewise.control.entries import AnyEntry, Part, Role
from slicewise.control.wire import (
    MAX_GPUS,
    AllocationView,
    Body,
    Limit,
    Moment,
    Name,
    NodeView,
    Priority,
    ProfileName,
    TenantView,
    TokenView,
    View,
)

MAX_MOVES = 200
"""Moves carried out by one request."""

Cursor = Annotated[str | None, Meta(description="Give it as `cursor` to get what follows.")]


class QuotaPatch(Body, frozen=True):
    """Changes of a quota: what is left out stays, null lifts the limit."""

    memory_slices: Limit | UnsetType | None = UNSET
    compute_slices: Limit | UnsetType | None = UNSET
    instances: Limit | UnsetType | None = UNSET
    requests_per_second: Annotated[float, Meta(gt=0, le=1e6)] | UnsetType | None = UNSET
    max_priority: Priority | UnsetType | None = UNSET


class TenantPatch(Body, frozen=True):
    """Changes of a tenant."""

    quota: QuotaPatch


class MoveBody(Body, frozen=True, kw_only=True):
    """One instance of an allocation, where it is, and where it is to go."""

    allocation: Annotated[str, Meta(min_length=1, max_length=64)]
    index: Annotated[int, Meta(ge=0, le=1000)] = 0
    """Which of its instances, from 0."""
    profile: ProfileName
    node: Name
    gpu: Annotated[int, Meta(ge=0, lt=MAX_GPUS)]
    start: Annotated[int, Meta(ge=0, le=64)]
    to_node: Name
    to_gpu: Annotated[int, Meta(ge=0, lt=MAX_GPUS)]
    to_start: Annotated[int, Meta(ge=0, le=64)]


class MovesBody(Body, frozen=True):
    """Moves to make, in order, all or none: those of a plan."""

    moves: Annotated[tuple[MoveBody, ...], Meta(min_length=1, max_length=MAX_MOVES)]


class AllocationPage(View, frozen=True):
    """Some of the allocations."""

    allocations: tuple[AllocationView, ...]
    next: Cursor
    total: int | None = None
    """How many there are on all pages; null for those that ended, which are not counted."""


class NodePage(View, frozen=True):
    """Some of the nodes, by name."""

    nodes: tuple[NodeView, ...]
    next: Cursor


class TenantPage(View, frozen=True):
    """Some of the tenants, by name."""

    tenants: tuple[TenantView, ...]
    next: Cursor


class TokenPage(View, frozen=True):
    """Some of the tokens, by id."""

    tokens: tuple[TokenView, ...]
    next: Cursor


class QueuePage(View, frozen=True):
    """Those who wait, in the order in which they are served."""

    waiting: int
    """How many there are in all; of one's own, for those who see only these."""
    allocations: tuple[AllocationView, ...]
    next: Cursor


class InstanceView(View, frozen=True):
    """An instance on a GPU."""

    profile: str
    start: int
    size: int
    allocation: str | None
    """Null where it is somebody else's."""
    tenant: str | None
    phase: str | None = None
    """On a node with an agent: how far it has come; `foreign` or `stray` if it is nobody's."""
    memory_used: int | None = None
    """Bytes, where the agent has said so."""


class GpuView(View, frozen=True):
    """A GPU, slice by slice."""

    node: str
    gpu: int
    """Its index on its node."""
    mask: str
    """Its slices, slice 0 first: 1 is taken."""
    fragmentation: int
    """F, windows blocked in part."""
    instances: tuple[InstanceView, ...]
    holds: dict[str, str] = field(default_factory=dict)
    """Why it takes no new instances for itself, by keyword."""


class GpuDetail(GpuView, frozen=True):
    """A GPU, and what the agent of its node says about it."""

    uuid: str | None = None
    mig: bool | None = None
    foreign: tuple[ForeignView, ...] = ()
    """Instances on it that are no allocation's, for those who see everything."""
    quarantined: int = 0
    """Instances that could not be destroyed, though their allocations have ended."""
    temperature: float | None = None
    """Degrees Celsius, as far as this process knows."""
    memory_used: int | None = None
    """Bytes, as far as this process knows."""


class NodeDetail(NodeView, frozen=True, kw_only=True):
    """A node and its GPUs."""

    devices: tuple[GpuDetail, ...]
    agent: AgentView | None = None


class Fragmentation(View, frozen=True):
    """F in both readings: windows blocked in part, and windows with any slice taken."""

    partial: float
    overlap: float


class ModelUse(View, frozen=True):
    """What the GPUs of one model have left."""

    model: str
    gpus: int
    schedulable_gpus: int
    slices: int
    free_slices: int
    placements: dict[str, int]
    """By profile: the windows open to it on schedulable GPUs, each start counted."""
    fits: dict[str, int]
    """By profile: the schedulable GPUs that could take one now."""


class ClusterView(View, frozen=True):
    """The cluster as a whole."""

    seq: int
    """The journal's last entry that this reflects."""
    history: str
    """Which history the journal tells; another one after a restore."""
    policy: str
    gpus: int
    active_gpus: int
    """With at least one instance."""
    slices: int
    free_slices: int
    instances: int
    waiting: int
    fragmentation: Fragmentation
    """Mean of a GPU."""
    models: tuple[ModelUse, ...]
    nodes: tuple[NodeView, ...]
    devices: tuple[GpuView, ...] | None
    """Every GPU, where asked for."""


class Spot(View, frozen=True):
    """A place on a GPU."""

    node: str
    gpu: int
    start: int


class Cost(View, frozen=True):
    """What a placement costs the rest."""

    fragmentation: Fragmentation
    """By how much F of its GPU grows."""
    placements_lost: int
    """Windows of any profile that are open on its GPU now and would not be any more."""


class Alternative(View, frozen=True):
    """Another place, and why it lost."""

    node: str
    gpu: int
    model: str
    profile: str
    start: int
    mask: str
    alike: int
    """GPUs in this very state, this one the first of them."""
    cost: Cost
    why: str


class PolicyChoice(View, frozen=True):
    """Where another policy would go."""

    policy: str
    spot: Spot | None
    cost: Cost | None
    detail: str
    """Why it would reject, if so."""


class DryRun(View, frozen=True):
    """What would happen to a request, without it happening."""

    outcome: Literal["placed", "queued", "rejected"]
    reason: str | None
    detail: str
    policy: str
    ahead: int
    """Requests that wait already and are served first."""
    instances: tuple[Part, ...]
    cost: Cost | None
    """Of the first instance."""
    alternatives: tuple[Alternative, ...]
    policies: tuple[PolicyChoice, ...]
    seq: int


class PlanView(View, frozen=True):
    """Which instances to move; POST its moves to make them."""

    wanted: str | None
    """What is to fit; null when room is to be won back."""
    budget: int
    found: bool
    fewest: bool
    """Whether no shorter plan exists."""
    moves: tuple[MoveBody, ...]
    moved_slices: int
    room_before: int | None
    room_after: int | None
    fits: Spot | None
    seq: int


class EventView(View, frozen=True):
    """An entry of the journal, as it is told."""

    seq: int
    at: Moment
    actor: str
    """The id of the token that asked, or what in the service did."""
    kind: str
    tenant: str | None
    subject: str
    entry: AnyEntry
    role: Role | None = None
    """What the token that asked allows, and the note it was issued with, where that is known."""
    note: str = ""
    origin: str = ""
    """The address from which it was asked for; empty where the service did it, and for tenants."""


class EventPage(View, frozen=True):
    """Some of the journal, the newest first."""

    events: tuple[EventView, ...]
    next: Cursor


class WhoView(View, frozen=True):
    """Who the bearer of a token is."""

    id: str
    role: Role
    tenant: str | None
    node: str | None
    note: str
    expires_at: Moment | None


class ProfileView(View, frozen=True):
    """A profile of a GPU model."""

    name: str
    size: int
    compute: int
    memory_gb: float
    starts: tuple[int, ...]
    variant_of: str | None
    uses: dict[str, int] = field(default_factory=dict)
    """What it takes of the model's budgets, beyond compute."""


class ModelView(View, frozen=True):
    """A GPU model."""

    name: str
    aliases: tuple[str, ...]
    memory_gb: float
    slices: int
    compute_slices: int
    in_use: bool
    refusal: str | None
    """Why it cannot be scheduled, if so."""
    profiles: tuple[ProfileView, ...]
    budgets: dict[str, int] = field(default_factory=dict)
    """What the instances of one GPU share beyond slices and compute, and how much there is."""


class ModelList(View, frozen=True):
    """The GPU models known."""

    models: tuple[ModelView, ...]


class PolicyView(View, frozen=True):
    """A policy."""

    name: str
    summary: str
    in_use: bool


class PolicyList(View, frozen=True):
    """The policies known."""

    policies: tuple[PolicyView, ...]


class Health(View, frozen=True):
    """The process is alive."""

    status: Literal["ok"]


class Readiness(View, frozen=True):
    """Whether this process can do its part."""

    ready: bool
    role: Literal["leading", "following", "starting", "stopping"]
    leader: str | None
    """Where writes go."""
    seq: int
    """The last entry known here."""
    problems: tuple[str, ...]
    history: str = ""
    """Which history the journal tells; events behind HISTORY-SEQ are those to come."""
    warnings: tuple[str, ...] = ()
    """What should be looked at though it keeps the process from nothing."""
