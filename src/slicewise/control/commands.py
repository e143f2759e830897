"""The commands that the handler decides; their syntax has been validated."""

from __future__ import annotations

from dataclasses import dataclass, field

from slicewise.api.agents import HelloBody, ReportBody
from slicewise.control.answers import Answer
from slicewise.engine.rehearsal import Rehearsal
from slicewise.journal.entries import GeometryRecord, QuotaRecord, Role, Seconds, TenantRef, Want


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of one allocation to create."""

    want: Want
    count: int = 1
    priority: int = 0
    wait: Seconds = 0
    lease: Seconds | None = None
    labels: dict[str, str] = field(default_factory=dict)
    preemptible: bool = False
    expected_seconds: Seconds | None = None


@dataclass(frozen=True, slots=True)
class Create:
    """Create an allocation."""

    tenant: str
    terms: Terms


@dataclass(frozen=True, slots=True)
class CreateAll:
    """Create several allocations, all or none."""

    tenant: str
    all: tuple[Terms, ...]


@dataclass(frozen=True, slots=True)
class CreateOn:
    """Create several allocations on one node, all or none, unless they exist already."""

    tenant: str
    node: str
    all: tuple[Terms, ...]
    mark: str
    """The label whose value identifies allocations created by an earlier, equal command."""


@dataclass(frozen=True, slots=True)
class Release:
    """End an allocation, or remove it from the queue."""

    allocation: str
    tenant: TenantRef | None = None
    """Only if the allocation belongs to this tenant; None for any."""
    ended: Answer | None = None
    """The answer if the allocation has ended already."""


@dataclass(frozen=True, slots=True)
class Extend:
    """Extend the lease of a placed allocation."""

    allocation: str
    lease: Seconds
    """Time from now until the lease ends."""
    tenant: TenantRef | None = None
    """Only if the allocation belongs to this tenant; None for any."""


@dataclass(frozen=True, slots=True)
class AddNode:
    """Add a node."""

    node: str
    geometry: GeometryRecord
    gpus: int
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cordon:
    """Stop placing new instances on a node."""

    node: str


@dataclass(frozen=True, slots=True)
class Uncordon:
    """Resume placing new instances on a node."""

    node: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Cordon a node and wait until it is empty."""

    node: str
    evict: bool = False
    """End the allocations on it instead of waiting for them."""


@dataclass(frozen=True, slots=True)
class RemoveNode:
    """Remove an empty node."""

    node: str


@dataclass(frozen=True, slots=True)
class SetTenant:
    """Create a tenant, or change its terms."""

    tenant: str
    quota: QuotaRecord
    new: bool
    """Whether to create it. If not, it must exist."""


@dataclass(frozen=True, slots=True)
class RemoveTenant:
    """Remove a tenant without allocations."""

    tenant: str


@dataclass(frozen=True, slots=True)
class IssueToken:
    """Issue a token. The caller keeps the secret; only its digest is stored."""

    digest: str
    role: Role
    tenant: str | None = None
    node: str | None = None
    note: str = ""
    expires_in: Seconds | None = None


@dataclass(frozen=True, slots=True)
class RotateToken:
    """Replace a token by a new one; the old one expires soon."""

    token: str
    digest: str
    overlap: Seconds
    """How long the old token stays valid."""
    expires_in: Seconds | None = None
    """Lifetime of the new token; None keeps the expiry of the old one."""


@dataclass(frozen=True, slots=True)
class RevokeToken:
    """Revoke a token."""

    token: str


@dataclass(frozen=True, slots=True)
class MoveInstance:
    """A planned move of one instance: its current place and its target."""

    allocation: str
    index: int
    node: str
    gpu: int
    start: int
    to_node: str
    to_gpu: int
    to_start: int


@dataclass(frozen=True, slots=True)
class CarryOut:
    """Make planned moves in order, all or none; refused if the cluster has changed since."""

    moves: tuple[MoveInstance, ...]


@dataclass(frozen=True, slots=True)
class Hello:
    """An agent begins a session for its node, which may be unknown."""

    node: str
    body: HelloBody
    catalog: GeometryRecord | None = None
    """The catalog's geometry for the model that the agent names."""
    fail_after_reboot: bool = False
    """Whether a reboot fails the allocations on the node; otherwise they are created again."""


@dataclass(frozen=True, slots=True)
class Report:
    """An agent reports everything on its node."""

    node: str
    body: ReportBody


@dataclass(frozen=True, slots=True)
class Heard:
    """A lost agent is reachable again."""

    node: str


@dataclass(frozen=True, slots=True)
class Lost:
    """An agent has been unreachable for too long."""

    node: str
    session: str
    since: Seconds


@dataclass(frozen=True, slots=True)
class Accept:
    """Use a node although its driver disagrees with the catalog."""

    node: str


@dataclass(frozen=True, slots=True)
class Adopt:
    """Turn a foreign instance into an allocation of a tenant."""

    node: str
    foreign: str
    tenant: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evict:
    """Have the agent destroy a foreign instance."""

    node: str
    foreign: str


@dataclass(frozen=True, slots=True)
class SetClock:
    """Move service time to the leader's wall clock."""

    by: Seconds
    """How far the wall clock is ahead of service time."""
    seen: Seconds
    """How far it was ahead when the operator decided to accept the step."""


@dataclass(frozen=True, slots=True)
class ChoosePolicy:
    """Use the table that a rehearsal found to be the best."""

    rehearsal: Rehearsal


@dataclass(frozen=True, slots=True)
class KeepLeastLost:
    """Return to the table of `least-lost`: nothing is rehearsed."""

    why: str


Command = (
    Create
    | CreateAll
    | CreateOn
    | Release
    | Extend
    | AddNode
    | Cordon
    | Uncordon
    | Drain
    | RemoveNode
    | SetTenant
    | RemoveTenant
    | IssueToken
    | RotateToken
    | RevokeToken
    | CarryOut
    | Hello
    | Report
    | Heard
    | Lost
    | Accept
    | Adopt
    | Evict
    | SetClock
    | ChoosePolicy
    | KeepLeastLost
)


def work_of(command: Command) -> int:
    """Return the cost of deciding a command: the instances to place, or 1 for other commands."""
    match command:
        case Create(_, terms):
            return terms.count
        case CreateAll(_, every) | CreateOn(_, _, every):
            return sum(terms.count for terms in every)
        case _:
            return 1
