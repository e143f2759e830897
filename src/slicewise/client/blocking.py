"""The client that waits for its answers."""

from __future__ import annotations

import ssl
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from time import sleep
from types import TracebackType
from typing import TypeVar

import httpx
from msgspec import UNSET, UnsetType

from slicewise.client import calls
from slicewise.client.calls import Call, P, Pages, body_of
from slicewise.client.errors import ResyncError
from slicewise.client.exchange import (
    PATIENCE,
    TIMEOUT,
    Again,
    Exchange,
    Token,
    Trip,
    pauses,
    timeouts,
    trusted,
)
from slicewise.client.following import (
    STREAM_TIMEOUT,
    Following,
    Progress,
    is_usable,
    place_of,
)
from slicewise.client.proxies import usable_settings
from slicewise.control.agent_wire import ForeignView
from slicewise.control.entries import Role
from slicewise.control.lately import LatelyView
from slicewise.control.reports import (
    ClusterView,
    DryRun,
    EventView,
    ModelView,
    MoveBody,
    NodeDetail,
    PlanView,
    PolicyView,
    QuotaPatch,
    Readiness,
    WhoView,
)
from slicewise.control.wire import (
    AllocationBody,
    AllocationView,
    ClockStepView,
    ClockView,
    NewTokenView,
    NodeView,
    Quota,
    TenantView,
    TokenView,
)
from slicewise.core.request import Need

T = TypeVar("T")


class Client:
    """Asks the service, and waits for the answer.

    ``server`` may name several processes of one service, with commas between; whichever leads is
    found. When servers fail, what may be sent again is sent again for ``patience`` seconds.
    """

    def __init__(
        self,
        server: str | Sequence[str],
        token: Token,
        *,
        timeout: float = TIMEOUT,
        patience: float = PATIENCE,
        verify: bool | ssl.SSLContext = True,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._exchange = Exchange(server, token, patience)
        with usable_settings():
            self._http = httpx.Client(
                timeout=timeouts(timeout),
                verify=trusted(self._exchange, verify),
                transport=transport,
            )

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _do(self, call: Call[T], key: str | None = None) -> T:
        trip = Trip(self._exchange, call, key)
        while True:
            try:
                response = self._http.request(
                    call.method,
                    trip.url,
                    content=call.body,
                    headers=trip.headers,
                )
            except httpx.RequestError as error:
                sleep(trip.failed(error).pause)
                continue
            answer = trip.read(response)
            if not isinstance(answer, Again):
                return answer
            sleep(answer.pause)

    def _all(self, pages: Pages[P, T]) -> Iterator[T]:
        call: Call[P] | None = pages.first
        while call is not None:
            page = self._do(call)
            yield from pages.items(page)
            call = pages.behind(page)

    # Allocations

    def allocate(
        self,
        want: str | Need,
        *,
        models: str | Sequence[str] = (),
        count: int = 1,
        priority: int = 0,
        wait_seconds: float = 0,
        lease_seconds: float | None = None,
        labels: Mapping[str, str] | None = None,
        tenant: str | None = None,
        idempotency_key: str | None = None,
    ) -> AllocationView:
        """Create an allocation of a profile or a need.

        If ``wait_seconds`` was given it may be queued when this returns: see `wait_until_placed`.
        A rejection raises `RejectedError`.
        """
        body = body_of(
            want,
            models=models,
            count=count,
            priority=priority,
            wait_seconds=wait_seconds,
            lease_seconds=lease_seconds,
            labels=labels,
            tenant=tenant,
        )
        return self._do(calls.allocate(body), idempotency_key)

    def allocate_all(
        self, bodies: Sequence[AllocationBody], *, idempotency_key: str | None = None
    ) -> tuple[AllocationView, ...]:
        """Create several allocations, all or none."""
        return self._do(calls.allocate_all(bodies), idempotency_key).allocations

    def wait_until_placed(self, identity: str) -> AllocationView:
        """Wait until an allocation is in the queue no more; it is placed then, or has ended."""
        while True:
            with suppress(ResyncError):
                return self._wait_until_placed(identity)

    def _wait_until_placed(self, identity: str) -> AllocationView:
        after = place_of(self.readiness()) or 0  # from the first, rather than miss it
        found = self.allocation(identity)
        if found.state != "queued":
            return found
        with closing(self.events(after)) as events:
            for event in events:
                if event.subject == identity:
                    break
        wait = pauses()
        while (found := self.allocation(identity)).state == "queued":
            sleep(next(wait))  # this server has not heard of it yet
        return found

    def wait_until_active(self, identity: str) -> AllocationView:
        """Wait until an allocation can be used, or has ended.

        It is active then; without an agent on its node it is placed.
        """
        while True:
            with suppress(ResyncError):
                return self._wait_until_active(identity)

    def _wait_until_active(self, identity: str) -> AllocationView:
        after = place_of(self.readiness()) or 0  # from the first, rather than miss it
        found = self.allocation(identity)
        if is_usable(found):
            return found
        progress = Progress(found)
        with closing(self.events(after)) as events:
            for event in events:
                if progress.note(event):
                    break
        wait = pauses()
        while not is_usable(found := self.allocation(identity)):
            sleep(next(wait))  # this server has not heard of it yet
        return found

    def dry_run(
        self,
        want: str | Need,
        *,
        models: str | Sequence[str] = (),
        count: int = 1,
        priority: int = 0,
        wait_seconds: float = 0,
        tenant: str | None = None,
        policies: str | Sequence[str] = (),
        alternatives: int | None = None,
    ) -> DryRun:
        """Where a request would go and what it would cost, without it happening.

        ``policies`` are asked as well; ``alternatives`` is how many other places to tell of.
        """
        body = body_of(
            want,
            models=models,
            count=count,
            priority=priority,
            wait_seconds=wait_seconds,
            tenant=tenant,
        )
        return self._do(calls.dry_run(body, policies, alternatives))

    def release(self, identity: str, *, idempotency_key: str | None = None) -> AllocationView:
        """End an allocation; ending it again changes nothing."""
        return self._do(calls.release(identity), idempotency_key)

    def allocation(self, identity: str) -> AllocationView:
        """One allocation, living or ended."""
        return self._do(calls.allocation(identity))

    def allocations(
        self,
        *,
        state: str | None = None,
        profile: str | None = None,
        node: str | None = None,
        model: str | None = None,
        tenant: str | None = None,
        labels: Mapping[str, str] | None = None,
        page_size: int | None = None,
    ) -> Iterator[AllocationView]:
        """All allocations that match, page by page as they are needed.

        Those that live, the oldest first; of state released or cancelled, the latest first.
        """
        return self._all(
            calls.allocations(
                labels,
                state=state,
                profile=profile,
                node=node,
                model=model,
                tenant=tenant,
                limit=page_size,
            )
        )

    def queue(self) -> Iterator[AllocationView]:
        """Those who wait, in the order in which they are served."""
        return self._all(calls.queue())

    # Nodes

    def add_node(
        self,
        name: str,
        model: str,
        gpus: int,
        *,
        labels: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
    ) -> NodeView:
        """Register a node."""
        return self._do(calls.add_node(name, model, gpus, labels), idempotency_key)

    def nodes(self) -> Iterator[NodeView]:
        """All nodes, by name."""
        return self._all(calls.nodes())

    def node(self, name: str) -> NodeDetail:
        """A node and its GPUs."""
        return self._do(calls.node(name))

    def cordon(self, name: str) -> NodeView:
        """Let a node take no new instances."""
        return self._do(calls.cordon(name))

    def uncordon(self, name: str) -> NodeView:
        """Let a node take new instances again."""
        return self._do(calls.uncordon(name))

    def drain(self, name: str, *, evict: bool = False) -> NodeView:
        """Let a node become empty: as what is on it ends, or by ending it."""
        return self._do(calls.drain(name, evict))

    def accept(self, name: str) -> NodeView:
        """Use a node although its driver does not agree with the catalog."""
        return self._do(calls.accept(name))

    def adopt(
        self, node: str, foreign: str, tenant: str, *, labels: Mapping[str, str] | None = None
    ) -> AllocationView:
        """Make an instance that is nobody's an allocation of a tenant, where it is."""
        return self._do(calls.adopt(node, foreign, tenant, labels))

    def evict(self, node: str, foreign: str) -> ForeignView:
        """Have an instance that is nobody's destroyed by the node's agent."""
        return self._do(calls.evict(node, foreign))

    def remove_node(self, name: str) -> NodeView:
        """Remove an empty node."""
        return self._do(calls.remove_node(name))

    # Tenants and tokens

    def add_tenant(self, name: str, quota: Quota | None = None) -> TenantView:
        """Create a tenant."""
        return self._do(calls.add_tenant(name, quota or Quota()))

    def tenants(self) -> Iterator[TenantView]:
        """All tenants, by name."""
        return self._all(calls.tenants())

    def tenant(self, name: str) -> TenantView:
        """One tenant."""
        return self._do(calls.tenant(name))

    def change_quota(
        self,
        name: str,
        *,
        memory_slices: int | UnsetType | None = UNSET,
        compute_slices: int | UnsetType | None = UNSET,
        instances: int | UnsetType | None = UNSET,
        requests_per_second: float | UnsetType | None = UNSET,
        max_priority: int | UnsetType | None = UNSET,
    ) -> TenantView:
        """Change what is named of a tenant's quota; None lifts a limit."""
        changes = QuotaPatch(
            memory_slices=memory_slices,
            compute_slices=compute_slices,
            instances=instances,
            requests_per_second=requests_per_second,
            max_priority=max_priority,
        )
        return self._do(calls.change_quota(name, changes))

    def remove_tenant(self, name: str) -> TenantView:
        """Remove a tenant that holds nothing."""
        return self._do(calls.remove_tenant(name))

    def issue_token(
        self,
        role: Role | str,
        *,
        tenant: str | None = None,
        node: str | None = None,
        note: str = "",
        expires_in_seconds: float | None = None,
    ) -> NewTokenView:
        """Issue a token; its secret is shown this once."""
        return self._do(calls.issue_token(role, tenant, node, note, expires_in_seconds))

    def tokens(self) -> Iterator[TokenView]:
        """All tokens, without their secrets."""
        return self._all(calls.tokens())

    def rotate_token(
        self,
        identity: str,
        *,
        overlap_seconds: float = 3600,
        expires_in_seconds: float | None = None,
    ) -> NewTokenView:
        """Issue another token in the stead of one, which stays valid for the overlap.

        The secret is shown this once. The new token expires when the old one would have, unless
        said otherwise.
        """
        return self._do(calls.rotate_token(identity, overlap_seconds, expires_in_seconds))

    def revoke_token(self, identity: str) -> TokenView:
        """Make a token void."""
        return self._do(calls.revoke_token(identity))

    def whoami(self) -> WhoView:
        """Who the token belongs to."""
        return self._do(calls.whoami())

    # The whole

    def cluster(self, *, gpus: bool = False) -> ClusterView:
        """The cluster, with every GPU where asked for."""
        return self._do(calls.cluster(gpus))

    def lately(self, *, seconds: int = 3600, rejections: int = 50) -> LatelyView:
        """What the service has accepted and rejected in the last seconds, and how it stood."""
        return self._do(calls.lately(seconds, rejections))

    def models(self) -> tuple[ModelView, ...]:
        """The GPU models the service knows."""
        return self._do(calls.models()).models

    def policies(self) -> tuple[PolicyView, ...]:
        """The policies the service knows."""
        return self._do(calls.policies()).policies

    def plan(
        self,
        *,
        profile: str | None = None,
        model: str | None = None,
        budget: int | None = None,
        policy: str | None = None,
    ) -> PlanView:
        """Which instances to move so that a profile fits, or, without one, to win back room."""
        return self._do(calls.plan(profile, model, budget, policy))

    def carry_out(self, moves: Sequence[MoveBody]) -> int:
        """Make the moves of a plan, all or none; returns how many."""
        return self._do(calls.carry_out(moves)).moves

    def readiness(self) -> Readiness:
        """Whether the server asked can do its part."""
        return self._do(calls.readiness())

    def clock(self) -> ClockView:
        """Service time beside the wall clock of the server asked."""
        return self._do(calls.clock())

    def accept_clock(self, step_seconds: float) -> ClockStepView:
        """Let service time go on from the leader's wall clock, which was seen so far ahead."""
        return self._do(calls.accept_clock(step_seconds))

    def audit(
        self,
        *,
        tenant: str | None = None,
        subject: str | None = None,
        kinds: str | Sequence[str] = (),
    ) -> Iterator[EventView]:
        """The journal, the newest first."""
        return self._all(calls.audit(tenant, subject, kinds))

    def events(self, after: int | str | None = None) -> Generator[EventView, None, None]:
        """What happens, as it happens, without end; a stream that breaks is taken up where it did.

        From the event behind ``after`` on (0 is from the first), or from now on. After a restore of
        the service, or where ``after`` is too long ago, it ends with `ResyncError`: read the state
        again, and begin again.
        """
        following = Following(
            self._exchange, place_of(self.readiness()) if after is None else str(after)
        )
        while True:
            try:
                with self._http.stream(
                    "GET",
                    following.url,
                    params=following.query,
                    headers=following.headers,
                    timeout=STREAM_TIMEOUT,
                ) as response:
                    if following.begins(response):
                        for piece in response.iter_bytes():
                            yield from following.feed(piece)
                        pause = following.broke()
                    else:
                        response.read()
                        pause = following.refused(response)
            except httpx.RequestError as error:
                pause = following.broke(error)
            sleep(pause)
