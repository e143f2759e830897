"""The protocols of storage and time, which other packages implement."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from slicewise.control.answers import Answer
from slicewise.control.snapshot import Snapshot
from slicewise.core.errors import SlicewiseError
from slicewise.journal.entries import Row, Seconds


class StoreError(SlicewiseError):
    """Raised when the database fails; the outcome of a write is unknown."""


class DamagedError(StoreError):
    """Raised when stored data is damaged; the message says what to do."""


class FencedError(SlicewiseError):
    """Raised when another process leads; nothing was written."""


class IdempotencyKey(NamedTuple):
    """An idempotency key and its owner."""

    tenant: str
    """The owner: a tenant's id, or the staff that acts for a tenant."""
    key: str


class Kept(NamedTuple):
    """The answer stored for an idempotency key."""

    digest: str
    """The digest of the request. A key is valid for one request only."""
    answer: Answer


DAMAGED = Kept("", Answer(0, b""))
"""Stands in for a stored answer that is damaged."""


class Journal(Protocol):
    """Stores rows, answers and snapshots. All methods may raise StoreError."""

    def answers(self, keys: Sequence[IdempotencyKey]) -> dict[IdempotencyKey, Kept]:
        """Return the stored answers for these keys; `DAMAGED` for a damaged one."""

    def append(
        self,
        epoch: int,
        rows: Sequence[Row],
        answers: Iterable[tuple[IdempotencyKey, Kept, Seconds]],
    ) -> None:
        """Commit rows and answers in one transaction; raise FencedError if the epoch is over."""

    def rows(self, after: int, limit: int) -> list[Row]:
        """Return the rows after ``after`` in order; raise DamagedError if their chain is broken."""

    def history(
        self,
        *,
        before: int | None,
        limit: int,
        tenant: str | None = None,
        subject: str | None = None,
        kinds: Sequence[str] = (),
    ) -> list[Row]:
        """Return the rows before ``before``, newest first, filtered by tenant, subject and kinds.

        ``tenant`` is an id. `entries.index_keys` defines the values that the filters match.
        """

    def last_snapshot(self) -> Snapshot | None:
        """Return the latest intact snapshot."""

    def save_snapshot(self, snapshot: Snapshot) -> None:
        """Store a snapshot, from which the next start begins."""


class Leader(NamedTuple):
    """The leader: the one process that may write."""

    epoch: int
    """Grows with every change of leader; writes of an older epoch are refused."""
    holder: str
    address: str
    """The URL that accepts writes."""
    until: Seconds
    """The end of its lease, by the database's clock."""
    lease: Seconds
    """The length of its lease."""
    steady: Seconds
    """Its steady time at the last renewal; before the first, that of its predecessor."""


class Span(NamedTuple):
    """The history of a journal, and the range of its rows."""

    history: str
    """The id of the history. A restored journal continues under a new one."""
    former: tuple[str, ...]
    """The histories that this one continues."""
    base: int
    """The last row that was pruned; 0 if none was."""
    last: int
    """The last row."""


class Store(Journal, Protocol):
    """A journal with leader leases, retention and backups; safe to call from any thread.

    All methods may raise StoreError. After a failed call, the next one connects again.
    """

    def lead(self, holder: str, address: str, seconds: float) -> int | None:
        """Become the leader and return the new epoch; None while another lease is valid.

        A lease that ends later than its length from now was granted before the database's clock
        was set back, and counts as expired.
        """

    def renew(self, epoch: int, seconds: float, steady: Seconds) -> bool:
        """Renew the lease and store the steady time; return False if the epoch is over."""

    def reached(self) -> Seconds:
        """Return the steady time that the last leader stored; 0 if there was none."""

    def resign(self, epoch: int) -> None:
        """End the lease now; do nothing if the epoch is over."""

    def leader(self) -> Leader | None:
        """Return the leader, if a lease is valid."""

    def last_seq(self) -> int:
        """Return the sequence number of the last row; 0 if there is none."""

    def span(self) -> Span:
        """Return the history and the range of stored rows."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Damage that the store works around, one sentence each."""

    def wait_for_rows(self, after: int, seconds: float) -> bool:
        """Block until rows after ``after`` exist, or for ``seconds``; return whether they exist."""

    def forget_answers(self, before: Seconds) -> int:
        """Delete some answers given before that time; return how many, 0 once none is left."""

    def prune(self, epoch: int, before: Seconds, archive: Path | None) -> int:
        """Delete some rows written before that time; return how many, 0 once none is left.

        If ``archive`` is a folder, they are appended to files in it first. Rows that a start needs
        are kept. Raises FencedError if the epoch is over.
        """

    def backup(self) -> Iterator[bytes]:
        """Yield a backup in pieces. Each step may block; commits continue between the steps."""

    def close(self) -> None:
        """Close the database, and end waits for rows."""


class Clock(Protocol):
    """A clock."""

    def __call__(self) -> Seconds:
        """Return the Unix time."""


def rows_after(journal: Journal, seq: int, page: int = 10_000) -> Iterator[Row]:
    """Yield all rows after ``seq``, reading page by page."""
    while rows := journal.rows(seq, page):
        yield from rows
        seq = rows[-1].seq
