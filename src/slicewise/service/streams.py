"""How many event streams there are: each holds a connection for as long as it likes."""

from __future__ import annotations

import math
from collections import Counter

from slicewise.control.answers import RefusedError

RESERVED = 1 / 8
"""The share of all streams that tenants leave to those who operate the service."""


class Streams:
    """Counts the streams that are open, so that there are never too many."""

    def __init__(self, most: int, most_of_one: int) -> None:
        self._most = most
        self._most_of_tenants = most - math.ceil(most * RESERVED)
        self._most_of_one = most_of_one
        self._open: Counter[str | None] = Counter()

    @property
    def open(self) -> int:
        """How many there are."""
        return self._open.total()

    def enter(self, tenant: str | None) -> None:
        """Open one, unless there are too many."""
        if tenant is not None and self._open[tenant] >= self._most_of_one:
            raise RefusedError(
                429, f"tenant {tenant!r} has too many event streams open", retry_after=10
            )
        of_tenants = self.open - self._open[None]
        if self.open >= self._most or (tenant is not None and of_tenants >= self._most_of_tenants):
            raise RefusedError(503, "too many event streams are open", retry_after=10)
        self._open[tenant] += 1

    def leave(self, tenant: str | None) -> None:
        """Close one."""
        self._open[tenant] -= 1
        self._open += Counter()  # forget those who have none
