"""What both databases share: reading, leadership, images and retention, in plain SQL."""

from __future__ import annotations

import heapq
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice

import msgspec
from sqlalchemy import (
    Connection,
    Select,
    bindparam,
    delete,
    func,
    insert,
    literal,
    literal_column,
    select,
    tuple_,
    update,
)
from sqlalchemy.sql.elements import ColumnElement

from slicewise.control import image as images_room
from slicewise.control.entries import Row, Seconds, concerns, decode, encode, kind
from slicewise.control.image import Image
from slicewise.control.ports import FencedError, Kept, Key, Leader, StoreError
from slicewise.store.contents import StoredAnswer, StoredImage, StoredRow
from slicewise.store.tables import answers, images, journal, leader

IMAGES_KEPT = 2
"""The last image, and one more in case the last is found to be wrong."""
FORGET_AT_ONCE = 5_000
"""Answers forgotten in one transaction, so that commits get in between."""
PAGE = 5_000
"""Rows read at a time when everything is read."""

_SELDOM = frozenset(
    {
        "model-entered",
        "node-added",
        "node-turned",
        "node-removed",
        "tenant-set",
        "tenant-removed",
        "token-issued",
        "token-revoked",
    }
)
"""Kinds of which there are few, whoever's they are."""

_NEVER_WRITTEN = "\0"
"""No name has this character, and PostgreSQL will not even look for one that does."""

Record = tuple[int, Seconds, int, str, str, str, str | None, str, str]
"""A row of the table ``journal``."""


def record_of(row: Row, epoch: int) -> Record:
    """A row as it is kept."""
    tenant, subject = concerns(row.entry)
    entry = row.entry
    data = encode(entry).decode()
    return (row.seq, row.at, epoch, row.actor, row.origin, kind(entry), tenant, subject, data)


def row_of(seq: int, at: Seconds, actor: str, origin: str, data: str) -> Row:
    """A row as it was."""
    try:
        return Row(seq, at, actor, decode(data), origin)
    except msgspec.DecodeError as error:
        raise StoreError(
            f"entry {seq} of the journal cannot be read ({error}): run 'slicewise verify', "
            "and restore a backup"
        ) from None


class SqlStore(ABC):
    """A store in an SQL database; see `control.ports.Store` for what the methods promise."""

    _now: ColumnElement[float]
    """The database's clock, in seconds since the epoch."""

    @property
    def _runs(self) -> str:
        """Whether the leader's lease runs; one that ends too far ahead does not.

        Its end was reckoned before the clock was set back, and may be days away.
        """
        return f"(until > {self._now} AND until <= {self._now} + lease)"

    _stretch: int | None = None
    """How many rows one look into the history may pass over, if that is limited."""

    @abstractmethod
    def session(self) -> AbstractContextManager[Connection]:
        """A connection on which every statement is a transaction; trouble becomes StoreError."""

    @abstractmethod
    def transaction(self, *, long: bool = False) -> AbstractContextManager[Connection]:
        """A connection in a transaction that is committed at the end, or undone by an exception."""

    @abstractmethod
    def append(
        self, epoch: int, rows: Sequence[Row], answers: Iterable[tuple[Key, Kept, Seconds]]
    ) -> None:
        """Make rows and answers durable together."""

    @abstractmethod
    def answers(self, keys: Sequence[Key]) -> dict[Key, Kept]:
        """The answers given for these keys."""

    @abstractmethod
    def lead(self, holder: str, address: str, seconds: float) -> int | None:
        """Become the leader, if nobody's lease runs."""

    @abstractmethod
    def wait_for_rows(self, after: int, seconds: float) -> bool:
        """Block until there are rows behind ``after``, or so long."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the database."""

    # The journal

    def rows(self, after: int, limit: int) -> list[Row]:
        """Rows in order, from the one behind ``after`` on."""
        with self.session() as connection:
            found = connection.execute(_ROWS, {"after": after, "limit": limit}).all()
        return [row_of(*row) for row in found]

    def last_seq(self) -> int:
        """The number of the last row."""
        with self.session() as connection:
            return _last_seq(connection)

    def history(
        self,
        *,
        before: int | None,
        limit: int,
        tenant: str | None = None,
        subject: str | None = None,
        kinds: Sequence[str] = (),
    ) -> list[Row]:
        """Rows in front of ``before``, the newest first.

        Every way of asking walks along the index that leaves the least to be passed over.
        """
        if _NEVER_WRITTEN in f"{tenant}{subject}":
            return []
        top = self.last_seq() + 1  # whatever was asked for: behind it there is nothing to pass over
        if before is not None:
            top = min(top, before)
        wanted = _BACKWARD.limit(limit)
        if subject is not None:
            wanted = wanted.where(journal.c.subject == subject)
            if tenant is not None:
                wanted = wanted.where(_aside("tenant") == tenant)
            if kinds:
                wanted = wanted.where(_aside("kind").in_(kinds))
            return self._look(wanted.where(journal.c.seq < top))
        if kinds and (tenant is None or _SELDOM.issuperset(kinds)):
            if tenant is not None:
                wanted = wanted.where(_aside("tenant") == tenant)
            found = [
                self._look(wanted.where(journal.c.seq < top, journal.c.kind == one))
                for one in dict.fromkeys(kinds)
            ]
            merged = heapq.merge(*found, key=lambda row: row.seq, reverse=True)
            return list(islice(merged, limit))
        if tenant is None:
            return self._look(wanted.where(journal.c.seq < top))
        wanted = wanted.where(journal.c.tenant == tenant)
        if not kinds:
            return self._look(wanted.where(journal.c.seq < top))
        wanted = wanted.where(_aside("kind").in_(kinds))
        if self._stretch is None:
            return self._look(wanted.where(journal.c.seq < top))
        rows: list[Row] = []
        while top > 0 and len(rows) < limit:
            bottom = max(0, top - self._stretch)
            part = wanted.where(journal.c.seq < top, journal.c.seq >= bottom)
            rows += self._look(part.limit(limit - len(rows)))
            top = bottom
        return rows

    def _look(self, wanted: Select[int, float, str, str, str]) -> list[Row]:
        with self.session() as connection:
            found = connection.execute(wanted).all()
        return [row_of(*row) for row in found]

    # Images and answers

    def last_image(self) -> Image | None:
        """The latest image."""
        with self.session() as connection:
            found = connection.execute(
                select(images.c.seq, images.c.data).order_by(images.c.seq.desc()).limit(1)
            ).one_or_none()
        if found is None:
            return None
        try:
            return images_room.decode(found.data)
        except msgspec.DecodeError as error:
            raise StoreError(
                f"the image at entry {found.seq} cannot be read ({error}): run 'slicewise verify', "
                "and restore a backup"
            ) from None

    def keep_image(self, image: Image) -> None:
        """Keep an image, and drop those that are not needed any more."""
        data = images_room.encode(image)
        oldest = (
            select(images.c.seq)
            .order_by(images.c.seq.desc())
            .offset(IMAGES_KEPT - 1)
            .limit(1)
            .scalar_subquery()
        )
        with self.transaction() as connection:
            # The same row always has the same image, whoever made it.
            connection.execute(delete(images).where(images.c.seq == image.seq))
            connection.execute(insert(images), {"seq": image.seq, "at": time.time(), "data": data})
            connection.execute(delete(images).where(images.c.seq < oldest))

    def forget_answers(self, before: Seconds) -> int:
        """Forget answers given before then, the oldest first, as many as go into a transaction."""
        some = (
            select(answers.c.tenant, answers.c.key)
            .where(answers.c.at < before)
            .order_by(answers.c.at)
            .limit(FORGET_AT_ONCE)
            .subquery()
        )
        with self.session() as connection:
            return connection.execute(
                delete(answers).where(tuple_(answers.c.tenant, answers.c.key).in_(select(some)))
            ).rowcount

    # Leadership

    def renew(self, epoch: int, seconds: float, steady: Seconds) -> bool:
        """Lead for so long from now on, and keep the steady time."""
        with self.session() as connection:
            done = connection.execute(
                update(leader)
                .where(leader.c.epoch == epoch)
                .values(until=self._now + seconds, lease=seconds, steady=steady)
            )
        return done.rowcount == 1

    def reached(self) -> Seconds:
        """The steady time that the last leader kept."""
        with self.session() as connection:
            kept: Seconds = connection.execute(select(leader.c.steady)).scalar_one()
        return kept

    def resign(self, epoch: int) -> None:
        """Let the lease end now."""
        with self.session() as connection:
            connection.execute(update(leader).where(leader.c.epoch == epoch).values(until=0.0))

    def leader(self) -> Leader | None:
        """Who leads, if somebody's lease runs."""
        with self.session() as connection:
            found = connection.execute(
                select(
                    leader.c.epoch,
                    leader.c.holder,
                    leader.c.address,
                    leader.c.until,
                    leader.c.steady,
                ).where(literal_column(self._runs))
            ).one_or_none()
        return None if found is None else Leader(*found)

    def check(self) -> None:
        """Raise unless the database answers."""
        with self.session() as connection:
            connection.execute(select(1))

    def damage(self) -> list[str]:
        """What the database itself finds wrong with its files, where it can say so."""
        return []

    def contents(self) -> StoreContents:
        """What the store holds now; may be read while others write."""
        with self.session() as connection:
            last = _last_seq(connection)
            epoch = connection.execute(select(leader.c.epoch)).scalar_one()
        return StoreContents(self, last, epoch)


class StoreContents:
    """What a store held up to a row.

    It is read page by page, so nobody who writes has to wait for long. Rows never change, answers
    say up to which row they belong, and images are the same whenever they are read.
    """

    def __init__(self, store: SqlStore, last_seq: int, epoch: int) -> None:
        self._store = store
        self.last_seq = last_seq
        self.epoch = epoch

    def damage(self) -> list[str]:
        """What the database finds wrong with its files."""
        return self._store.damage()

    def images(self) -> Iterator[StoredImage]:
        """The images, the oldest first."""
        reached = -1
        while True:
            with self._store.session() as connection:
                found = connection.execute(
                    select(images.c.seq, images.c.at, images.c.data)
                    .where(images.c.seq > reached, images.c.seq <= self.last_seq)
                    .order_by(images.c.seq)
                    .limit(1)
                ).one_or_none()
            if found is None:
                return
            yield StoredImage(found.seq, found.at, _text(found.data))
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
            for row in found:
                yield StoredAnswer(
                    row.tenant, row.key, row.digest, row.status, _text(row.body), row.at, row.seq
                )
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
            for seq, at, epoch, actor, origin, kind_, tenant, subject, data in found:
                yield StoredRow(seq, at, epoch, actor, origin, data, (kind_, tenant, subject))
            reached = found[-1].seq


def fenced(epoch: int) -> FencedError:
    """What is said to a leader that does not lead any more."""
    return FencedError(f"epoch {epoch} is over, somebody else leads; nothing was written")


def out_of_step(first: int, last: int) -> StoreError:
    """What is said to a leader that has not read the journal to its end."""
    return StoreError(
        f"the journal ends at entry {last}, so entry {first} cannot be written: "
        "it must be read again first"
    )


def _last_seq(connection: Connection) -> int:
    last: int = connection.execute(select(func.coalesce(func.max(journal.c.seq), 0))).scalar_one()
    return last


def _aside(column: str) -> ColumnElement[str]:
    """A column that is compared, but whose index is not to be used."""
    return literal_column(f"({column} || '')")


def _text(data: bytes) -> str:
    # What we write is UTF-8. Anything else is damage, which `verify` is to find, not to trip over.
    return data.decode("utf-8", "backslashreplace")


_EVERY = select(journal.c.seq, journal.c.at, journal.c.actor, journal.c.origin, journal.c.data)
_ROWS = (
    _EVERY.where(journal.c.seq > bindparam("after"))
    .order_by(journal.c.seq)
    .limit(bindparam("limit"))
)
_BACKWARD = _EVERY.order_by(journal.c.seq.desc())
