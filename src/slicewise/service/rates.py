"""Rate limits: buckets by key, each filled at the rate at which its owner may ask."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from slicewise.control.answers import RefusedError
from slicewise.control.entries import Seconds
from slicewise.control.state import State
from slicewise.service.settings import Settings

_OWNERS, _ADDRESSES = 100_000, 10_000
"""Buckets kept: of those who have a token, and of those who have none and are any number."""
_HELLOS_AT_ONCE = 10.0
"""An agent that finds its session gone says hello a few times in a row, not more."""


class Buckets:
    """Token buckets; the one that was not used for longest is forgotten when there are too many."""

    def __init__(self, timer: Callable[[], Seconds], keep: int) -> None:
        self._timer = timer
        self._keep = keep
        self._left: OrderedDict[str, tuple[float, Seconds]] = OrderedDict()
        """By key: how many requests were left, and when."""

    def take(self, key: str, rate: float, burst: float) -> Seconds:
        """Take a request out of a bucket: 0 if it may pass, or the seconds until the next may."""
        now = self._timer()
        left, then = self._left.get(key, (burst, now))
        left = min(burst, left + (now - then) * rate)
        wait = 0.0 if left >= 1 else (1 - left) / rate
        self._left[key] = left - (not wait), now
        self._left.move_to_end(key)
        if len(self._left) > self._keep:
            self._left.popitem(last=False)
        return wait

    def __len__(self) -> int:
        return len(self._left)


class Limits:
    """How often tenants, agents and strangers may ask.

    Administrators, operators and readers of everything are not limited: they are trusted with more
    than this.
    """

    def __init__(self, settings: Settings, timer: Callable[[], Seconds]) -> None:
        self._settings = settings
        self.on_limited: Callable[[str], None] = lambda limit: None
        """Told which limit kept a request from being answered."""
        self._tenants = Buckets(timer, _OWNERS)
        self._agents = Buckets(timer, _OWNERS)
        self._hellos = Buckets(timer, _OWNERS)
        self._strangers = Buckets(timer, _ADDRESSES)
        self._visitors = Buckets(timer, _ADDRESSES)

    def tenant(self, state: State, tenant: str) -> None:
        """Count a request of a tenant."""
        standing = state.tenants.get(tenant)
        rate = standing.quota.requests_per_second if standing is not None else None
        if rate is None:
            rate = self._settings.requests_per_second
        wait = self._tenants.take(tenant, rate, max(rate, 1.0))
        if wait:
            sentence = f"tenant {tenant!r} asks more often than {rate:g} times a second"
            raise self._refusal("tenant", sentence, wait)

    def agent(self, node: str) -> None:
        """Count a request of a node's agent."""
        rate = self._settings.agent_requests_per_second
        wait = self._agents.take(node, rate, max(rate, 1.0))
        if wait:
            sentence = f"the agent of node {node!r} asks more often than {rate:g} times a second"
            raise self._refusal("agent", sentence, wait)

    def hello(self, node: str) -> None:
        """Count a hello of a node's agent: each may bring a new GPU model, which is much work."""
        most = self._settings.hellos_per_minute
        wait = self._hellos.take(node, most / 60, min(_HELLOS_AT_ONCE, max(most, 1.0)))
        if wait:
            sentence = f"node {node!r} says hello more often than {most:g} times a minute"
            raise self._refusal("hello", sentence, wait)

    def stranger(self, block: str) -> Seconds:
        """Count a request that needs a valid token and has none, from a block of addresses.

        Returns 0 if it is answered as any other, or the seconds until the next one is.
        """
        rate = self._settings.strangers_per_second
        wait = self._strangers.take(block, rate, max(rate, 1.0))
        if wait:
            self.on_limited("stranger")
        return wait

    def visitor(self, block: str) -> None:
        """Count a request that needs no token, such as for a page, from a block of addresses."""
        rate = self._settings.strangers_per_second
        wait = self._visitors.take(block, rate, max(rate, 1.0))
        if wait:
            sentence = f"this address asks more often than {rate:g} times a second"
            raise self._refusal("visitor", sentence, wait)

    def _refusal(self, limit: str, sentence: str, wait: Seconds) -> RefusedError:
        self.on_limited(limit)
        return RefusedError(429, sentence, retry_after=wait)
