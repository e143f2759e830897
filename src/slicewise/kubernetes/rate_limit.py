"""Limits on the requests of this client, so that a burst of pods does not overload the API."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

RATE, BURST = 200.0, 400
"""The default: requests per second, and how many may be sent at once."""
_MESSAGES = 4
"""Messages to pods, and events, have a part of this size, which allocations need not share."""


class RateLimit:
    """A token bucket; thread-safe."""

    def __init__(
        self,
        rate: float,
        burst: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate = rate
        self._burst = float(burst)
        self._clock = clock
        self._sleep = sleep
        self._tokens = self._burst
        """Less than 0 while requests wait for their turn."""
        self._at = clock()
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Wait until a request may be sent."""
        with self._lock:
            now = self._clock()
            self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate) - 1.0
            self._at = now
            delay = -self._tokens / self._rate
        if delay > 0:
            self._sleep(delay)


class RequestLimits:
    """The limits of one client, by what a request is for."""

    def __init__(self, rate: float = RATE, burst: int = BURST) -> None:
        self._all = RateLimit(rate, burst)
        self._messages = RateLimit(rate / _MESSAGES, max(1, burst // _MESSAGES))

    def wait(self, method: str, path: str) -> None:
        """Wait until a request may be sent; one for the lease never waits."""
        if "/leases" in path:
            return
        message = method != "GET" and ("/pods/" in path or "/events" in path)
        (self._messages if message else self._all).wait()
