"""Reading a whole store, page by page, in the form its contents are kept in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from sqlalchemy import Connection, func, literal, select, tuple_

from slicewise.store.contents import Head, StoredAnswer, StoredImage, StoredRow
from slicewise.store.tables import answers, head, history, images, journal, leader

PAGE = 5_000
"""Rows read at a time when everything is read."""


IMAGES_KEPT = 2
"""The last image, and one more in case the last is found to be wrong."""


class Readable(Protocol):
    """A store, as far as it takes to read it."""

    def session(self) -> AbstractContextManager[Connection]:
        """A connection on which every statement is a transaction."""

    def damage(self) -> list[str]:
        """What the database itself finds wrong with its files."""


def head_of(connection: Connection) -> Head:
    """Where the journal begins and ends."""
    return Head(*connection.execute(_HEAD).one())


def stored_row(found: Sequence[Any]) -> StoredRow:
    """A row of the table as it is kept."""
    seq, at, epoch, actor, origin, kind, tenant, subject, data, chain = found
    return StoredRow(seq, at, epoch, actor, origin, data, chain, (kind, tenant, subject))


def chain_at(connection: Connection, seq: int) -> bytes | None:
    """The digest of a row, also of the last one that is not kept any more."""
    found: bytes | None = connection.execute(
        select(journal.c.chain).where(journal.c.seq == seq)
    ).scalar()
    if found is not None:
        return found
    begins = head_of(connection)
    return begins.base_chain if begins.base == seq else None


class StoreContents:
    """What a store held up to a row.

    It is read page by page, so that commits get in between. Rows never change, answers
    say up to which row they belong, and images are the same whenever they are read.
    """

    def __init__(self, store: Readable) -> None:
        self._store = store
        with store.session() as connection:
            *found, self.last_seq, self.epoch = connection.execute(_ENDS).one()
        self.head = Head(*found)

    def damage(self) -> list[str]:
        """What the database finds wrong with its files."""
        return self._store.damage()

    def images(self) -> Iterator[StoredImage]:
        """The images, the oldest first."""
        reached = -1
        while True:
            with self._store.session() as connection:
                found = connection.execute(
                    select(images)
                    .where(images.c.seq > reached, images.c.seq <= self.last_seq)
                    .order_by(images.c.seq)
                    .limit(1)
                ).one_or_none()
            if found is None:
                return
            yield StoredImage(found.seq, found.at, _text(found.data), found.chain, found.checksum)
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
                        columns.seq <= self.last_seq,
                    )
                    .order_by(columns.tenant, columns.key)
                    .limit(PAGE)
                ).all()
            for tenant, key, digest, status, body, at, seq, checksum in found:
                yield StoredAnswer(tenant, key, digest, status, _text(body), at, seq, checksum)
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
            if not found:
                return
            yield from map(stored_row, found)
            reached = found[-1].seq


def _text(data: bytes) -> str:
    # What we write is UTF-8. Anything else is damage, which `verify` is to find, not to trip over.
    return data.decode("utf-8", "backslashreplace")


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
