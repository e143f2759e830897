"""Rate limits: a bucket for every tenant, filled at the rate it may ask."""

from __future__ import annotations

from collections.abc import Callable

from slicewise.control.answers import RefusedError
from slicewise.control.entries import Seconds
from slicewise.control.state import State

_SPARE = 64
"""Buckets of tenants that left are thrown away when there are so many more than tenants."""


class Rates:
    """Counts how fast tenants ask; those who belong to none are not counted."""

    def __init__(self, default: float, timer: Callable[[], Seconds]) -> None:
        self._default = default
        self._timer = timer
        self._buckets: dict[str, tuple[float, Seconds]] = {}
        """By tenant: how many requests it had left, and when."""

    def count(self, state: State, tenant: str) -> None:
        """Let a request pass, or say when to come again.

        A bucket holds what comes in within a second, and one request at least.
        """
        standing = state.tenants.get(tenant)
        rate = standing.quota.requests_per_second if standing is not None else None
        if rate is None:
            rate = self._default
        now = self._timer()
        full = max(rate, 1.0)
        left, then = self._buckets.get(tenant, (full, now))
        left = min(full, left + (now - then) * rate)
        if left < 1:
            self._buckets[tenant] = left, now
            raise RefusedError(
                429,
                f"tenant {tenant!r} asks more often than {rate:g} times a second",
                retry_after=(1 - left) / rate,
            )
        self._buckets[tenant] = left - 1, now
        if len(self._buckets) > len(state.tenants) + _SPARE:
            self._buckets = {t: b for t, b in self._buckets.items() if t in state.tenants}
