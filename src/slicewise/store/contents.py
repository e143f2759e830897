"""The raw contents of a store, as a backup contains and `verify` reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from sqlalchemy import Connection, func, literal, or_, select, tuple_

from slicewise.control.ports import StoreError
from slicewise.journal.entries import Seconds
from slicewise.store.checksums import checksum
from slicewise.store.schema import answers, head, history, journal, leader, snapshots

PAGE = 1_000
"""Rows read at a time when everything is read; commits on SQLite wait for a page to be read."""


SNAPSHOTS_KEPT = 2
"""The last snapshot, and one more in case the last is damaged."""


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
    """The kind, tenant and subject it is indexed by; None if the source has no index."""


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


class StoredSnapshot(NamedTuple):
    """A snapshot of the state after row ``seq``, as JSON."""

    seq: int
    at: Seconds
    data: str
    chain: bytes
    """The digest of row ``seq``."""
    checksum: bytes


class JournalHead(NamedTuple):
    """The history that a journal belongs to, and its first and last row."""

    history: str
    former: str
    """The histories that this one continues, oldest first, separated by blanks."""
    base: int
    """The last row that has been pruned, 0 if none has."""
    base_chain: bytes
    checksum: bytes
    """Of all of the above."""
    seq: int
    """The last row."""
    chain: bytes

    @property
    def intact(self) -> bool:
        """Whether the checksum matches."""
        return self.checksum == checksum(self.history, self.former, self.base, self.base_chain)


class Contents(Protocol):
    """The contents of a store at one time; read once, in the order of the methods."""

    @property
    def last_seq(self) -> int:
        """The last row at that time."""

    @property
    def head(self) -> JournalHead:
        """Where the journal begins and ends, as recorded beside it."""

    @property
    def epoch(self) -> int:
        """The last epoch at that time."""

    def damage(self) -> list[str]:
        """The problems that the database itself finds in its files, if it can check them."""

    def snapshots(self) -> Iterator[StoredSnapshot]:
        """The snapshots, oldest first."""

    def answers(self) -> Iterator[StoredAnswer]:
        """The answers."""

    def rows(self) -> Iterator[StoredRow]:
        """The journal in order."""


class Readable(Protocol):
    """A store that can be read."""

    def session(self) -> AbstractContextManager[Connection]:
        """A connection on which every statement is its own transaction."""

    def damage(self) -> list[str]:
        """The problems that the database itself finds in its files."""


def head_of(connection: Connection) -> JournalHead:
    """Where the journal begins and ends."""
    return JournalHead(*connection.execute(_HEAD).one())


def stored_row(found: Sequence[Any]) -> StoredRow:
    """A row of the table ``journal``."""
    seq, at, epoch, actor, origin, kind, tenant, subject, data, chain = found
    return StoredRow(seq, at, epoch, actor, origin, data, chain, (kind, tenant, subject))


def chain_at(connection: Connection, seq: int) -> bytes | None:
    """The digest of a row, or of the last row that has been pruned."""
    found: bytes | None = connection.execute(
        select(journal.c.chain).where(journal.c.seq == seq)
    ).scalar()
    if found is not None:
        return found
    begins = head_of(connection)
    return begins.base_chain if begins.base == seq else None


class StoreContents:
    """The contents of a store up to its current last row.

    They are read page by page, so that commits go on in between. Rows and snapshots never change,
    and an answer names the last row before it.
    """

    def __init__(self, store: Readable) -> None:
        self._store = store
        with store.session() as connection:
            *found, self.last_seq, self.epoch = connection.execute(_ENDS).one()
        self.head = JournalHead(*found)

    def damage(self) -> list[str]:
        """The problems that the database finds in its files."""
        return self._store.damage()

    def snapshots(self) -> Iterator[StoredSnapshot]:
        """The snapshots, oldest first."""
        reached = -1
        while True:
            with self._store.session() as connection:
                found = connection.execute(
                    select(snapshots)
                    .where(snapshots.c.seq > reached, snapshots.c.seq <= self.last_seq)
                    .order_by(snapshots.c.seq)
                    .limit(1)
                ).one_or_none()
            if found is None:
                return
            yield StoredSnapshot(
                found.seq, found.at, _text(found.data), found.chain, found.checksum
            )
            reached = found.seq

    def answers(self) -> Iterator[StoredAnswer]:
        """The answers, by tenant and key."""
        reached = ("", "")
        columns = answers.c
        while True:
            with self._store.session() as connection:
                found = connection.execute(
                    select(answers)
                    .where(
                        tuple_(columns.tenant, columns.key) > tuple_(*map(literal, reached)),
                        # Later ones are not part of what is read, unless they were never written:
                        # an answer is committed together with its entry.
                        or_(columns.seq <= self.last_seq, columns.seq > _END),
                    )
                    .order_by(columns.tenant, columns.key)
                    .limit(PAGE)
                ).all()
            for tenant, key, digest, status, body, at, seq, given in found:
                yield StoredAnswer(tenant, key, digest, status, _text(body), at, seq, given)
            if len(found) < PAGE:
                return
            reached = (found[-1].tenant, found[-1].key)

    def rows(self) -> Iterator[StoredRow]:
        """The journal in order."""
        reached = -1
        while True:
            with self._store.session() as connection:
                found = connection.execute(
                    select(journal)
                    .where(journal.c.seq > reached, journal.c.seq <= self.last_seq)
                    .order_by(journal.c.seq)
                    .limit(PAGE)
                ).all()
                begins = head_of(connection).base
            if not found:
                return
            if found[0].seq > max(reached, self.head.base) + 1 and begins > self.head.base:
                raise StoreError(
                    f"the entries up to {begins} left the journal while it was read: try again"
                )
            yield from map(stored_row, found)
            reached = found[-1].seq


def _text(data: bytes) -> str:
    # The store writes UTF-8. Anything else is damage, which `verify` reports.
    return data.decode("utf-8", "backslashreplace")


_END = select(func.max(journal.c.seq)).scalar_subquery()

_HEAD = select(
    history.c.name,
    history.c.former,
    history.c.base,
    history.c.chain,
    history.c.checksum,
    head.c.seq,
    head.c.chain,
).where(history.c.id == head.c.id)
_ENDS = _HEAD.add_columns(
    select(func.coalesce(func.max(journal.c.seq), 0)).scalar_subquery(),
    select(leader.c.epoch).scalar_subquery(),
)
