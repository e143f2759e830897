"""The calls of the API as data: method, path, query, body and the type of the answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar
from urllib.parse import quote

import msgspec

from slicewise.api.agents import AdoptBody, ForeignView
from slicewise.api.allocations import (
    AllocationBody,
    AllocationPage,
    AllocationView,
    BatchBody,
    BatchView,
    DryRun,
    ExtendBody,
    NeedBody,
    QueuePage,
)
from slicewise.api.base import encode
from slicewise.api.cluster import ClusterView, ModelList, PolicyList
from slicewise.api.defrag import MoveBody, MovesBody, MovesView, PlanView
from slicewise.api.events import EventPage, EventView
from slicewise.api.health import ClockStepBody, ClockStepView, ClockView, Readiness
from slicewise.api.nodes import DrainBody, NodeBody, NodeDetail, NodePage, NodeView
from slicewise.api.policy import PolicyStatus
from slicewise.api.stats import StatsView
from slicewise.api.tenants import (
    NewTokenView,
    Quota,
    QuotaPatch,
    RotateBody,
    TenantBody,
    TenantPage,
    TenantPatch,
    TenantView,
    TokenBody,
    TokenPage,
    TokenView,
    WhoView,
)
from slicewise.core.errors import SlicewiseError, UnknownNameError
from slicewise.core.request import Need
from slicewise.journal.entries import Role

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A request to the service, and the type of its answer."""

    method: str
    path: str
    answer: type[T]
    body: bytes | None = None
    query: tuple[tuple[str, str], ...] = ()
    keyed: bool = False
    """Whether it takes an idempotency key, which makes it safe to repeat."""
    idempotent: bool = False
    """Whether repeating it has no further effect, even without a key."""

    @property
    def repeatable(self) -> bool:
        """Whether it is safe to send again."""
        return self.keyed or self.idempotent or self.method == "GET"


class Page(Protocol):
    """A page of a list."""

    @property
    def next(self) -> str | None:
        """The cursor of the next page; None on the last."""


P = TypeVar("P", bound=Page)


@dataclass(frozen=True, slots=True)
class Pages(Generic[P, T]):
    """A paginated list."""

    first: Call[P]
    items: Callable[[P], Sequence[T]]
    """Extracts the items of a page."""

    def next_call(self, page: P) -> Call[P] | None:
        """The call for the page after this one; None after the last."""
        if page.next is None:
            return None
        return replace(self.first, query=(*self.first.query, ("cursor", page.next)))


def _path(*parts: str) -> str:
    for part in parts:
        if not part or "/" in part or part in (".", ".."):
            raise SlicewiseError(f"{part!r} is not a valid name or id")
    return "/".join(("/v1", *(quote(part, safe="", errors="replace") for part in parts)))


def _query(**given: object) -> tuple[tuple[str, str], ...]:
    """Query parameters: None is omitted, a tuple is repeated."""
    pairs: list[tuple[str, str]] = []
    for name, value in given.items():
        for one in value if isinstance(value, tuple) else (value,):
            if one is not None:
                pairs.append((name, str(one).lower() if isinstance(one, bool) else str(one)))
    return tuple(pairs)


def _as_tuple(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


_INVALID = re.compile(r"(?P<problem>.*) - at `(?:key` in `)?\$\.?(?P<path>[^`]*)`", re.DOTALL)
_NAME = "expected 1 to 63 letters, digits, '.', '_' or '-', starting with a letter or digit"


def _json(body: msgspec.Struct) -> bytes:
    """Encode a body, checked against the limits of its schema."""
    try:
        msgspec.convert(msgspec.to_builtins(body), type(body))  # JSON would turn NaN into null
        return encode(body)
    except msgspec.ValidationError as error:
        found = _INVALID.fullmatch(str(error))
        path, problem = (found["path"], found["problem"]) if found else ("request", str(error))
        problem = _NAME if "matching regex" in problem else problem.replace("`", "")
        raise SlicewiseError(f"invalid {path}: {problem[0].lower()}{problem[1:]}") from None
    except (TypeError, ValueError) as error:  # a value that JSON does not have
        raise SlicewiseError(f"invalid request: {error}") from None


# Allocations


def body_of(
    want: str | Need,
    *,
    models: str | Sequence[str] = (),
    count: int = 1,
    priority: int = 0,
    wait_seconds: float = 0,
    lease_seconds: float | None = None,
    preemptible: bool = False,
    expected_seconds: float | None = None,
    labels: Mapping[str, str] | None = None,
    tenant: str | None = None,
) -> AllocationBody:
    """The body that creates an allocation."""
    need = None
    if isinstance(want, Need):
        need = NeedBody(compute=want.compute, memory_gb=want.memory_gb)
    return AllocationBody(
        profile=want if need is None else None,  # type: ignore[arg-type]  # _json checks it
        need=need,
        models=_as_tuple(models),
        count=count,
        priority=priority,
        wait_seconds=wait_seconds,
        lease_seconds=lease_seconds,
        preemptible=preemptible,
        expected_seconds=expected_seconds,
        labels=dict(labels or {}),
        tenant=tenant,
    )


def allocate(body: AllocationBody) -> Call[AllocationView]:
    """Create an allocation."""
    return Call("POST", _path("allocations"), AllocationView, _json(body), keyed=True)


def allocate_all(bodies: Sequence[AllocationBody]) -> Call[BatchView]:
    """Create several allocations atomically."""
    body = BatchBody(allocations=tuple(bodies))
    return Call("POST", _path("allocations", "batch"), BatchView, _json(body), keyed=True)


def dry_run(
    body: AllocationBody, policies: str | Sequence[str], alternatives: int | None, plan: bool
) -> Call[DryRun]:
    """Simulate an allocation."""
    query = _query(policy=_as_tuple(policies), alternatives=alternatives, plan=plan or None)
    path = _path("allocations", "dry-run")
    return Call("POST", path, DryRun, _json(body), query, idempotent=True)


def release(identity: str) -> Call[AllocationView]:
    """End an allocation."""
    return Call("DELETE", _path("allocations", identity), AllocationView, keyed=True)


def extend(identity: str, lease_seconds: float) -> Call[AllocationView]:
    """Extend the lease of an allocation."""
    body = _json(ExtendBody(lease_seconds=lease_seconds))
    return Call("POST", _path("allocations", identity, "extend"), AllocationView, body, keyed=True)


def allocation(identity: str, plan: bool = False) -> Call[AllocationView]:
    """One allocation."""
    query = _query(plan=plan or None)
    return Call("GET", _path("allocations", identity), AllocationView, query=query)


def allocations(
    labels: Mapping[str, str] | None = None, **filters: str | int | None
) -> Pages[AllocationPage, AllocationView]:
    """The allocations that match."""
    label = tuple(f"{key}:{value}" for key, value in (labels or {}).items())
    query = _query(**filters, label=label)
    first = Call("GET", _path("allocations"), AllocationPage, query=query)
    return Pages(first, lambda page: page.allocations)


def queue() -> Pages[QueuePage, AllocationView]:
    """The queue."""
    return Pages(Call("GET", _path("queue"), QueuePage), lambda page: page.allocations)


def queue_lines() -> Call[QueuePage]:
    """The lines of the queue, with a single request."""
    return Call("GET", _path("queue"), QueuePage, query=_query(limit=1))


# Nodes


def add_node(
    name: str, model: str, gpus: int, labels: Mapping[str, str] | None = None
) -> Call[NodeView]:
    """Register a node."""
    body = NodeBody(name=name, model=model, gpus=gpus, labels=dict(labels or {}))
    return Call("POST", _path("nodes"), NodeView, _json(body), keyed=True)


def nodes() -> Pages[NodePage, NodeView]:
    """The nodes."""
    return Pages(Call("GET", _path("nodes"), NodePage), lambda page: page.nodes)


def node(name: str) -> Call[NodeDetail]:
    """A node and its GPUs."""
    return Call("GET", _path("nodes", name), NodeDetail)


def cordon(name: str) -> Call[NodeView]:
    """Stop placing new instances on a node."""
    return Call("POST", _path("nodes", name, "cordon"), NodeView, idempotent=True)


def uncordon(name: str) -> Call[NodeView]:
    """Allow new instances on a node again."""
    return Call("POST", _path("nodes", name, "uncordon"), NodeView, idempotent=True)


def drain(name: str, evict: bool = False) -> Call[NodeView]:
    """Empty a node."""
    body = _json(DrainBody(evict=evict))
    return Call("POST", _path("nodes", name, "drain"), NodeView, body, idempotent=True)


def accept(name: str) -> Call[NodeView]:
    """Use a node although its driver disagrees with the catalog."""
    return Call("POST", _path("nodes", name, "accept"), NodeView, idempotent=True)


def adopt(
    node: str, foreign: str, tenant: str, labels: Mapping[str, str] | None = None
) -> Call[AllocationView]:
    """Turn a foreign instance into an allocation of a tenant."""
    body = _json(AdoptBody(tenant=tenant, labels=dict(labels or {})))
    path = _path("nodes", node, "foreign", foreign, "adopt")
    return Call("POST", path, AllocationView, body)


def evict(node: str, foreign: str) -> Call[ForeignView]:
    """Destroy a foreign instance."""
    path = _path("nodes", node, "foreign", foreign, "evict")
    return Call("POST", path, ForeignView, idempotent=True)


def remove_node(name: str) -> Call[NodeView]:
    """Remove an empty node."""
    return Call("DELETE", _path("nodes", name), NodeView)


# Tenants and tokens


def add_tenant(name: str, quota: Quota) -> Call[TenantView]:
    """Create a tenant."""
    return Call("POST", _path("tenants"), TenantView, _json(TenantBody(name=name, quota=quota)))


def tenants() -> Pages[TenantPage, TenantView]:
    """The tenants."""
    return Pages(Call("GET", _path("tenants"), TenantPage), lambda page: page.tenants)


def tenant(name: str) -> Call[TenantView]:
    """One tenant."""
    return Call("GET", _path("tenants", name), TenantView)


def change_quota(name: str, changes: QuotaPatch) -> Call[TenantView]:
    """Change the given terms of a tenant."""
    body = _json(TenantPatch(quota=changes))
    return Call("PATCH", _path("tenants", name), TenantView, body, idempotent=True)


def remove_tenant(name: str) -> Call[TenantView]:
    """Remove a tenant that has no allocations."""
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
    return Call("POST", _path("tokens"), NewTokenView, _json(body))


def tokens() -> Pages[TokenPage, TokenView]:
    """The tokens."""
    return Pages(Call("GET", _path("tokens"), TokenPage), lambda page: page.tokens)


def rotate_token(
    identity: str, overlap_seconds: float = 3600, expires_in_seconds: float | None = None
) -> Call[NewTokenView]:
    """Replace a token."""
    body = RotateBody(overlap_seconds=overlap_seconds, expires_in_seconds=expires_in_seconds)
    return Call("POST", _path("tokens", identity, "rotate"), NewTokenView, _json(body))


def revoke_token(identity: str) -> Call[TokenView]:
    """Revoke a token."""
    return Call("DELETE", _path("tokens", identity), TokenView)


def whoami() -> Call[WhoView]:
    """The identity behind the token."""
    return Call("GET", _path("whoami"), WhoView)


# The cluster and the service


def cluster(gpus: bool = False) -> Call[ClusterView]:
    """The cluster."""
    return Call("GET", _path("cluster"), ClusterView, query=_query(gpus=gpus or None))


def stats(seconds: int | None = None, rejections: int | None = None) -> Call[StatsView]:
    """Statistics of the last seconds."""
    query = _query(seconds=seconds, rejections=rejections)
    return Call("GET", _path("stats"), StatsView, query=query)


def models() -> Call[ModelList]:
    """The GPU models in the catalog."""
    return Call("GET", _path("models"), ModelList)


def policies() -> Call[PolicyList]:
    """The placement policies."""
    return Call("GET", _path("policies"), PolicyList)


def policy() -> Call[PolicyStatus]:
    """The policy in force."""
    return Call("GET", _path("policy"), PolicyStatus)


def plan(
    profile: str | None = None,
    model: str | None = None,
    budget: int | None = None,
    policy: str | None = None,
) -> Call[PlanView]:
    """Plan moves."""
    query = _query(profile=profile, model=model, budget=budget, policy=policy)
    return Call("GET", _path("defrag", "plan"), PlanView, query=query)


def carry_out(moves: Sequence[MoveBody]) -> Call[MovesView]:
    """Apply the moves of a plan."""
    return Call("POST", _path("defrag"), MovesView, _json(MovesBody(moves=tuple(moves))))


def readiness() -> Call[Readiness]:
    """The readiness of a server."""
    return Call("GET", "/readyz", Readiness)


def clock() -> Call[ClockView]:
    """Service time and the wall clock."""
    return Call("GET", _path("clock"), ClockView)


def accept_clock(step_seconds: float) -> Call[ClockStepView]:
    """Accept a step of the wall clock."""
    body = ClockStepBody(step_seconds=step_seconds)
    return Call("POST", _path("clock", "accept"), ClockStepView, _json(body), keyed=True)


def audit(
    tenant: str | None = None, subject: str | None = None, kinds: str | Sequence[str] = ()
) -> Pages[EventPage, EventView]:
    """The journal, newest entries first."""
    query = _query(tenant=tenant, subject=subject, kind=_as_tuple(kinds))
    return Pages(Call("GET", _path("audit"), EventPage, query=query), lambda page: page.events)


def backup() -> Call[bytes]:
    """A backup of the service."""
    return Call("GET", _path("backup"), bytes)
