"""Allocations, the queue, and dry runs."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from slicewise.api.base import (
    Body,
    Cursor,
    Duration,
    Fragmentation,
    Labels,
    ModelName,
    Moment,
    Name,
    Priority,
    ProfileName,
    Spot,
    View,
)
from slicewise.api.nodes import ReservedView
from slicewise.journal.agent_entries import Phase
from slicewise.journal.entries import AllocationState, Cause, Part

MAX_COUNT = 64
"""Instances of one allocation."""
MAX_BATCH = 100
"""Allocations of one batch request."""
MAX_BATCH_INSTANCES = 256
"""Instances of one batch request, over all its allocations: they are decided together."""

Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]


class NeedBody(Body, frozen=True):
    """At least this much compute and memory; the service picks the profile."""

    compute: Annotated[int, Meta(ge=0, le=64)]
    memory_gb: Annotated[float, Meta(ge=0, le=10_000)]


class AllocationBody(Body, frozen=True):
    """An allocation to create, by profile or by need."""

    profile: ProfileName | None = None
    need: NeedBody | None = None
    models: Annotated[tuple[ModelName, ...], Meta(max_length=16)] = ()
    """GPU models it may run on; any unless given."""
    count: Count = 1
    """Number of instances; all are placed or none."""
    priority: Priority = 0
    """Higher priorities of a tenant are served first; see its `max_priority`."""
    wait_seconds: Annotated[float, Meta(ge=0, le=30 * 86400)] = 0
    """How long it may wait in the queue; 0 means it does not wait."""
    lease_seconds: Duration | None = None
    """The allocation ends by itself after this time; by default the tenant's lease."""
    preemptible: bool = False
    """Whether the service may end it so that another tenant gets its guarantee."""
    expected_seconds: Duration | None = None
    """The expected time in use, as a hint: the allocation does not end after it."""
    labels: Labels = field(default_factory=dict)
    tenant: Name | None = None
    """The owner; a tenant's token may only name its own tenant."""


class ExtendBody(Body, frozen=True):
    """The extension of a lease."""

    lease_seconds: Duration
    """The time from now until the lease ends. A lease never gets shorter."""


class BatchBody(Body, frozen=True):
    """Several allocations, all or none; they cannot wait."""

    allocations: Annotated[tuple[AllocationBody, ...], Meta(min_length=1, max_length=MAX_BATCH)]


class WindowView(View, frozen=True):
    """A reserved window: a placement on a GPU that is kept for a queued request."""

    node: str
    gpu: int
    profile: str
    start: int
    opens_at: Moment | None
    """When the last instance in it ends; null if that is unknown."""
    blockers: int
    """The number of instances that are still in it."""


class LineView(View, frozen=True):
    """A line of the queue: the requests of one tenant for the same instances."""

    tenant: str
    wanted: WantView
    count: int
    waiting: int
    """The requests in the line."""
    oldest: Moment
    """When the oldest of them was made."""
    first: str
    """The allocation that is served next."""
    reason: str
    detail: str
    expected_at: Moment | None
    """When the windows of the next request open at the latest; null if that is unknown."""
    share: float
    """The tenant's dominant share of the GPU models that could serve it, divided by its weight."""
    within_guarantee: bool
    reserved: tuple[WindowView, ...]
    """The windows of the line, the first to open first; each serves the next request."""


class RepackView(View, frozen=True):
    """Whether moves of other instances would make room for a request."""

    moves: int | None
    """The number of moves of the shortest plan known; null if none is known."""
    room_at: Spot | None
    """Where the plan makes room."""
    detail: str


class WaitView(View, frozen=True):
    """The state of an allocation in the queue."""

    position: int | None
    """Its place in its line, the tenant's queued requests for the same instances; 1 is next."""
    reason: str
    """Why it waits now: quota, capacity, fragmented, reserved, own reservation or held back."""
    detail: str
    deadline: Moment | None
    others_ahead: bool | None = None
    """Whether requests of other tenants come first in fair order."""
    reserved: tuple[WindowView, ...] = ()
    """The windows that are reserved for it."""
    expected_at: Moment | None = None
    """When these windows open at the latest, if that is known."""
    kept_from: tuple[ReservedView, ...] = ()
    """Open windows that are reserved for others, if it waits for that reason; at most four."""
    repack: RepackView | None = None
    """What moves of instances would do; only with `plan=true`, and if it waits for room."""


class WantView(View, frozen=True):
    """What was requested."""

    profile: str | None
    need: NeedBody | None
    models: tuple[str, ...]


class PartView(Part, frozen=True, forbid_unknown_fields=False):
    """An instance of an allocation; on a node with an agent, also how to use it."""

    env: str = ""
    """The environment variable that gives a process this instance, once it is active."""
    cdi: str = ""
    """Its CDI device name for container runtimes, once it is active."""


class AllocationView(View, frozen=True, omit_defaults=True):
    """An allocation; the placement of its first instance is repeated at the top level.

    Fields that only an agent can report are left out on nodes without one.
    """

    id: str
    state: AllocationState
    tenant: str
    node: str | None
    gpu: int | None
    model: str | None
    profile: str | None
    start: int | None
    size: int | None
    count: int
    instances: tuple[PartView, ...]
    wanted: WantView
    priority: int
    labels: dict[str, str]
    requested_at: Moment
    placed_at: Moment | None
    ends_at: Moment | None
    """When its lease expires."""
    ended_at: Moment | None
    cause: Cause | None
    """Why it ended."""
    waiting: WaitView | None
    lease_seconds: float | None = None
    """The length of its lease, which begins when it is placed."""
    preemptible: bool = False
    expected_seconds: float | None = None
    detail: str | None = None
    """What went wrong if it failed, or why it was reclaimed."""
    reclaimed_at: Moment | None = None
    """When it ends, or ended, because another tenant claims its guarantee."""
    replaces: str | None = None
    """The reclaimed allocation that it replaces."""
    reclaims: int = 0
    """How often it and the allocations it replaces were reclaimed."""
    phase: Phase | None = None
    """The phase of its instance, if it has one instance on a node with an agent."""
    uuid: str | None = None
    gpu_uuid: str | None = None
    attempts: int | None = None
    env: str | None = None
    cdi: str | None = None


class BatchView(View, frozen=True):
    """Allocations created by one batch request."""

    allocations: tuple[AllocationView, ...]


class AllocationPage(View, frozen=True):
    """A page of allocations."""

    allocations: tuple[AllocationView, ...]
    next: Cursor
    total: int | None = None
    """The number on all pages; null for ended allocations, which are not counted."""


class QueuePage(View, frozen=True):
    """The lines of the queue in fair order, and a page of queued requests, oldest first."""

    waiting: int
    """The length of the queue; for a tenant's token, the number of its own entries."""
    lines: tuple[LineView, ...]
    """At most 100 lines, those that are served first; for a tenant's token, its own."""
    allocations: tuple[AllocationView, ...]
    next: Cursor


class Cost(View, frozen=True):
    """What a placement costs the rest of the cluster."""

    fragmentation: Fragmentation
    """The increase of F on its GPU."""
    placements_lost: int
    """Windows of any profile on its GPU that are open now and would be closed."""


class Alternative(View, frozen=True):
    """Another placement, and why it was not chosen."""

    node: str
    gpu: int
    model: str
    profile: str
    start: int
    mask: str
    alike: int
    """The number of GPUs in the same state; this one is the first of them."""
    cost: Cost
    why: str


class PolicyChoice(View, frozen=True):
    """The placement another policy would choose."""

    policy: str
    spot: Spot | None
    cost: Cost | None
    detail: str
    """Why it would reject the request, if it would."""


class DryRun(View, frozen=True):
    """The outcome a request would have now."""

    outcome: Literal["placed", "queued", "rejected"]
    reason: str | None
    detail: str
    policy: str
    table: str | None
    """The table by which it would be placed, under a policy that rehearses tables."""
    ahead: int
    """The tenant's requests for the same instances that wait already."""
    repack: RepackView | None
    """What moves of instances would do; only with `plan=true`, and if there is no room."""
    instances: tuple[Part, ...]
    cost: Cost | None
    """The cost of the first instance."""
    alternatives: tuple[Alternative, ...]
    policies: tuple[PolicyChoice, ...]
    seq: int
