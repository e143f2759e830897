"""What can be called: each call as data, so that both clients say the same thing the same way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar
from urllib.parse import quote

from slicewise.client.bodies import checked
from slicewise.control.agent_wire import AdoptBody, ForeignView
from slicewise.control.entries import Role
from slicewise.control.lately import LatelyView
from slicewise.control.reports import (
    AllocationPage,
    ClusterView,
    DryRun,
    EventPage,
    EventView,
    ModelList,
    MoveBody,
    MovesBody,
    NodeDetail,
    NodePage,
    PlanView,
    PolicyList,
    QueuePage,
    QuotaPatch,
    Readiness,
    TenantPage,
    TenantPatch,
    TokenPage,
    WhoView,
)
from slicewise.control.wire import (
    AllocationBody,
    AllocationView,
    BatchBody,
    BatchView,
    ClockStepBody,
    ClockStepView,
    ClockView,
    DrainBody,
    MovesView,
    NeedBody,
    NewTokenView,
    NodeBody,
    NodeView,
    Quota,
    RotateBody,
    TenantBody,
    TenantView,
    TokenBody,
    TokenView,
)
from slicewise.core.errors import SlicewiseError, UnknownNameError
from slicewise.core.request import Need

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A request to the service, and what its answer is."""

    method: str
    path: str
    answer: type[T]
    body: bytes | None = None
    query: tuple[tuple[str, str], ...] = ()
    keyed: bool = False
    """Whether it takes an idempotency key, which makes it safe to send again."""
    harmless: bool = False
    """Whether it changes nothing, or leaves the same however often it is made."""

    @property
    def repeatable(self) -> bool:
        """Whether sending it twice is the same as once."""
        return self.keyed or self.harmless or self.method == "GET"


class Page(Protocol):
    """Some of a list, and where the rest begins."""

    @property
    def next(self) -> str | None:
        """Where the next page begins; None where there is none."""


P = TypeVar("P", bound=Page)


@dataclass(frozen=True, slots=True)
class Pages(Generic[P, T]):
    """A list that comes in pages."""

    first: Call[P]
    items: Callable[[P], Sequence[T]]
    """What a page holds."""

    def behind(self, page: P) -> Call[P] | None:
        """The call that gets the page behind this one, if there is one."""
        if page.next is None:
            return None
        return replace(self.first, query=(*self.first.query, ("cursor", page.next)))


def _path(*parts: str) -> str:
    for part in parts:
        if not part or "/" in part or part in (".", ".."):
            raise SlicewiseError(f"{part!r} is no name or id of anything")
    return "/".join(("/v1", *(quote(part, safe="", errors="replace") for part in parts)))


def _query(**given: object) -> tuple[tuple[str, str], ...]:
    """Parameters behind the question mark: None is left out, a list is repeated."""
    pairs: list[tuple[str, str]] = []
    for name, value in given.items():
        for one in value if isinstance(value, tuple) else (value,):
            if one is not None:
                pairs.append((name, str(one).lower() if isinstance(one, bool) else str(one)))
    return tuple(pairs)


def _several(names: str | Sequence[str]) -> tuple[str, ...]:
    """One name or several."""
    return (names,) if isinstance(names, str) else tuple(names)


# Allocations


def body_of(
    want: str | Need,
    *,
    models: str | Sequence[str] = (),
    count: int = 1,
    priority: int = 0,
    wait_seconds: float = 0,
    lease_seconds: float | None = None,
    labels: Mapping[str, str] | None = None,
    tenant: str | None = None,
) -> AllocationBody:
    """The body that creates an allocation."""
    need = None
    if isinstance(want, Need):
        need = NeedBody(compute=want.compute, memory_gb=want.memory_gb)
    return AllocationBody(
        profile=want if need is None else None,  # type: ignore[arg-type]  # a str, or refused
        need=need,
        models=_several(models),
        count=count,
        priority=priority,
        wait_seconds=wait_seconds,
        lease_seconds=lease_seconds,
        labels=dict(labels or {}),
        tenant=tenant,
    )


def allocate(body: AllocationBody) -> Call[AllocationView]:
    """Create an allocation."""
    return Call("POST", _path("allocations"), AllocationView, checked(body), keyed=True)


def allocate_all(bodies: Sequence[AllocationBody]) -> Call[BatchView]:
    """Create several, all or none."""
    body = BatchBody(allocations=tuple(bodies))
    return Call("POST", _path("allocations", "batch"), BatchView, checked(body), keyed=True)


def dry_run(
    body: AllocationBody, policies: str | Sequence[str], alternatives: int | None
) -> Call[DryRun]:
    """What would happen, without it happening."""
    query = _query(policy=_several(policies), alternatives=alternatives)
    path = _path("allocations", "dry-run")
    return Call("POST", path, DryRun, checked(body), query, harmless=True)


def release(identity: str) -> Call[AllocationView]:
    """End an allocation."""
    return Call("DELETE", _path("allocations", identity), AllocationView, keyed=True)


def allocation(identity: str) -> Call[AllocationView]:
    """One allocation."""
    return Call("GET", _path("allocations", identity), AllocationView)


def allocations(
    labels: Mapping[str, str] | None = None, **filters: str | int | None
) -> Pages[AllocationPage, AllocationView]:
    """The allocations that match."""
    label = tuple(f"{key}:{value}" for key, value in (labels or {}).items())
    query = _query(**filters, label=label)
    first = Call("GET", _path("allocations"), AllocationPage, query=query)
    return Pages(first, lambda page: page.allocations)


def queue() -> Pages[QueuePage, AllocationView]:
    """Those who wait."""
    return Pages(Call("GET", _path("queue"), QueuePage), lambda page: page.allocations)


# Nodes


def add_node(
    name: str, model: str, gpus: int, labels: Mapping[str, str] | None = None
) -> Call[NodeView]:
    """Register a node."""
    body = NodeBody(name=name, model=model, gpus=gpus, labels=dict(labels or {}))
    return Call("POST", _path("nodes"), NodeView, checked(body), keyed=True)


def nodes() -> Pages[NodePage, NodeView]:
    """The nodes."""
    return Pages(Call("GET", _path("nodes"), NodePage), lambda page: page.nodes)


def node(name: str) -> Call[NodeDetail]:
    """A node and its GPUs."""
    return Call("GET", _path("nodes", name), NodeDetail)


def cordon(name: str) -> Call[NodeView]:
    """Let a node take no new instances."""
    return Call("POST", _path("nodes", name, "cordon"), NodeView, harmless=True)


def uncordon(name: str) -> Call[NodeView]:
    """Let a node take new instances again."""
    return Call("POST", _path("nodes", name, "uncordon"), NodeView, harmless=True)


def drain(name: str, evict: bool = False) -> Call[NodeView]:
    """Let a node become empty."""
    body = checked(DrainBody(evict=evict))
    return Call("POST", _path("nodes", name, "drain"), NodeView, body, harmless=True)


def accept(name: str) -> Call[NodeView]:
    """Use a node although its driver does not agree with the catalog."""
    return Call("POST", _path("nodes", name, "accept"), NodeView, harmless=True)


def adopt(
    node: str, foreign: str, tenant: str, labels: Mapping[str, str] | None = None
) -> Call[AllocationView]:
    """Make an instance that is nobody's an allocation of a tenant."""
    body = checked(AdoptBody(tenant=tenant, labels=dict(labels or {})))
    path = _path("nodes", node, "foreign", foreign, "adopt")
    return Call("POST", path, AllocationView, body)


def evict(node: str, foreign: str) -> Call[ForeignView]:
    """Have an instance that is nobody's destroyed."""
    path = _path("nodes", node, "foreign", foreign, "evict")
    return Call("POST", path, ForeignView, harmless=True)


def remove_node(name: str) -> Call[NodeView]:
    """Remove an empty node."""
    return Call("DELETE", _path("nodes", name), NodeView)


# Tenants and tokens


def add_tenant(name: str, quota: Quota) -> Call[TenantView]:
    """Create a tenant."""
    return Call("POST", _path("tenants"), TenantView, checked(TenantBody(name=name, quota=quota)))


def tenants() -> Pages[TenantPage, TenantView]:
    """The tenants."""
    return Pages(Call("GET", _path("tenants"), TenantPage), lambda page: page.tenants)


def tenant(name: str) -> Call[TenantView]:
    """One tenant."""
    return Call("GET", _path("tenants", name), TenantView)


def change_quota(name: str, changes: QuotaPatch) -> Call[TenantView]:
    """Change what is named of a tenant's quota."""
    body = checked(TenantPatch(quota=changes))
    return Call("PATCH", _path("tenants", name), TenantView, body, harmless=True)


def remove_tenant(name: str) -> Call[TenantView]:
    """Remove a tenant that holds nothing."""
    return Call("DELETE", _path("tenants", name), TenantView)


def issue_token(
    role: Role | str,
    tenant: str | None = None,
    node: str | None = None,
    note: str = "",
    expires_in_seconds: float | None = None,
) -> Call[NewTokenView]:
    """Issue a token."""
    if role not in tuple(Role):
        raise UnknownNameError("role", role, Role)
    body = TokenBody(
        role=Role(role), tenant=tenant, node=node, note=note, expires_in_seconds=expires_in_seconds
    )
    return Call("POST", _path("tokens"), NewTokenView, checked(body))


def tokens() -> Pages[TokenPage, TokenView]:
    """The tokens."""
    return Pages(Call("GET", _path("tokens"), TokenPage), lambda page: page.tokens)


def rotate_token(
    identity: str, overlap_seconds: float = 3600, expires_in_seconds: float | None = None
) -> Call[NewTokenView]:
    """Replace a token by another."""
    body = RotateBody(overlap_seconds=overlap_seconds, expires_in_seconds=expires_in_seconds)
    return Call("POST", _path("tokens", identity, "rotate"), NewTokenView, checked(body))


def revoke_token(identity: str) -> Call[TokenView]:
    """Revoke a token."""
    return Call("DELETE", _path("tokens", identity), TokenView)


def whoami() -> Call[WhoView]:
    """Who this token belongs to."""
    return Call("GET", _path("whoami"), WhoView)


# The whole


def cluster(gpus: bool = False) -> Call[ClusterView]:
    """The cluster."""
    return Call("GET", _path("cluster"), ClusterView, query=_query(gpus=gpus or None))


def lately(seconds: int | None = None, rejections: int | None = None) -> Call[LatelyView]:
    """What has happened lately."""
    query = _query(seconds=seconds, rejections=rejections)
    return Call("GET", _path("lately"), LatelyView, query=query)


def models() -> Call[ModelList]:
    """The GPU models known."""
    return Call("GET", _path("models"), ModelList)


def policies() -> Call[PolicyList]:
    """The policies known."""
    return Call("GET", _path("policies"), PolicyList)


def plan(
    profile: str | None = None,
    model: str | None = None,
    budget: int | None = None,
    policy: str | None = None,
) -> Call[PlanView]:
    """Which instances to move."""
    query = _query(profile=profile, model=model, budget=budget, policy=policy)
    return Call("GET", _path("defrag", "plan"), PlanView, query=query)


def carry_out(moves: Sequence[MoveBody]) -> Call[MovesView]:
    """Make the moves of a plan."""
    return Call("POST", _path("defrag"), MovesView, checked(MovesBody(moves=tuple(moves))))


def readiness() -> Call[Readiness]:
    """Whether the server can do its part."""
    return Call("GET", "/readyz", Readiness)


def clock() -> Call[ClockView]:
    """Service time and the wall clock."""
    return Call("GET", _path("clock"), ClockView)


def accept_clock(step_seconds: float) -> Call[ClockStepView]:
    """Accept a step of the wall clock."""
    body = ClockStepBody(step_seconds=step_seconds)
    return Call("POST", _path("clock", "accept"), ClockStepView, checked(body), keyed=True)


def audit(
    tenant: str | None = None, subject: str | None = None, kinds: str | Sequence[str] = ()
) -> Pages[EventPage, EventView]:
    """The journal, the newest first."""
    query = _query(tenant=tenant, subject=subject, kind=_several(kinds))
    return Pages(Call("GET", _path("audit"), EventPage, query=query), lambda page: page.events)
