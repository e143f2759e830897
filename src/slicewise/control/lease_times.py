"""The times at which leases end and at which their tenants are warned, soonest first.

The commit loop sleeps until the next of them; then `leases` ends the allocation or warns its
tenant.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping

from slicewise.journal.entries import AllocationRecord, Seconds


def known_end(record: AllocationRecord) -> Seconds:
    """Return when the instances of a placed allocation leave, as far as is known; else infinity.

    The lease and a notice are certain. The expected duration is a hint; a tenant that extends the
    lease has given it up.
    """
    if record.ended is not None:
        return record.ended
    ends = math.inf if record.ends is None else record.ends
    if record.reclaimed_at is not None:
        ends = min(ends, record.reclaimed_at)
    if record.expected_seconds is None or record.placed is None or record.extended is not None:
        return ends
    return min(ends, record.placed + record.expected_seconds)


class LeaseTimes:
    """A heap with the next time of each lease: that of its warning, then that of its end.

    Times of leases that were extended or ended early are dropped lazily.
    """

    def __init__(self, allocations: Mapping[str, AllocationRecord], warning: Seconds = 0) -> None:
        """``warning`` is the time between a warning and the end of the lease; 0 is no warning."""
        self._allocations = allocations
        self._warning = warning
        self._times: list[tuple[Seconds, str]] = []
        self._limit = 100
        """The length at which times that no longer hold are dropped."""

    def __len__(self) -> int:
        return len(self._times)

    def add(self, record: AllocationRecord) -> None:
        """Add the next time of a lease that began, was extended, or got its warning."""
        time = self._next_time(record)
        if time is None:
            return
        heapq.heappush(self._times, (time, record.id))
        if len(self._times) > self._limit:
            self._times = sorted(filter(self._holds, set(self._times)))  # sorted lists are heaps
            self._limit = 2 * len(self._times) + 100

    @property
    def next_time(self) -> Seconds | None:
        """The next time at which a lease ends or a warning is due."""
        while self._times and not self._holds(self._times[0]):
            heapq.heappop(self._times)
        return self._times[0][0] if self._times else None

    def pop(self) -> str:
        """Remove the soonest time and return its allocation."""
        return heapq.heappop(self._times)[1]

    def _holds(self, added: tuple[Seconds, str]) -> bool:
        time, identity = added
        record = self._allocations.get(identity)
        return record is not None and self._next_time(record) == time

    def _next_time(self, record: AllocationRecord) -> Seconds | None:
        ends, lease = record.ends, record.lease
        if ends is None or lease is None:
            return None
        # Short leases get no warning: it would come as soon as the lease begins.
        if record.warned or not self._warning or lease < 2 * self._warning:
            return ends
        return ends - self._warning
