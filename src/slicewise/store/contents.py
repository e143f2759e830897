"""Everything a store holds, in the form it is kept in: what backups carry and `verify` reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from slicewise.control.entries import Seconds
from slicewise.store.chain import checksum


class StoredRow(NamedTuple):
    """A row of the journal; ``data`` is its entry as JSON."""

    seq: int
    at: Seconds
    epoch: int
    actor: str
    origin: str
    data: str
    chain: bytes
    """The digest of this row and of all before it."""
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
    checksum: bytes


class StoredImage(NamedTuple):
    """An image of the state after row ``seq``, as JSON."""

    seq: int
    at: Seconds
    data: str
    chain: bytes
    """The digest of row ``seq``."""
    checksum: bytes


class Head(NamedTuple):
    """Which history a journal tells, and from where to where."""

    history: str
    former: str
    """The histories that this one goes on from, the first one first, with blanks between."""
    base: int
    """The last row that is not kept any more, 0 if all are."""
    base_chain: bytes
    checksum: bytes
    """Of all of the above."""
    seq: int
    """The last row."""
    chain: bytes

    @property
    def intact(self) -> bool:
        """Whether it is as it was written."""
        return self.checksum == checksum(self.history, self.former, self.base, self.base_chain)


class Contents(Protocol):
    """What a store held at one moment; to be read once, in the order of the methods."""

    @property
    def last_seq(self) -> int:
        """The last row of that moment."""

    @property
    def head(self) -> Head:
        """Where the journal begins and ends, as it says itself."""

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
