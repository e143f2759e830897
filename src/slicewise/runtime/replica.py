"""The replica: the committed state, which serves all reads.

It belongs to the event loop: it never changes while a request is being answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from slicewise.control.state import State
from slicewise.journal.entries import (
    Row,
    TenantRef,
    TenantRemoved,
    TokenExpiring,
    TokenRevoked,
    concerns,
)

KEPT_ROWS = 10_000
"""Rows kept in memory for event streams; older ones are read from the store."""
_ACCESS_CHANGES = (TenantRemoved, TokenExpiring, TokenRevoked)
"""Entries that may end a listener's access."""


class Replica:
    """A state that applies committed rows, the latest rows, and the listeners to them."""

    def __init__(self, state: State, keep: int = KEPT_ROWS) -> None:
        self.state = state
        self._keep = keep
        self._recent: list[Row] = []
        """The latest rows: at least ``keep``, at most twice as many."""
        self._listeners: dict[TenantRef | None, set[asyncio.Event]] = {}
        """By tenant; None listens to all tenants."""
        self.on_change: Callable[[], None] = lambda: None
        """Called after every change."""

    @property
    def seq(self) -> int:
        """The last applied row."""
        return self.state.seq

    def apply(self, rows: Sequence[Row]) -> None:
        """Apply committed rows; rows that were applied before are skipped."""
        known, apply = self.state.seq, self.state.apply
        fresh = [row for row in rows if row.seq > known]
        if not fresh:
            return
        for row in fresh:
            apply(row)
        self._recent += fresh
        if len(self._recent) > 2 * self._keep:
            del self._recent[: -self._keep]
        self.notify(self._concerned(fresh))

    def _concerned(self, rows: Sequence[Row]) -> set[TenantRef | None] | None:
        """The keys of the listeners that rows concern; None for all listeners."""
        if not self._listeners:
            return set()
        if any(isinstance(row.entry, _ACCESS_CHANGES) for row in rows):
            return None
        return {None, *(concerns(row.entry)[0] for row in rows)}

    def since(self, seq: int, limit: int) -> list[Row] | None:
        """At most ``limit`` rows after ``seq``; None if they are no longer in memory."""
        if seq >= self.state.seq:
            return []
        at = seq - self.state.seq + len(self._recent)
        return None if at < 0 else self._recent[at : at + limit]

    @contextmanager
    def listen(self, tenant: TenantRef | None, news: asyncio.Event) -> Iterator[None]:
        """Set an event on every row that concerns a tenant, or on every row."""
        listeners = self._listeners.setdefault(tenant, set())
        listeners.add(news)
        try:
            yield
        finally:
            listeners.discard(news)
            if not listeners and self._listeners.get(tenant) is listeners:
                del self._listeners[tenant]

    def notify(self, tenants: Iterable[TenantRef | None] | None = None) -> None:
        """Set the events of the listeners to these tenants, or of all listeners."""
        for tenant in list(self._listeners) if tenants is None else tenants:
            for news in self._listeners.get(tenant, ()):
                news.set()
        self.on_change()
