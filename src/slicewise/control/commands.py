"""What can be asked of the writer; each command was checked in form before it came here."""

from __future__ import annotations

from dataclasses import dataclass, field

from slicewise.control.agent_wire import HelloBody, ReportBody
from slicewise.control.answers import Answer
from slicewise.control.entries import GeometryRecord, QuotaRecord, Role, Seconds, Want


@dataclass(frozen=True, slots=True)
class Terms:
    """One allocation to create, and on what terms."""

    want: Want
    count: int = 1
    priority: int = 0
    wait: Seconds = 0
    lease: Seconds | None = None
    labels: dict[str, str] = field(default_factory=dict)


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
    """Create several allocations on one node, all or none, unless whoever asks has them already."""

    tenant: str
    node: str
    all: tuple[Terms, ...]
    mark: str
    """The label by which those are known that were created for the same purpose."""


@dataclass(frozen=True, slots=True)
class Release:
    """End an allocation, or take it out of the queue."""

    allocation: str
    tenant: str | None = None
    """Only if it is this tenant's; otherwise it does not exist."""
    ended: Answer | None = None
    """What to answer if it does not live any more: it has ended before."""


@dataclass(frozen=True, slots=True)
class AddNode:
    """Register a node."""

    node: str
    geometry: GeometryRecord
    gpus: int
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cordon:
    """Let a node take no new instances."""

    node: str


@dataclass(frozen=True, slots=True)
class Uncordon:
    """Let a node take new instances again."""

    node: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Let a node become empty."""

    node: str
    evict: bool = False
    """End what is on it instead of waiting."""


@dataclass(frozen=True, slots=True)
class RemoveNode:
    """Remove a node that is empty."""

    node: str


@dataclass(frozen=True, slots=True)
class SetTenant:
    """Create a tenant, or change its quota."""

    tenant: str
    quota: QuotaRecord
    new: bool
    """Whether it must not exist, or must."""


@dataclass(frozen=True, slots=True)
class RemoveTenant:
    """Remove a tenant that holds nothing."""

    tenant: str


@dataclass(frozen=True, slots=True)
class IssueToken:
    """Make a token known by its digest; whoever asks keeps the secret."""

    digest: str
    role: Role
    tenant: str | None = None
    node: str | None = None
    note: str = ""
    expires_in: Seconds | None = None


@dataclass(frozen=True, slots=True)
class RotateToken:
    """Make another token in the stead of one, which is void after a while."""

    token: str
    digest: str
    overlap: Seconds
    """How long the old one is still valid."""
    expires_in: Seconds | None = None
    """When the new one expires; unless given, when the old one would have."""


@dataclass(frozen=True, slots=True)
class RevokeToken:
    """Make a token void."""

    token: str


@dataclass(frozen=True, slots=True)
class MoveInstance:
    """Where one instance of an allocation is, and where it is to go."""

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
    """Make planned moves in order, all or none; refused when the cluster has changed since."""

    moves: tuple[MoveInstance, ...]


@dataclass(frozen=True, slots=True)
class Hello:
    """An agent begins a session for its node, which may be new."""

    node: str
    said: HelloBody
    catalog: GeometryRecord | None = None
    """What the catalog knows under the model's name."""
    fail_after_reboot: bool = False
    """Whether allocations end when their node was restarted; otherwise they are made anew."""


@dataclass(frozen=True, slots=True)
class Report:
    """An agent tells all that it sees."""

    node: str
    said: ReportBody


@dataclass(frozen=True, slots=True)
class Heard:
    """An agent was heard of again."""

    node: str


@dataclass(frozen=True, slots=True)
class Lost:
    """An agent has not been heard of for too long."""

    node: str
    session: str
    since: Seconds


@dataclass(frozen=True, slots=True)
class Accept:
    """Use a node although its driver does not agree with the catalog."""

    node: str


@dataclass(frozen=True, slots=True)
class Adopt:
    """Make an instance that is nobody's an allocation of a tenant."""

    node: str
    foreign: str
    tenant: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evict:
    """Have an instance that is nobody's destroyed."""

    node: str
    foreign: str


@dataclass(frozen=True, slots=True)
class SetClock:
    """Let service time go on where the leader's wall clock is."""

    by: Seconds
    """How far that is ahead."""
    seen: Seconds
    """How far it was when an operator decided to accept it."""


Command = (
    Create
    | CreateAll
    | CreateOn
    | Release
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
)


def work_of(command: Command) -> int:
    """How much work a command is to decide, in instances to place; anything else counts as one."""
    match command:
        case Create(_, terms):
            return terms.count
        case CreateAll(_, every) | CreateOn(_, _, every):
            return sum(terms.count for terms in every)
        case _:
            return 1
