"""The entries of the journal: everything that ever changes the service's state, one fact each.

A decision is made once, by the writer, and written down as entries. Whoever applies the same
entries in the same order has the same state: the writer after a restart, a standby, `verify`.
Entries therefore say what was decided (this GPU, this start), never what was asked for alone.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, get_args

import msgspec

from slicewise.control.hardware import (
    AgentJoined,
    ForeignEvicted,
    ForeignGone,
    ForeignSeen,
    GeometryAccepted,
    GpuHeld,
    NodeHeld,
    PartTurned,
    Phase,
)
from slicewise.control.records import Entry as Entry
from slicewise.control.records import Record as _Record
from slicewise.control.records import Seconds as Seconds


class ProfileRecord(_Record, frozen=True):
    """A profile of a model, as `core.geometry.Profile` has it."""

    name: str
    size: int
    compute: int
    memory_gb: float
    starts: tuple[int, ...]
    preferred: tuple[int, ...] = ()
    uses: dict[str, int] = msgspec.field(default_factory=dict)
    variant_of: str | None = None


class GeometryRecord(_Record, frozen=True):
    """A GPU model in full, so that the journal can be read without the catalog it came from."""

    model: str
    slices: int
    compute: int
    profiles: tuple[ProfileRecord, ...]
    memory_gb: float = 0
    budgets: dict[str, int] = msgspec.field(default_factory=dict)


class Want(_Record, frozen=True):
    """What a tenant asked for: a profile by name, or a need; on these models or any."""

    profile: str | None = None
    compute: int | None = None
    memory_gb: float | None = None
    models: tuple[str, ...] = ()


class Part(_Record, frozen=True):
    """One instance of an allocation: where it is and what it has.

    It says all of it, so that it can still be read when its node is gone.
    """

    node: str
    gpu: int
    """The GPU's index on its node."""
    model: str
    profile: str
    start: int
    size: int
    compute: int
    memory_gb: float
    phase: Phase | None = None
    """How far it has come; None where its node has no agent, and it is just there."""
    uuid: str = ""
    """Of the MIG device, once it is known."""
    detail: str = ""
    """What the agent says about it, if anything."""
    attempts: int = 0
    """How often its agent has tried in vain."""
    gpu_uuid: str = ""


class QuotaRecord(_Record, frozen=True):
    """What a tenant may hold at a time and how fast it may ask; None is no limit."""

    memory_slices: int | None = None
    compute_slices: int | None = None
    instances: int | None = None
    requests_per_second: float | None = None
    max_priority: int | None = None


class Role(StrEnum):
    """What the bearer of a token may do."""

    ADMIN = "admin"
    """Everything, tenants and tokens included."""
    OPERATOR = "operator"
    """Nodes, and every tenant's allocations."""
    TENANT = "tenant"
    """Its own allocations."""
    AGENT = "agent"
    """Its own node: what should be on it, and reporting what is."""
    READ_ONLY = "read-only"
    """Looking at everything, or at one tenant's things."""


class Cause(StrEnum):
    """Why an allocation ended."""

    RELEASED = "released"
    """It was asked for."""
    LEASE = "lease ended"
    TIMEOUT = "waited too long"
    """Still in the queue at its deadline."""
    EVICTED = "evicted"
    """An operator emptied its node."""
    FAILED = "failed"
    """An instance could not be made, or was lost; the detail says why."""


AllocationState = Literal[
    "queued", "placed", "creating", "active", "releasing", "released", "failed", "cancelled"
]
"""Where an allocation stands; without agents it is queued, placed, released or cancelled."""


class AllocationRecord(_Record, frozen=True):
    """An allocation: what was asked for, where it is, and how it ended, as far as that is known."""

    id: str
    tenant: str
    want: Want
    count: int = 1
    priority: int = 0
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    lease: Seconds | None = None
    """How long it lasts once placed."""
    requested: Seconds = 0
    deadline: Seconds | None = None
    """Until when it may wait in the queue."""
    reason: str = ""
    """While it waits: why, as a word and as a sentence; the sentence also if it failed."""
    detail: str = ""
    placed: Seconds | None = None
    parts: tuple[Part, ...] = ()
    """Its instances; none while it waits."""
    ended: Seconds | None = None
    cause: Cause | None = None

    @property
    def ends(self) -> Seconds | None:
        """When its lease is over."""
        return None if self.lease is None or self.placed is None else self.placed + self.lease

    @property
    def state(self) -> AllocationState:
        """Where it stands, in a word."""
        parts = self.parts
        if not parts:
            return "queued" if self.ended is None else "cancelled"
        if len(parts) == 1 and parts[0].phase is None:  # as most are: no agent, one instance
            return "placed" if self.ended is None else "released"
        if self.ended is not None:
            if self.cause is Cause.FAILED:
                return "failed"
            left = any(part.phase not in (None, Phase.GONE) for part in parts)
            return "releasing" if left else "released"
        phases = {part.phase for part in parts} - {None}
        if Phase.CREATING in phases:
            return "creating"
        return "active" if phases == {Phase.ACTIVE} else "placed"


class ModelEntered(Entry, frozen=True, tag="model-entered"):
    """A GPU model is known from here on."""

    geometry: GeometryRecord


class ModelForgotten(Entry, frozen=True, tag="model-forgotten"):
    """A GPU model is not known any more: no node has it."""

    model: str


class NodeAdded(Entry, frozen=True, tag="node-added"):
    """A node joined; its GPUs have the ids from ``first`` on."""

    node: str
    model: str
    gpus: int
    first: int
    labels: dict[str, str] = msgspec.field(default_factory=dict)


class NodePhase(StrEnum):
    """Whether a node takes new instances."""

    READY = "ready"
    CORDONED = "cordoned"
    """Takes no new instances; what runs there stays."""
    DRAINING = "draining"
    """Takes no new instances and is to become empty."""
    DRAINED = "drained"
    """Empty, and takes no new instances."""


class NodeTurned(Entry, frozen=True, tag="node-turned"):
    """A node went to another phase."""

    node: str
    phase: NodePhase


class NodeRemoved(Entry, frozen=True, tag="node-removed"):
    """A node left for good."""

    node: str


class TenantSet(Entry, frozen=True, tag="tenant-set"):
    """A tenant was created, or given another quota."""

    tenant: str
    quota: QuotaRecord = QuotaRecord()


class TenantRemoved(Entry, frozen=True, tag="tenant-removed"):
    """A tenant left; its tokens are void."""

    tenant: str


class TokenIssued(Entry, frozen=True, tag="token-issued"):
    """A token was made; only its digest is kept."""

    token: str
    """The id by which it is listed and revoked."""
    digest: str
    role: Role
    tenant: str | None = None
    node: str | None = None
    """For an agent: the node it may speak for."""
    note: str = ""
    expires: Seconds | None = None
    replaces: str = ""
    """The token in whose stead it was made, when that was rotated."""


class TokenExpiring(Entry, frozen=True, tag="token-expiring"):
    """A token is void from a moment on: it was rotated, and another takes its place."""

    token: str
    expires: Seconds


class TokenRevoked(Entry, frozen=True, tag="token-revoked"):
    """A token is void."""

    token: str


class Allocated(Entry, frozen=True, tag="allocated"):
    """An allocation was placed as it arrived."""

    allocation: AllocationRecord


class Queued(Entry, frozen=True, tag="queued"):
    """An allocation waits for room."""

    allocation: AllocationRecord
    ticket: int
    """Its number in the queue; numbers only grow."""


class Served(Entry, frozen=True, tag="served"):
    """A waiting allocation was placed."""

    allocation: str
    tenant: str
    parts: tuple[Part, ...]


class Rejected(Entry, frozen=True, tag="rejected"):
    """A request was refused; nothing changed, but it is remembered."""

    tenant: str
    want: Want
    count: int
    reason: str
    detail: str


class Ended(Entry, frozen=True, tag="ended"):
    """An allocation ended, or gave up waiting; holds all that it was, for those who ask later."""

    allocation: AllocationRecord


class Moved(Entry, frozen=True, tag="moved"):
    """An instance of an allocation went to another place."""

    allocation: str
    tenant: str
    index: int
    """Which of its instances."""
    part: Part


class Overtaken(Entry, frozen=True, tag="overtaken"):
    """How often these waiting tickets have been overtaken by now."""

    tickets: dict[int, int]


class TurnTaken(Entry, frozen=True, tag="turn-taken"):
    """A policy that goes round goes on from here, though nothing was placed."""

    turn: int


EARLIEST: Seconds = 946_684_800.0
"""The year 2000: no clock that was ever set shows less."""
LATEST: Seconds = 4_102_444_800.0
"""The year 2100."""


STEP_SECONDS: Seconds = 2.0
"""A wall clock further away from service time than this was set; one that is nearer is followed."""


class ClockSet(Entry, frozen=True, tag="clock-set"):
    """An operator accepted that the wall clock was set: service time goes on from there."""

    by: Seconds
    """How far service time moved; the row itself has the time before that."""


AnyEntry = (
    ModelEntered
    | ModelForgotten
    | NodeAdded
    | NodeTurned
    | NodeRemoved
    | TenantSet
    | TenantRemoved
    | TokenIssued
    | TokenExpiring
    | TokenRevoked
    | Allocated
    | Queued
    | Served
    | Rejected
    | Ended
    | Moved
    | Overtaken
    | TurnTaken
    | ClockSet
    | AgentJoined
    | GeometryAccepted
    | NodeHeld
    | GpuHeld
    | PartTurned
    | ForeignSeen
    | ForeignEvicted
    | ForeignGone
)


class Row(msgspec.Struct, frozen=True, gc=False):
    """An entry in its place in the journal: when, by whom, and from where."""

    seq: int
    at: Seconds
    actor: str
    """The id of the token that asked, or what in the service did."""
    entry: AnyEntry
    origin: str = ""
    """The client's address of the request that caused it; empty for what the service did itself."""


_WITH_RECORD = (Allocated, Ended, Queued)


def concerns(entry: AnyEntry) -> tuple[str | None, str]:
    """Whose business an entry is, and the name or id of what it is about."""
    if isinstance(entry, _WITH_RECORD):  # nearly all are, so this is first
        return entry.allocation.tenant, entry.allocation.id
    match entry:
        case Served(identity, tenant) | Moved(identity, tenant) | PartTurned(identity, tenant):
            return tenant, identity
        case Rejected(tenant):
            return tenant, ""
        case TenantSet(tenant) | TenantRemoved(tenant):
            return tenant, tenant
        case TokenIssued(token, tenant=tenant):
            return tenant, token
        case TokenRevoked(token) | TokenExpiring(token):
            return None, token
        case (
            NodeAdded(node)
            | NodeTurned(node)
            | NodeRemoved(node)
            | AgentJoined(node)
            | GeometryAccepted(node)
            | NodeHeld(node)
            | GpuHeld(node)
            | ForeignSeen(node)
            | ForeignEvicted(node)
            | ForeignGone(node)
        ):
            return None, node
        case ModelEntered(geometry):
            return None, geometry.model
        case ModelForgotten(model):
            return None, model
        case _:
            return None, ""


_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyEntry] = msgspec.json.Decoder(AnyEntry)


def encode(entry: AnyEntry) -> bytes:
    """An entry as JSON."""
    return _encoder.encode(entry)


def decode(data: bytes | str) -> AnyEntry:
    """An entry from its JSON; anything else is refused."""
    return _decoder.decode(data)


_kinds: dict[type[Entry], str] = {
    made: str(made.__struct_config__.tag) for made in get_args(AnyEntry)
}


def kind(entry: AnyEntry) -> str:
    """What kind of entry it is, in a word."""
    return _kinds[type(entry)]
