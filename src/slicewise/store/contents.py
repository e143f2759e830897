"""Everything a store holds, in the form it is kept in: what backups carry and `verify` reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from slicewise.control.entries import Seconds


class StoredRow(NamedTuple):
    """A row of the journal; ``data`` is its entry as JSON."""

    seq: int
    at: Seconds
    epoch: int
    actor: str
    origin: str
    data: str
    filed: tuple[str, str | None, str] | None = None
    """The kind, tenant and subject under which it is found, where it is found by them."""


class StoredAnswer(NamedTuple):
    """An answer kept for an idempotency key; ``seq`` was the last row when it was given."""

    tenant: str
    key: str
    digest: str
    status: int
    body: str
    at: Seconds
    seq: int


class StoredImage(NamedTuple):
    """An image of the state after row ``seq``, as JSON."""

    seq: int
    at: Seconds
    data: str


class Contents(Protocol):
    """What a store held at one moment; to be read once, in the order of the methods."""

    @property
    def last_seq(self) -> int:
        """The last row of that moment."""

    @property
    def epoch(self) -> int:
        """The last epoch of that moment."""

    def damage(self) -> list[str]:
        """What the database itself finds wrong with its files, where it can say so."""

    def images(self) -> Iterator[StoredImage]:
        """The images, the oldest first."""

    def answers(self) -> Iterator[StoredAnswer]:
        """The answers."""

    def rows(self) -> Iterator[StoredRow]:
        """The journal in order."""
