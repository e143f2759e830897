"""The leases of allocations: when each one ends.

The commit loop sleeps until the soonest end, and `handler.CommandHandler.expire` then ends the
allocations whose lease is over.
"""

from __future__ import annotations

import heapq
from collections.abc import Container

from slicewise.journal.entries import Seconds


class Leases:
    """The ends of leases, soonest first. Allocations that ended early are dropped lazily."""

    def __init__(self, allocations: Container[str]) -> None:
        self._allocations = allocations
        self._ends: list[tuple[Seconds, str]] = []
        self._limit = 100
        """The length at which leases of ended allocations are dropped."""

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, ends: Seconds, allocation: str) -> None:
        """Add the lease of an allocation."""
        heapq.heappush(self._ends, (ends, allocation))
        if len(self._ends) > self._limit:
            self._ends = [lease for lease in self._ends if lease[1] in self._allocations]
            heapq.heapify(self._ends)
            self._limit = 2 * len(self._ends) + 100

    @property
    def next_end(self) -> Seconds | None:
        """The soonest end of a lease."""
        while self._ends and self._ends[0][1] not in self._allocations:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else None

    def pop(self) -> str:
        """Remove the soonest lease and return its allocation."""
        return heapq.heappop(self._ends)[1]
