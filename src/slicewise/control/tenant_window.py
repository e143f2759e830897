"""A window of what was counted last, in which no tenant has more than its part.

The estimate of the demand decides which placement table serves all tenants. A tenant that floods
the service with requests, or repeats a rejected one in a loop, must not make it the estimate of its
own demand. So a tenant has at most the larger of two parts in the window: its part of the instances
that exist, which it cannot pretend, and an equal part among the tenants in the window.
"""

from __future__ import annotations

from collections import deque

from slicewise.journal.records import Seconds

SIZE = 1000
"""The instances in the window."""
FREE = 20
"""Instances that a tenant may always have in the window: with few, parts mean nothing."""
AGE: Seconds = 86_400.0
"""What is older leaves the window: a tenant that asks for nothing keeps no other tenant out."""


class TenantWindow:
    """The latest instances that were counted, by tenant."""

    def __init__(self, entries: tuple[tuple[Seconds, str, int], ...] = ()) -> None:
        """``entries`` are what `entries` returned."""
        self._entries = deque(entries)
        self._of: dict[str, int] = {}
        for _, tenant, count in entries:
            self._of[tenant] = self._of.get(tenant, 0) + count
        self._size = sum(self._of.values())

    @property
    def entries(self) -> tuple[tuple[Seconds, str, int], ...]:
        """Time, tenant and instances of what is in the window, oldest first."""
        return tuple(self._entries)

    def take(self, at: Seconds, tenant: str, count: int, held: int, total: int) -> int:
        """Return how many of so many instances count, and enter them.

        The tenant holds ``held`` of the ``total`` instances that exist.
        """
        entries = self._entries
        while entries and entries[0][0] < at - AGE:
            self._drop(entries[0][2])
        own = self._of.get(tenant, 0)
        tenants = len(self._of) + (not own)
        if held * tenants < total or not total:
            held, total = 1, tenants
        taken = min(count, SIZE)
        if held < total:  # it may go beyond its part by one instance, or all might be at theirs
            more = (held * self._size - total * own) // (total - held) + 1
            taken = max(0, min(taken, max(more, FREE - own)))
        if taken:
            entries.append((at, tenant, taken))
            self._of[tenant] = own + taken
            self._size += taken
            if self._size > SIZE:
                self._drop(self._size - SIZE)
        return taken

    def _drop(self, count: int) -> None:
        """Remove so many of the oldest instances."""
        self._size -= count
        while count:
            at, tenant, held = self._entries.popleft()
            left = max(0, held - count)
            if left:
                self._entries.appendleft((at, tenant, left))
            gone = held - left
            count -= gone
            own = self._of[tenant] - gone
            if own:
                self._of[tenant] = own
            else:
                del self._of[tenant]
