"""Limits on what one client may cost the others: turns, requests in flight, rates, connections.

One thread answers all requests. Without turns, a caller with a hundred pending requests is served a
hundred times before the single request of another caller. With turns, that request waits for a few
milliseconds of work, no matter how many requests the other callers have.
"""

from __future__ import annotations

import asyncio
import math
import resource
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

from slicewise.config.addresses import block_of
from slicewise.config.settings import Settings
from slicewise.control.answers import RefusedError
from slicewise.control.state import State
from slicewise.journal.entries import Seconds, TenantRef
from slicewise.runtime.fair_queue import FairQueue

SLICE_SECONDS = 0.001
"""Time for requests in one iteration of the event loop; further requests wait for the next one."""
MAX_TURNS = 16
"""Turns granted in one iteration, however short they are: each causes further work, such as
reading the caller's next request."""

SPARE_FILES = 128
"""File descriptors reserved for the database, logs and listeners."""

_KEPT_OWNERS, _KEPT_ADDRESSES = 100_000, 10_000
"""Token buckets kept for authenticated callers, and for client addresses."""
_HELLO_BURST = 10.0
"""An agent that lost its session sends a few hellos in a row, not more."""

STAFF_STREAMS = 1 / 8
"""Share of all event streams that is reserved for operators."""

_Future = asyncio.Future[None]


# Turns on the event loop


class FairTurns:
    """Shares each iteration of the event loop (a round) between callers.

    A caller takes a turn, then works without awaiting. A turn is granted immediately while the
    round has time left. Otherwise callers queue, and each following round grants as many turns as
    fit, rotating between callers.
    """

    def __init__(self, timer: Callable[[], float], slice_seconds: float = SLICE_SECONDS) -> None:
        self._timer = timer
        self._slice = slice_seconds
        self._queue: FairQueue[_Future] = FairQueue()
        self._started = 0.0
        """Time of the first turn in this round; 0 before it."""
        self._resumed = 0.0
        """Time when the requests that got the last turns went on."""
        self._cost = slice_seconds
        """Moving average of the duration of a turn."""

    async def take(self, caller: Hashable) -> None:
        """Wait for the caller's turn."""
        if not self._started:
            self._start_round()
        elif self._queue or self._timer() >= self._started + self._slice:
            turn: _Future = asyncio.get_running_loop().create_future()
            self._queue.append(caller, turn)
            await turn

    def _start_round(self) -> None:
        self._started = self._timer()
        asyncio.get_running_loop().call_soon(self._next_round)

    def _next_round(self) -> None:
        self._started = 0.0
        if not self._queue:
            return
        self._start_round()
        turns = min(MAX_TURNS, max(1, int(self._slice / self._cost)))
        granted = 0
        # The next iteration of the event loop runs these two, and between them the requests that
        # get a turn here; work of others, such as a commit, is not counted.
        call_soon = asyncio.get_running_loop().call_soon
        call_soon(self._begin_turns)
        while self._queue and granted < turns:
            turn = self._queue.popleft()
            if not turn.done():  # its request may have been cancelled
                turn.set_result(None)
                granted += 1
        call_soon(self._end_turns, granted)

    def _begin_turns(self) -> None:
        self._resumed = self._timer()

    def _end_turns(self, granted: int) -> None:
        if granted:
            self._cost += ((self._timer() - self._resumed) / granted - self._cost) / 8


class FairLock:
    """A lock that rotates between the callers waiting for it."""

    def __init__(self) -> None:
        self._queue: FairQueue[_Future] = FairQueue()
        self._held = False

    @asynccontextmanager
    async def hold(self, caller: Hashable) -> AsyncIterator[None]:
        """Hold the lock."""
        if self._held:
            turn: _Future = asyncio.get_running_loop().create_future()
            self._queue.append(caller, turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._release()
                raise
        self._held = True
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        """Pass the lock to the next waiter, if there is one."""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._held = False


# Requests in flight


class InFlight:
    """Limits the requests that each caller has in flight, and its unread response bytes."""

    def __init__(self, requests: int, unread: int, total_unread: int) -> None:
        self._max_requests = requests
        self._max_unread = unread
        self._max_total_unread = total_unread
        self._requests: dict[Hashable, int] = {}
        self._unread: dict[Hashable, int] = {}
        self.unread = 0
        """Bytes of all large responses being sent."""

    @property
    def requests(self) -> int:
        """Requests in flight."""
        return sum(self._requests.values())

    def begin(self, caller: Hashable) -> None:
        """Count a request, or refuse it if the caller has too many in flight."""
        count = self._requests.get(caller, 0)
        if count >= self._max_requests:
            raise RefusedError(
                429,
                f"this caller has {self._max_requests} requests in flight, the maximum: wait for "
                "their answers first",
                retry_after=1,
            )
        self._requests[caller] = count + 1

    def end(self, caller: Hashable) -> None:
        """Stop counting a request that was answered or abandoned."""
        _subtract(self._requests, caller, 1)

    def check_unread(self, caller: Hashable, size: int) -> None:
        """Refuse a response of this size if the caller has too many unread bytes.

        A caller without unread bytes may receive one response of any size.
        """
        unread = self._unread.get(caller, 0)
        if unread and (
            unread + size > self._max_unread or self.unread + size > self._max_total_unread
        ):
            raise RefusedError(
                429,
                f"this caller has {unread:,} unread bytes of answers: read them first",
                retry_after=1,
            )

    @contextmanager
    def sending(self, caller: Hashable, size: int) -> Iterator[None]:
        """Count a large response as unread while it is being sent."""
        self.check_unread(caller, size)
        self._unread[caller] = self._unread.get(caller, 0) + size
        self.unread += size
        try:
            yield
        finally:
            _subtract(self._unread, caller, size)
            self.unread -= size


def _subtract(counts: dict[Hashable, int], caller: Hashable, number: int) -> None:
    left = counts[caller] - number
    if left:
        counts[caller] = left
    else:
        del counts[caller]


# Rates


class TokenBuckets:
    """Token buckets by key. Beyond ``keep`` buckets, the least recently used one is dropped."""

    def __init__(self, timer: Callable[[], Seconds], keep: int) -> None:
        self._timer = timer
        self._keep = keep
        self._buckets: OrderedDict[str, tuple[float, Seconds]] = OrderedDict()
        """By key: tokens left, and when they were counted."""

    def take(self, key: str, rate: float, burst: float) -> Seconds:
        """Take a token; return 0, or the seconds until the next token if there is none."""
        now = self._timer()
        tokens, counted = self._buckets.get(key, (burst, now))
        tokens = min(burst, tokens + (now - counted) * rate)
        wait = 0.0 if tokens >= 1 else (1 - tokens) / rate
        self._buckets[key] = tokens - (not wait), now
        self._buckets.move_to_end(key)
        if len(self._buckets) > self._keep:
            self._buckets.popitem(last=False)
        return wait

    def __len__(self) -> int:
        return len(self._buckets)


class RateLimits:
    """Rate limits of tenants, agents and clients without a token.

    Tokens of administrators, operators and cluster-wide readers have no rate limit.
    """

    def __init__(self, settings: Settings, timer: Callable[[], Seconds]) -> None:
        self._settings = settings
        self.on_limited: Callable[[str], None] = lambda limit: None
        """Called with the name of the limit that delayed or refused a request."""
        self._tenants = TokenBuckets(timer, _KEPT_OWNERS)
        self._agents = TokenBuckets(timer, _KEPT_OWNERS)
        self._hellos = TokenBuckets(timer, _KEPT_OWNERS)
        self._strangers = TokenBuckets(timer, _KEPT_ADDRESSES)
        self._visitors = TokenBuckets(timer, _KEPT_ADDRESSES)

    def check_tenant(self, state: State, tenant: TenantRef) -> None:
        """Count a request of a tenant, or refuse it."""
        known = state.tenants.get(tenant.id)
        rate = known.quota.requests_per_second if known is not None else None
        if rate is None:
            rate = self._settings.requests_per_second
        wait = self._tenants.take(tenant.id, rate, max(rate, 1.0))
        if wait:
            detail = f"tenant {tenant.name!r} sends more than {rate:g} requests a second"
            raise self._refusal("tenant", detail, wait)

    def check_agent(self, node: str) -> None:
        """Count a request of a node's agent, or refuse it."""
        rate = self._settings.agent_requests_per_second
        wait = self._agents.take(node, rate, max(rate, 1.0))
        if wait:
            detail = f"the agent of node {node!r} sends more than {rate:g} requests a second"
            raise self._refusal("agent", detail, wait)

    def check_hello(self, node: str) -> None:
        """Count a hello, or refuse it: each may bring a new GPU model, which is expensive."""
        limit = self._settings.hellos_per_minute
        wait = self._hellos.take(node, limit / 60, min(_HELLO_BURST, max(limit, 1.0)))
        if wait:
            detail = f"the agent of node {node!r} sends more than {limit:g} hellos a minute"
            raise self._refusal("hello", detail, wait)

    def count_stranger(self, block: str) -> Seconds:
        """Count a request without a valid token, by block of addresses.

        Return 0 within the limit, or the seconds until the next request is within it.
        """
        rate = self._settings.strangers_per_second
        wait = self._strangers.take(block, rate, max(rate, 1.0))
        if wait:
            self.on_limited("stranger")
        return wait

    def check_visitor(self, block: str) -> None:
        """Count a request that needs no token, by block of addresses, or refuse it."""
        rate = self._settings.strangers_per_second
        wait = self._visitors.take(block, rate, max(rate, 1.0))
        if wait:
            detail = f"this address sends more than {rate:g} requests a second without a token"
            raise self._refusal("visitor", detail, wait)

    def _refusal(self, limit: str, detail: str, wait: Seconds) -> RefusedError:
        self.on_limited(limit)
        return RefusedError(429, detail, retry_after=wait)


# Connections and event streams


class Connection(Protocol):
    """An open connection."""

    @property
    def idle(self) -> bool:
        """Whether no request is being answered on it."""

    def abort(self) -> None:
        """Close it immediately."""


class Connections:
    """The open connections by client. One client cannot take them all.

    Beyond the limit, the client with the most connections loses one: its oldest idle connection,
    or its newest if none is idle.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_client: dict[str, dict[Connection, None]] = {}
        """In the order in which they were opened."""
        self.open = 0
        self.aborted = 0

    def add(self, connection: Connection, address: str) -> None:
        """Count a new connection; abort one if there are too many."""
        self._by_client.setdefault(block_of(address), {})[connection] = None
        self.open += 1
        if self.open > self._limit:
            self._abort_one()

    def remove(self, connection: Connection, address: str) -> None:
        """Stop counting a closed connection."""
        client = block_of(address)
        own = self._by_client[client]
        del own[connection]
        self.open -= 1
        if not own:
            del self._by_client[client]

    def _abort_one(self) -> None:
        own = max(self._by_client.values(), key=len)
        idle = (connection for connection in own if connection.idle)
        self.aborted += 1
        next(idle, next(reversed(own))).abort()


def raise_file_limit(connections: int) -> int:
    """Allow file descriptors for so many connections; return how many the system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return connections if soft == resource.RLIM_INFINITY else min(connections, soft - SPARE_FILES)


class Streams:
    """Counts open event streams. Each holds a connection for an unlimited time."""

    def __init__(self, limit: int, tenant_limit: int) -> None:
        self._limit = limit
        self._all_tenants_limit = limit - math.ceil(limit * STAFF_STREAMS)
        self._tenant_limit = tenant_limit
        self._open: Counter[TenantRef | None] = Counter()

    @property
    def open(self) -> int:
        """The number of open streams."""
        return self._open.total()

    def add(self, tenant: TenantRef | None) -> None:
        """Count a new stream, or refuse it if there are too many."""
        if tenant is not None and self._open[tenant] >= self._tenant_limit:
            raise RefusedError(
                429, f"tenant {tenant.name!r} has too many event streams open", retry_after=10
            )
        of_tenants = self.open - self._open[None]
        if self.open >= self._limit or (
            tenant is not None and of_tenants >= self._all_tenants_limit
        ):
            raise RefusedError(503, "too many event streams are open", retry_after=10)
        self._open[tenant] += 1

    def remove(self, tenant: TenantRef | None) -> None:
        """Stop counting a closed stream."""
        self._open[tenant] -= 1
        self._open += Counter()  # drops tenants without a stream
