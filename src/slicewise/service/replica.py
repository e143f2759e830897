"""The replica: what is committed, for everybody who only wants to look.

It belongs to the event loop: it changes between two answers, never during one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from slicewise.control.entries import Row, TenantRemoved, TokenExpiring, TokenRevoked, concerns
from slicewise.control.state import State

KEPT_ROWS = 10_000
"""Rows kept at hand for those who follow the events; older ones come from the store."""
_RIGHTS = (TenantRemoved, TokenExpiring, TokenRevoked)
"""Entries that may end the right of a listener to listen."""


class Replica:
    """A state that follows the journal, and its latest rows."""

    def __init__(self, state: State, keep: int = KEPT_ROWS) -> None:
        self.state = state
        self._keep = keep
        self._recent: list[Row] = []
        """The last rows, at least as many as are to be kept."""
        self._listeners: dict[str | None, set[asyncio.Event]] = {}
        """By tenant they listen for, or None for all."""
        self.on_news: Callable[[], None] = lambda: None
        """Called with every change."""

    @property
    def seq(self) -> int:
        """The last row it knows."""
        return self.state.seq

    def take(self, rows: Sequence[Row]) -> None:
        """Take in committed rows; those known already are passed over."""
        known, apply = self.state.seq, self.state.apply
        fresh = [row for row in rows if row.seq > known]
        if not fresh:
            return
        for row in fresh:
            apply(row)
        self._recent += fresh
        if len(self._recent) > 2 * self._keep:
            del self._recent[: -self._keep]
        self.wake(self._concerned(fresh))

    def _concerned(self, rows: Sequence[Row]) -> set[str | None] | None:
        """The tenants that rows concern, and those who see all; None if it may be anyone."""
        if any(isinstance(row.entry, _RIGHTS) for row in rows):
            return None
        return {None, *(concerns(row.entry)[0] for row in rows)} if self._listeners else set()

    def since(self, seq: int, limit: int) -> list[Row] | None:
        """The rows behind ``seq``, as many as that; None when they are not at hand any more."""
        if seq >= self.state.seq:
            return []
        at = seq - self.state.seq + len(self._recent)
        return None if at < 0 else self._recent[at : at + limit]

    @contextmanager
    def listen(self, tenant: str | None, news: asyncio.Event) -> Iterator[None]:
        """Have an event set by every row that concerns a tenant, or by all rows."""
        listeners = self._listeners.setdefault(tenant, set())
        listeners.add(news)
        try:
            yield
        finally:
            listeners.discard(news)
            if not listeners and self._listeners.get(tenant) is listeners:
                del self._listeners[tenant]

    def wake(self, tenants: Iterable[str | None] | None = None) -> None:
        """Set the events of all listeners, or of those to some tenants."""
        for tenant in list(self._listeners) if tenants is None else tenants:
            for news in self._listeners.get(tenant, ()):
                news.set()
        self.on_news()
