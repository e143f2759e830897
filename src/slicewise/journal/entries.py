"""The entries of the journal, and the records in them.

The command handler makes a decision once and records it as entries. Applying the same entries in
the same order gives the same state: after a restart, on a standby, in `verify`. An entry therefore
holds the decision (a GPU and a start), not only the request.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, get_args

import msgspec

from slicewise.journal.agent_entries import (
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
from slicewise.journal.lease_entries import LeaseEnding, LeaseExtended
from slicewise.journal.policy_entries import PolicyChosen
from slicewise.journal.queue_entries import Reserved as Reserved
from slicewise.journal.queue_entries import WindowRecord as WindowRecord
from slicewise.journal.reclaim_entries import GpuRef, HeldBack, Reclaiming
from slicewise.journal.records import Entry as Entry
from slicewise.journal.records import QuotaRecord as QuotaRecord
from slicewise.journal.records import Record as _Record
from slicewise.journal.records import Seconds as Seconds
from slicewise.journal.records import TenantRef as TenantRef
from slicewise.journal.records import Want as Want


class ProfileRecord(_Record, frozen=True):
    """A profile of a GPU model; see `core.geometry.Profile`."""

    name: str
    size: int
    compute: int
    memory_gb: float
    starts: tuple[int, ...]
    preferred: tuple[int, ...] = ()
    uses: dict[str, int] = msgspec.field(default_factory=dict)
    variant_of: str | None = None


class GeometryRecord(_Record, frozen=True):
    """A complete GPU model, which makes the journal independent of the catalog."""

    model: str
    slices: int
    compute: int
    profiles: tuple[ProfileRecord, ...]
    memory_gb: float = 0
    budgets: dict[str, int] = msgspec.field(default_factory=dict)


class Part(_Record, frozen=True):
    """One instance of an allocation: its place and its size.

    It is complete, because history shows it after its node was removed.
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
    """Lifecycle phase; None on a node without an agent."""
    uuid: str = ""
    """The UUID of the MIG device, once known."""
    detail: str = ""
    """A message from the agent."""
    attempts: int = 0
    """Failed attempts of the agent."""
    gpu_uuid: str = ""


class Role(StrEnum):
    """The rights that a token gives."""

    ADMIN = "admin"
    """Everything, including tenants and tokens."""
    OPERATOR = "operator"
    """Nodes, and the allocations of all tenants."""
    TENANT = "tenant"
    """The allocations of one tenant."""
    AGENT = "agent"
    """One node: reading its desired state and reporting its actual state."""
    READ_ONLY = "read-only"
    """Reading everything, or the objects of one tenant."""


class Cause(StrEnum):
    """Why an allocation ended."""

    RELEASED = "released"
    """By request."""
    LEASE = "lease ended"
    TIMEOUT = "waited too long"
    """It was still queued at its deadline."""
    EVICTED = "evicted"
    """An operator drained its node."""
    RECLAIMED = "reclaimed"
    """A tenant claimed slices that it is guaranteed; another allocation waits in its place."""
    FAILED = "failed"
    """An instance could not be created, or was lost; see the detail."""


AllocationState = Literal[
    "queued", "placed", "creating", "active", "releasing", "released", "failed", "cancelled"
]
"""The states of an allocation; without agents only queued, placed, released and cancelled."""


class AllocationRecord(_Record, frozen=True):
    """An allocation: the request, its instances, and how it ended."""

    id: str
    tenant: TenantRef
    want: Want
    count: int = 1
    priority: int = 0
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    lease: Seconds | None = None
    """Its lifetime, from the moment it is placed or its lease was extended."""
    preemptible: bool = False
    """Whether it may end so that another tenant gets its guarantee."""
    expected_seconds: Seconds | None = None
    """How long the tenant expects to use it: a hint. The allocation does not end after it."""
    requested: Seconds = 0
    deadline: Seconds | None = None
    """The end of its time in the queue."""
    reason: str = ""
    """Why it waits, as a keyword; ``detail`` is the sentence, also for why it failed."""
    detail: str = ""
    placed: Seconds | None = None
    extended: Seconds | None = None
    """When its lease was last extended."""
    warned: bool = False
    """Whether a `LeaseEnding` entry has announced the end of its lease."""
    parts: tuple[Part, ...] = ()
    """Its instances; empty while it waits."""
    ended: Seconds | None = None
    cause: Cause | None = None
    reclaimed_at: Seconds | None = None
    """When it will end because its slices are reclaimed; the tenant has notice of it."""
    reclaimed_on: GpuRef | None = None
    """The GPU with the reclaimed window: it ends for that window, or waits until it is used."""
    replaces: str = ""
    """The reclaimed allocation that this one replaces."""
    reclaims: int = 0
    """How often it and the allocations it replaces were reclaimed."""
    held_until: Seconds | None = None
    """It is not placed before this time, because it was reclaimed."""

    @property
    def ends(self) -> Seconds | None:
        """The end of its lease; None without a lease, and while it waits."""
        begun = self.placed if self.extended is None else self.extended
        return None if self.lease is None or begun is None else begun + self.lease

    @property
    def state(self) -> AllocationState:
        """The state that the API shows."""
        parts = self.parts
        if not parts:
            return "queued" if self.ended is None else "cancelled"
        if len(parts) == 1 and parts[0].phase is None:  # the common case: no agent, one instance
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
    """A GPU model was added, because a node has it."""

    geometry: GeometryRecord


class ModelForgotten(Entry, frozen=True, tag="model-forgotten"):
    """A GPU model was removed, because no node has it any more."""

    model: str


class NodeAdded(Entry, frozen=True, tag="node-added"):
    """A node was added; ``first`` is the id of its first GPU."""

    node: str
    model: str
    gpus: int
    first: int
    labels: dict[str, str] = msgspec.field(default_factory=dict)


class NodePhase(StrEnum):
    """The scheduling phase of a node: whether it takes new instances."""

    READY = "ready"
    CORDONED = "cordoned"
    """Takes no new instances; existing ones stay."""
    DRAINING = "draining"
    """Takes no new instances, and waits for existing ones to end."""
    DRAINED = "drained"
    """Takes no new instances, and is empty."""


class NodeTurned(Entry, frozen=True, tag="node-turned"):
    """A node changed its phase."""

    node: str
    phase: NodePhase


class NodeRemoved(Entry, frozen=True, tag="node-removed"):
    """A node was removed."""

    node: str


class TenantSet(Entry, frozen=True, tag="tenant-set"):
    """A tenant was created, or its terms changed."""

    tenant: TenantRef
    quota: QuotaRecord = QuotaRecord()


class TenantRemoved(Entry, frozen=True, tag="tenant-removed"):
    """A tenant was removed; its tokens are no longer valid."""

    tenant: TenantRef


class TokenIssued(Entry, frozen=True, tag="token-issued"):
    """A token was issued. Only the digest of its secret is stored."""

    token: str
    """The token's id."""
    digest: str
    role: Role
    tenant: TenantRef | None = None
    node: str | None = None
    """The node of an agent's token."""
    note: str = ""
    expires: Seconds | None = None
    replaces: str = ""
    """The id of the rotated token that it replaces."""


class TokenExpiring(Entry, frozen=True, tag="token-expiring"):
    """A token was rotated: it expires, and a new one replaces it."""

    token: str
    expires: Seconds


class TokenRevoked(Entry, frozen=True, tag="token-revoked"):
    """A token was revoked."""

    token: str


class Allocated(Entry, frozen=True, tag="allocated"):
    """An allocation was created and placed at once."""

    allocation: AllocationRecord


class Queued(Entry, frozen=True, tag="queued"):
    """An allocation was created and queued."""

    allocation: AllocationRecord
    ticket: int
    """Its ticket number; later tickets have higher numbers."""


class Served(Entry, frozen=True, tag="served"):
    """A queued allocation was placed."""

    allocation: str
    tenant: TenantRef
    parts: tuple[Part, ...]


class Rejected(Entry, frozen=True, tag="rejected"):
    """A request was rejected. The entry serves history and statistics; the state is unchanged."""

    tenant: TenantRef
    want: Want
    count: int
    reason: str
    detail: str


class Ended(Entry, frozen=True, tag="ended"):
    """An allocation ended. The entry holds the complete record, which history shows."""

    allocation: AllocationRecord


class Moved(Entry, frozen=True, tag="moved"):
    """An instance was moved to another place."""

    allocation: str
    tenant: TenantRef
    index: int
    """The instance's index in its allocation."""
    part: Part


class TurnTaken(Entry, frozen=True, tag="turn-taken"):
    """A round-robin policy advanced although nothing was placed."""

    turn: int


EARLIEST: Seconds = 946_684_800.0
"""The year 2000. A clock that shows less was never set."""
LATEST: Seconds = 4_102_444_800.0
"""The year 2100."""

STEP_SECONDS: Seconds = 2.0
"""A wall clock that differs more than this from service time was set, and needs an operator's
consent. Smaller differences are followed."""


class ClockSet(Entry, frozen=True, tag="clock-set"):
    """An operator accepted a step of the wall clock: service time moved by as much."""

    by: Seconds
    """The length of the step; the row has the time before it."""


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
    | Reserved
    | Reclaiming
    | HeldBack
    | PolicyChosen
    | TurnTaken
    | LeaseExtended
    | LeaseEnding
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
    """An entry with its place in the journal, its time and its author."""

    seq: int
    at: Seconds
    actor: str
    """The id of the token that made the request, or the part of the service that acted."""
    entry: AnyEntry
    origin: str = ""
    """The client's address; empty if the service acted by itself."""


_WITH_RECORD = (Allocated, Ended, Queued)


def concerns(entry: AnyEntry) -> tuple[TenantRef | None, str]:
    """Return the tenant that an entry concerns, and its subject: the name or id of an object."""
    if isinstance(entry, _WITH_RECORD):  # first, because nearly all entries are
        return entry.allocation.tenant, entry.allocation.id
    match entry:
        case (
            Served(identity, tenant)
            | Moved(identity, tenant)
            | PartTurned(identity, tenant)
            | LeaseExtended(identity, tenant)
            | LeaseEnding(identity, tenant)
        ):
            return tenant, identity
        case Reclaiming(identity, tenant) | HeldBack(identity, tenant):
            return tenant, identity
        case Rejected(tenant) | Reserved(tenant):
            return tenant, ""
        case TenantSet(tenant) | TenantRemoved(tenant):
            return tenant, tenant.name
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


def index_keys(entry: AnyEntry) -> tuple[str, str | None, str]:
    """Return the kind, the tenant's id and the subject, by which stores index an entry."""
    tenant, subject = concerns(entry)
    return kind(entry), None if tenant is None else tenant.id, subject


_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyEntry] = msgspec.json.Decoder(AnyEntry)


def encode(entry: AnyEntry) -> bytes:
    """Encode an entry as JSON."""
    return _encoder.encode(entry)


def decode(data: bytes | str) -> AnyEntry:
    """Decode an entry; raises msgspec.DecodeError for anything else."""
    return _decoder.decode(data)


_kinds: dict[type[Entry], str] = {
    made: str(made.__struct_config__.tag) for made in get_args(AnyEntry)
}


def kind(entry: AnyEntry) -> str:
    """Return the kind of an entry, such as ``allocated``."""
    return _kinds[type(entry)]
