"""The asynchronous client. scripts/unasync.py generates the blocking client from it."""

from __future__ import annotations

import ssl
from asyncio import sleep
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress

import httpx
from msgspec import UNSET, UnsetType

from slicewise.api.agents import ForeignView
from slicewise.api.allocations import AllocationBody, AllocationView, DryRun, LineView
from slicewise.api.cluster import ClusterView, ModelView, PolicyView
from slicewise.api.defrag import MoveBody, PlanView
from slicewise.api.events import EventView
from slicewise.api.health import ClockStepView, ClockView, Readiness
from slicewise.api.nodes import NodeDetail, NodeView
from slicewise.api.policy import PolicyStatus
from slicewise.api.stats import StatsView
from slicewise.api.tenants import NewTokenView, Quota, QuotaPatch, TenantView, TokenView, WhoView
from slicewise.client import calls, event_stream
from slicewise.client.calls import Call, P, Pages, T, body_of
from slicewise.client.errors import ResyncError
from slicewise.client.transport import (
    PATIENCE,
    TIMEOUT,
    Endpoints,
    RetriedCall,
    Retry,
    Token,
    backoff,
    environment_errors,
    timeouts,
    tls_verification,
)
from slicewise.core.request import Need
from slicewise.journal.entries import Role


class AsyncClient:
    """Calls the service without blocking the event loop.

    ``server`` is one URL or several, with commas between; the client finds the leader. What is safe
    to repeat is retried for ``patience`` seconds when servers fail.
    """

    def __init__(
        self,
        server: str | Sequence[str],
        token: Token,
        *,
        timeout: float = TIMEOUT,
        patience: float = PATIENCE,
        verify: bool | ssl.SSLContext = True,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._endpoints = Endpoints(server, token, patience)
        with environment_errors():
            self._http = httpx.AsyncClient(
                timeout=timeouts(timeout),
                verify=tls_verification(self._endpoints, verify),
                transport=transport,
            )

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _send(self, call: Call[T], key: str | None = None) -> T:
        request = RetriedCall(self._endpoints, call, key)
        while True:
            try:
                response = await self._http.request(
                    call.method, request.url, content=call.body, headers=request.headers
                )
            except httpx.RequestError as error:
                await sleep(request.failed(error).delay)
                continue
            answer = request.read(response)
            if not isinstance(answer, Retry):
                return answer
            await sleep(answer.delay)

    async def _list(self, pages: Pages[P, T]) -> AsyncIterator[T]:
        call: Call[P] | None = pages.first
        while call is not None:
            page = await self._send(call)
            for item in pages.items(page):
                yield item
            call = pages.next_call(page)

    # Allocations

    async def allocate(
        self,
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
        idempotency_key: str | None = None,
    ) -> AllocationView:
        """Create an allocation of a profile or a need.

        With ``wait_seconds`` it may be queued. A rejection raises `RejectedError`.
        """
        body = body_of(
            want,
            models=models,
            count=count,
            priority=priority,
            wait_seconds=wait_seconds,
            lease_seconds=lease_seconds,
            preemptible=preemptible,
            expected_seconds=expected_seconds,
            labels=labels,
            tenant=tenant,
        )
        return await self._send(calls.allocate(body), idempotency_key)

    async def allocate_all(
        self, bodies: Sequence[AllocationBody], *, idempotency_key: str | None = None
    ) -> tuple[AllocationView, ...]:
        """Create several allocations atomically."""
        return (await self._send(calls.allocate_all(bodies), idempotency_key)).allocations

    async def wait_until_placed(self, identity: str) -> AllocationView:
        """Wait until an allocation leaves the queue: it is placed, or has ended."""
        return await self._wait_until(
            identity,
            lambda allocation: allocation.state != "queued",
            lambda _: lambda event: event.subject == identity,
        )

    async def wait_until_active(self, identity: str) -> AllocationView:
        """Wait until an allocation can be used, or has ended.

        A usable allocation is active, or placed where its node has no agent.
        """
        return await self._wait_until(
            identity,
            event_stream.is_usable,
            lambda found: event_stream.CreationProgress(found).update,
        )

    async def _wait_until(
        self,
        identity: str,
        done: Callable[[AllocationView], bool],
        watch: Callable[[AllocationView], Callable[[EventView], bool]],
    ) -> AllocationView:
        """Follow events until ``watch`` reports one that may have made the allocation done."""
        while True:
            with suppress(ResyncError):
                # Without a position, read all events rather than miss one.
                after = event_stream.position_of(await self.readiness()) or 0
                found = await self.allocation(identity)
                if done(found):
                    return found
                is_relevant = watch(found)
                async with aclosing(self.events(after)) as events:
                    async for event in events:
                        if is_relevant(event):
                            break
                delays = backoff()
                while not done(found := await self.allocation(identity)):
                    await sleep(next(delays))  # this server has not applied the event yet
                return found

    async def dry_run(
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
        plan: bool = False,
    ) -> DryRun:
        """Show where a request would be placed and what it would cost, without placing it.

        ``policies`` names further policies to compare; ``alternatives`` limits the other
        placements listed. With ``plan``, moves of instances are looked for if there is no room.
        """
        body = body_of(
            want,
            models=models,
            count=count,
            priority=priority,
            wait_seconds=wait_seconds,
            tenant=tenant,
        )
        return await self._send(calls.dry_run(body, policies, alternatives, plan))

    async def release(self, identity: str, *, idempotency_key: str | None = None) -> AllocationView:
        """End an allocation; repeating this has no effect."""
        return await self._send(calls.release(identity), idempotency_key)

    async def extend(
        self, identity: str, lease_seconds: float, *, idempotency_key: str | None = None
    ) -> AllocationView:
        """Extend a lease: it ends this many seconds from now, and never earlier than before."""
        return await self._send(calls.extend(identity, lease_seconds), idempotency_key)

    async def allocation(self, identity: str, *, plan: bool = False) -> AllocationView:
        """Return one allocation; with ``plan``, also moves that would make room if it is queued."""
        return await self._send(calls.allocation(identity, plan))

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
    ) -> AsyncIterator[AllocationView]:
        """Iterate over the matching allocations; pages are fetched on demand.

        Current allocations come oldest first; released or cancelled ones newest first.
        """
        where = {"state": state, "profile": profile, "node": node, "model": model, "tenant": tenant}
        return self._list(calls.allocations(labels, **where, limit=page_size))

    def queue(self) -> AsyncIterator[AllocationView]:
        """Iterate over the queued requests, oldest first."""
        return self._list(calls.queue())

    async def queue_lines(self) -> tuple[LineView, ...]:
        """Return the lines of the queue, in the order in which they are served."""
        return (await self._send(calls.queue_lines())).lines

    # Nodes

    async def add_node(
        self,
        name: str,
        model: str,
        gpus: int,
        *,
        labels: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
    ) -> NodeView:
        """Register a node."""
        return await self._send(calls.add_node(name, model, gpus, labels), idempotency_key)

    def nodes(self) -> AsyncIterator[NodeView]:
        """Iterate over all nodes, by name."""
        return self._list(calls.nodes())

    async def node(self, name: str) -> NodeDetail:
        """Return a node and its GPUs."""
        return await self._send(calls.node(name))

    async def cordon(self, name: str) -> NodeView:
        """Stop placing new instances on a node."""
        return await self._send(calls.cordon(name))

    async def uncordon(self, name: str) -> NodeView:
        """Allow new instances on a node again."""
        return await self._send(calls.uncordon(name))

    async def drain(self, name: str, *, evict: bool = False) -> NodeView:
        """Empty a node: wait until its allocations end, or end them with ``evict``."""
        return await self._send(calls.drain(name, evict))

    async def accept(self, name: str) -> NodeView:
        """Use a node although its driver disagrees with the catalog."""
        return await self._send(calls.accept(name))

    async def adopt(
        self, node: str, foreign: str, tenant: str, *, labels: Mapping[str, str] | None = None
    ) -> AllocationView:
        """Turn a foreign instance into an allocation of a tenant, in place."""
        return await self._send(calls.adopt(node, foreign, tenant, labels))

    async def evict(self, node: str, foreign: str) -> ForeignView:
        """Have the node's agent destroy a foreign instance."""
        return await self._send(calls.evict(node, foreign))

    async def remove_node(self, name: str) -> NodeView:
        """Remove an empty node."""
        return await self._send(calls.remove_node(name))

    # Tenants and tokens

    async def add_tenant(self, name: str, quota: Quota | None = None) -> TenantView:
        """Create a tenant."""
        return await self._send(calls.add_tenant(name, quota or Quota()))

    def tenants(self) -> AsyncIterator[TenantView]:
        """Iterate over all tenants, by name."""
        return self._list(calls.tenants())

    async def tenant(self, name: str) -> TenantView:
        """Return one tenant."""
        return await self._send(calls.tenant(name))

    async def change_quota(
        self,
        name: str,
        *,
        memory_slices: int | UnsetType | None = UNSET,
        compute_slices: int | UnsetType | None = UNSET,
        instances: int | UnsetType | None = UNSET,
        requests_per_second: float | UnsetType | None = UNSET,
        max_priority: int | UnsetType = UNSET,
        weight: float | UnsetType = UNSET,
        guarantee: int | UnsetType = UNSET,
        default_lease_seconds: float | UnsetType | None = UNSET,
        max_lease_seconds: float | UnsetType | None = UNSET,
    ) -> TenantView:
        """Change the given terms of a tenant; None removes a limit."""
        changes = QuotaPatch(
            memory_slices=memory_slices,
            compute_slices=compute_slices,
            instances=instances,
            requests_per_second=requests_per_second,
            max_priority=max_priority,
            weight=weight,
            guarantee=guarantee,
            default_lease_seconds=default_lease_seconds,
            max_lease_seconds=max_lease_seconds,
        )
        return await self._send(calls.change_quota(name, changes))

    async def remove_tenant(self, name: str) -> TenantView:
        """Remove a tenant that has no allocations."""
        return await self._send(calls.remove_tenant(name))

    async def issue_token(
        self,
        role: Role | str,
        *,
        tenant: str | None = None,
        node: str | None = None,
        note: str = "",
        expires_in_seconds: float | None = None,
    ) -> NewTokenView:
        """Issue a token; its secret is shown only once."""
        return await self._send(calls.issue_token(role, tenant, node, note, expires_in_seconds))

    def tokens(self) -> AsyncIterator[TokenView]:
        """Iterate over all tokens, without their secrets."""
        return self._list(calls.tokens())

    async def rotate_token(
        self,
        identity: str,
        *,
        overlap_seconds: float = 3600,
        expires_in_seconds: float | None = None,
    ) -> NewTokenView:
        """Replace a token; the old one stays valid for the overlap.

        The secret is shown only once. By default the new token expires when the old one would have.
        """
        call = calls.rotate_token(identity, overlap_seconds, expires_in_seconds)
        return await self._send(call)

    async def revoke_token(self, identity: str) -> TokenView:
        """Revoke a token."""
        return await self._send(calls.revoke_token(identity))

    async def whoami(self) -> WhoView:
        """Return the identity behind the token."""
        return await self._send(calls.whoami())

    # The cluster and the service

    async def cluster(self, *, gpus: bool = False) -> ClusterView:
        """Return the state of the cluster, with ``gpus`` for every GPU."""
        return await self._send(calls.cluster(gpus))

    async def stats(self, *, seconds: int = 3600, rejections: int = 50) -> StatsView:
        """Return accepted and rejected requests and utilization of the last seconds."""
        return await self._send(calls.stats(seconds, rejections))

    async def models(self) -> tuple[ModelView, ...]:
        """Return the GPU models in the service's catalog."""
        return (await self._send(calls.models())).models

    async def policies(self) -> tuple[PolicyView, ...]:
        """Return the placement policies of the service."""
        return (await self._send(calls.policies())).policies

    async def policy(self) -> PolicyStatus:
        """Return the policy in force, the demand as it was seen, and what rehearsals found."""
        return await self._send(calls.policy())

    async def plan(
        self,
        *,
        profile: str | None = None,
        model: str | None = None,
        budget: int | None = None,
        policy: str | None = None,
    ) -> PlanView:
        """Plan moves that make room for a profile or, without one, reduce fragmentation."""
        return await self._send(calls.plan(profile, model, budget, policy))

    async def carry_out(self, moves: Sequence[MoveBody]) -> int:
        """Apply the moves of a plan atomically; return their number."""
        return (await self._send(calls.carry_out(moves))).moves

    async def readiness(self) -> Readiness:
        """Return the readiness of the server that answers."""
        return await self._send(calls.readiness())

    async def clock(self) -> ClockView:
        """Return the service time and the wall clock of the server that answers."""
        return await self._send(calls.clock())

    async def accept_clock(self, step_seconds: float) -> ClockStepView:
        """Accept a step of the leader's wall clock, and continue service time from it."""
        return await self._send(calls.accept_clock(step_seconds))

    def audit(
        self,
        *,
        tenant: str | None = None,
        subject: str | None = None,
        kinds: str | Sequence[str] = (),
    ) -> AsyncIterator[EventView]:
        """Iterate over the journal, newest entries first."""
        return self._list(calls.audit(tenant, subject, kinds))

    async def events(self, after: int | str | None = None) -> AsyncGenerator[EventView, None]:
        """Follow events as they happen, without end; a broken stream is resumed.

        The first event is the one after ``after`` (0: all events) or, without it, the next one.
        Raises `ResyncError` after a restore, or if ``after`` is too old: read the state again.
        """
        position = event_stream.position_of(await self.readiness()) if after is None else str(after)
        follower = event_stream.EventFollower(self._endpoints, position)
        while True:
            try:
                async with self._http.stream(
                    "GET",
                    follower.url,
                    params=follower.query,
                    headers=follower.headers,
                    timeout=event_stream.STREAM_TIMEOUT,
                ) as response:
                    if follower.accept(response):
                        async for chunk in response.aiter_bytes():
                            for event in follower.feed(chunk):
                                yield event
                        delay = follower.broken()
                    else:
                        await response.aread()
                        delay = follower.refused(response)
            except httpx.RequestError as error:
                delay = follower.broken(error)
            await sleep(delay)

    async def backup(self) -> AsyncGenerator[bytes, None]:
        """Stream a backup of the running service; this needs an admin's token.

        The chunks are a file for `slicewise restore`. Check the digest at its end before use.
        """
        request = RetriedCall(self._endpoints, calls.backup())
        while True:
            started = False
            try:
                stream = self._http.stream("GET", request.url, headers=request.headers)
                async with stream as response:
                    if response.status_code == 200:
                        request.answered()
                        started = True
                        async for chunk in response.aiter_bytes():
                            yield chunk
                        return
                    await response.aread()
                    retry = request.read(response)
                    assert isinstance(retry, Retry)  # the only successful answer is a backup
            except httpx.RequestError as error:
                if started:
                    raise request.interrupted(error) from None
                retry = request.failed(error)
            await sleep(retry.delay)
