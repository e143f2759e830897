"""What goes over the wire: the bodies of requests and answers, shared by service and client.

The same types make the OpenAPI document. Fields nobody knows are refused, by name.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated

import msgspec
from msgspec import Meta

from slicewise.control.entries import AllocationState, Cause, NodePhase, Part, Role
from slicewise.control.hardware import Phase

MAX_COUNT = 64
"""Instances one allocation may have."""
MAX_BATCH = 100
"""Allocations created by one request."""
MAX_BATCH_INSTANCES = 256
"""Instances that all of them may have together: they are decided in one go."""
MAX_PAGE = 1000
MAX_GPUS = 1024
"""GPUs of one node."""

Name = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$(?!\n)",  # `$` alone lets a newline follow
        description="Letters, digits, '.', '_' and '-', beginning with a letter or digit.",
    ),
]
ProfileName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+_-]{0,62}$(?!\n)")]
ModelName = Annotated[str, Meta(min_length=1, max_length=64)]
Text = Annotated[str, Meta(max_length=256)]
LabelKey = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,62}$(?!\n)")]
Labels = Annotated[dict[LabelKey, Text], Meta(max_length=16)]
Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Priority = Annotated[int, Meta(ge=-100, le=100)]
Duration = Annotated[float, Meta(gt=0, le=10 * 365 * 86400)]
Limit = Annotated[int, Meta(ge=0, le=1 << 40)]
Moment = Annotated[str, Meta(description="RFC 3339, UTC.")]


class Body(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    gc=False,
):
    """The body of a request."""


class View(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The body of an answer."""


class NeedBody(Body, frozen=True):
    """At least this much compute and memory, on whatever profile fits best."""

    compute: Annotated[int, Meta(ge=0, le=64)]
    memory_gb: Annotated[float, Meta(ge=0, le=10_000)]


class AllocationBody(Body, frozen=True):
    """An allocation to create: a profile or a need, and on what terms."""

    profile: ProfileName | None = None
    need: NeedBody | None = None
    models: Annotated[tuple[ModelName, ...], Meta(max_length=16)] = ()
    """GPU models it may run on; any unless given."""
    count: Count = 1
    """How many such instances; all or none."""
    priority: Priority = 0
    """In the queue: higher first."""
    wait_seconds: Annotated[float, Meta(ge=0, le=30 * 86400)] = 0
    """How long it may wait in the queue; 0 is not at all."""
    lease_seconds: Duration | None = None
    """It ends by itself after this time."""
    labels: Labels = {}
    tenant: Name | None = None
    """For whom; a tenant's own token speaks for that tenant only."""


class BatchBody(Body, frozen=True):
    """Several allocations, all or none; they cannot wait."""

    allocations: Annotated[tuple[AllocationBody, ...], Meta(min_length=1, max_length=MAX_BATCH)]


class NodeBody(Body, frozen=True):
    """A node to register."""

    name: Name
    model: ModelName
    gpus: Annotated[int, Meta(ge=1, le=MAX_GPUS)]
    labels: Labels = {}


class DrainBody(Body, frozen=True):
    """How to drain a node."""

    evict: bool = False
    """End the allocations that are on it, instead of waiting until they end."""


class Quota(Body, frozen=True):
    """What a tenant may hold at a time, and how fast it may ask; null is no limit."""

    memory_slices: Limit | None = None
    compute_slices: Limit | None = None
    instances: Limit | None = None
    requests_per_second: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    max_priority: Priority | None = None


class TenantBody(Body, frozen=True):
    """A tenant to create."""

    name: Name
    quota: Quota = Quota()


class TokenBody(Body, frozen=True):
    """A token to issue."""

    role: Role
    tenant: Name | None = None
    node: Name | None = None
    note: Text = ""
    expires_in_seconds: Duration | None = None


class RotateBody(Body, frozen=True):
    """How a token is replaced by another with the same rights."""

    overlap_seconds: Annotated[float, Meta(ge=0, le=90 * 86400)] = 3600
    """How long the old one is still valid."""
    expires_in_seconds: Duration | None = None
    """When the new one expires; unless given, when the old one would have."""


class WaitView(View, frozen=True):
    """How an allocation waits."""

    position: int | None
    """Its place in the queue, 1 is next."""
    reason: str
    detail: str
    deadline: Moment | None


class WantView(View, frozen=True):
    """What was asked for."""

    profile: str | None
    need: NeedBody | None
    models: tuple[str, ...]


class PartView(Part, frozen=True, forbid_unknown_fields=False):
    """An instance of an allocation; with an agent on its node, also how to use it."""

    env: str = ""
    """The variable that shows a process this instance, once it is active."""
    cdi: str = ""
    """Its name for container runtimes, once it is active."""


class AllocationView(View, frozen=True, omit_defaults=True):
    """An allocation; where it has one instance, that instance's place stands at the top as well.

    What only an agent can tell is left out where there is none.
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
    """When its lease is over."""
    ended_at: Moment | None
    cause: Cause | None
    """Why it ended."""
    waiting: WaitView | None
    detail: str | None = None
    """What went wrong, if it failed."""
    phase: Phase | None = None
    """With one instance, on a node with an agent: how far it has come."""
    uuid: str | None = None
    gpu_uuid: str | None = None
    attempts: int | None = None
    env: str | None = None
    cdi: str | None = None


class BatchView(View, frozen=True):
    """Allocations created together."""

    allocations: tuple[AllocationView, ...]


class MovesView(View, frozen=True):
    """How many moves were made."""

    moves: int


class NodeView(View, frozen=True):
    """A node."""

    name: str
    model: str
    gpus: int
    state: NodePhase
    instances: int
    slices: int
    free_slices: int
    labels: dict[str, str]
    managed: bool = False
    """Whether an agent makes and destroys its instances."""
    holds: dict[str, str] = msgspec.field(default_factory=dict)
    """Why it takes no new instances although it is ready, by keyword."""
    held_gpus: int = 0
    """How many of its GPUs take no new instances, for reasons of their own."""
    foreign: int = 0
    """Instances on it that are no allocation's."""


class UsageView(View, frozen=True):
    """What a tenant holds."""

    memory_slices: int
    compute_slices: int
    instances: int
    waiting: int


class TenantView(View, frozen=True):
    """A tenant."""

    name: str
    quota: Quota
    usage: UsageView


class TokenView(View, frozen=True):
    """A token, without its secret."""

    id: str
    role: Role
    tenant: str | None
    node: str | None
    note: str
    expires_at: Moment | None


class NewTokenView(TokenView, frozen=True):
    """A token just issued; this is the only time that its secret is shown."""

    token: str


class ClockView(View, frozen=True):
    """The service's own time, beside the wall clock of the process that answers."""

    service_time: Moment
    """What leases, deadlines and the journal go by."""
    wall_time: Moment
    step_seconds: float
    """By how much the wall clock is ahead; behind, if negative."""
    held: bool
    """Whether that is a step, which service time does not follow."""


class ClockStepBody(Body, frozen=True):
    """The step to accept, as it was seen: refused if the wall clock is elsewhere by now."""

    step_seconds: Annotated[float, Meta(ge=-1e10, le=1e10)]


class ClockStepView(View, frozen=True):
    """A step that was accepted: service time before and after it."""

    before: Moment
    after: Moment
    step_seconds: float


class Problem(View, frozen=True, omit_defaults=True):
    """What went wrong, after RFC 9457."""

    type: str
    title: str
    status: int
    detail: str
    reason: str | None = None
    """For a rejected allocation: capacity, fragmented, quota or unknown profile."""
    index: int | None = None
    """Which allocation of a batch was the trouble, from 0."""
    field: str | None = None
    """Where in the body, if the body was wrong."""
    leader: str | None = None
    """Where to go instead, if this process does not take writes."""


def moment(seconds: float | None) -> str | None:
    """A moment in words, to the millisecond."""
    return None if seconds is None else _in_words(seconds)


@lru_cache(maxsize=1024)  # what happens in one batch happens at one moment
def _in_words(seconds: float) -> str:
    text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return text.removesuffix("+00:00") + "Z"


encode = msgspec.json.Encoder().encode
