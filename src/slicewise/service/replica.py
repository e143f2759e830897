"""The replica: what is committed, for everybody who only wants to look.

It belongs to the event loop: it changes between two answers, never during one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from slicewise.control.entries import Row
from slicewise.control.state import State

KEPT_ROWS = 10_000
"""Rows kept at hand for those who follow the events; older ones come from the store."""


class Replica:
    """A state that follows the journal, and its latest rows."""

    def __init__(self, state: State, keep: int = KEPT_ROWS) -> None:
        self.state = state
        self._recent: deque[Row] = deque(maxlen=keep)
        self._news: asyncio.Event = asyncio.Event()
        self.on_news: Callable[[], None] = lambda: None
        """Called whenever those who wait look up."""

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
        self._recent.extend(fresh)
        self.wake()

    def since(self, seq: int, limit: int) -> list[Row] | None:
        """The rows behind ``seq``, as many as that; None when they are not at hand any more."""
        if seq >= self.state.seq:
            return []
        first = self.state.seq - len(self._recent) + 1
        if seq + 1 < first:
            return None
        return list(islice(self._recent, seq + 1 - first, seq + 1 - first + limit))

    def wake(self) -> None:
        """Let those who wait for news look up."""
        self._news.set()
        self._news = asyncio.Event()
        self.on_news()

    async def news(self, seconds: float) -> None:
        """Wait for new rows, or so long."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            pass
