"""What both databases share: reading, leadership, images and retention, in plain SQL."""

from __future__ import annotations

import heapq
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path

from sqlalchemy import (
    Connection,
    Select,
    bindparam,
    delete,
    func,
    insert,
    literal_column,
    select,
    tuple_,
    update,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.elements import ColumnElement

from slicewise.control import image as images_room
from slicewise.control.entries import Row, Seconds
from slicewise.control.image import Image
from slicewise.control.ports import (
    DamagedError,
    Kept,
    Key,
    Leader,
    Span,
    StoreError,
)
from slicewise.store.chain import checksum, link
from slicewise.store.pruning import prune
from slicewise.store.reading import IMAGES_KEPT, StoreContents, chain_at, head_of
from slicewise.store.records import Tail, damaged, ends_early, row_of
from slicewise.store.tables import answers, head, history, images, journal, leader

FORGET_AT_ONCE = 5_000
"""Answers forgotten in one transaction, so that commits get in between."""
_log = logging.getLogger(__name__)

_SELDOM = frozenset(
    {
        "model-entered",
        "model-forgotten",
        "node-added",
        "node-turned",
        "node-removed",
        "tenant-set",
        "tenant-removed",
        "token-issued",
        "token-expiring",
        "token-revoked",
    }
)
"""Kinds of which there are few, whoever's they are."""

_NEVER_WRITTEN = "\0"
"""No name has this character, and PostgreSQL will not even look for one that does."""


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
    _tail: Tail | None = None
    """Where the journal ends, while this process is known to be the one that writes."""
    _seen: Tail | None = None
    """The last row that was read, by the reader that is furthest."""
    _faults: Mapping[int, str] = {}
    """By image that is damaged: what is wrong with it."""

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
        """Rows in order, from the one behind ``after`` on, each held against the one before."""
        for _ in range(2):
            with self.session() as connection:
                asked = {"after": after, "limit": limit + 1}
                found = list(connection.execute(_ROWS, asked))
                if found:
                    break
                ends = head_of(connection)
            if ends.seq <= after:
                return []
            # Unless rows were written between the two looks, some are missing.
        else:
            raise ends_early(after, ends.seq)
        complete = len(found) <= limit
        *_, base, base_chain, last, last_chain = found[0]
        if found[0].seq == after:
            before: bytes = found[0].chain
            known = self._seen
            if known is not None and known.seq == after and known.chain != before:
                raise damaged(f"entry {after} of the journal is not what it was a moment ago")
            del found[0]
        elif base == after:
            before = base_chain
        else:
            raise damaged(f"entry {after} of the journal is missing")
        rows: list[Row] = []
        for seq, at, epoch, actor, origin, data, chain, *_ in found[:limit]:
            if seq != after + 1 + len(rows):
                raise damaged(f"entry {after + 1 + len(rows)} of the journal is missing")
            if chain != link(before, seq, at, epoch, actor, origin, data):
                raise damaged(f"entry {seq} of the journal is not what was written")
            before = chain
            rows.append(row_of(seq, at, actor, origin, data))
        ends_at = Tail(after + len(rows), before)
        if complete and ends_at != (last, last_chain):
            raise ends_early(ends_at.seq, last)
        if self._seen is None or self._seen.seq < ends_at.seq:
            self._seen = ends_at
        return rows

    def last_seq(self) -> int:
        """The number of the last row."""
        with self.session() as connection:
            return _last_seq(connection)

    def span(self) -> Span:
        """Which history this is, and from where to where it is kept."""
        with self.session() as connection:
            found = head_of(connection)
        return Span(found.history, tuple(found.former.split()), found.base, found.seq)

    def _tail_now(self) -> Tail:
        """Where the journal ends; read once, and again after whatever went wrong."""
        if self._tail is None:
            with self.session() as connection:
                self._tail = Tail(*connection.execute(select(head.c.seq, head.c.chain)).one())
        return self._tail

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
        """The latest image that is as it was written; an older one, or none, if the last is not.

        The journal behind it says the same, so that only the start takes longer.
        """
        faults: dict[int, str] = {}
        with self.session() as connection:
            begins = head_of(connection)
            seqs = connection.execute(select(images.c.seq).order_by(images.c.seq.desc())).scalars()
            found: Image | None = None
            for seq in seqs.all():
                try:
                    found = self._image(connection, seq)
                    break
                except (DamagedError, DBAPIError, TypeError, ValueError) as error:
                    faults[seq] = f"the image at entry {seq} is damaged"
                    _log.error("the image at entry %d is damaged: %s", seq, error)
        self._faults = faults
        if not begins.intact:
            raise damaged("the record of where the journal begins is not what was written")
        if found is None and begins.base > 0:
            what = " and ".join(faults.values()) or "there is no image of the state"
            raise damaged(f"{what}, and the journal begins behind entry {begins.base}")
        return found

    def _image(self, connection: Connection, seq: int) -> Image:
        stored = connection.execute(_IMAGE, {"seq": seq}).one()
        if stored.checksum != checksum(seq, stored.data, stored.chain):
            raise damaged(f"the image at entry {seq} is not what was written")
        if stored.chain != chain_at(connection, seq):
            raise damaged(f"the image at entry {seq} is of another journal")
        return images_room.decode(stored.data)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is damaged and can be done without."""
        return tuple(self._faults.values())

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
            chain = chain_at(connection, image.seq)
            if chain is None:
                raise StoreError(f"there is no entry {image.seq} of which an image could be kept")
            # The same row always has the same image, whoever made it.
            connection.execute(delete(images).where(images.c.seq == image.seq))
            connection.execute(
                insert(images),
                {
                    "seq": image.seq,
                    "at": time.time(),
                    "data": data,
                    "chain": chain,
                    "checksum": checksum(image.seq, data, chain),
                },
            )
            connection.execute(delete(images).where(images.c.seq < oldest))
            kept = connection.execute(select(images.c.seq)).scalars().all()
        faults = self._faults.items()
        self._faults = {at: what for at, what in faults if at in kept and at != image.seq}

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

    def prune(self, epoch: int, before: Seconds, archive: Path | None) -> int:
        """Take some entries written before then out of the journal, by way of the archive."""
        return prune(self, epoch, before, archive)

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
                    leader.c.lease,
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
        return StoreContents(self)


def _last_seq(connection: Connection) -> int:
    last: int = connection.execute(select(func.coalesce(func.max(journal.c.seq), 0))).scalar_one()
    return last


def _aside(column: str) -> ColumnElement[str]:
    """A column that is compared, but whose index is not to be used."""
    return literal_column(f"({column} || '')")


_EVERY = select(journal.c.seq, journal.c.at, journal.c.actor, journal.c.origin, journal.c.data)
_BACKWARD = _EVERY.order_by(journal.c.seq.desc())
_ROWS = (
    select(
        journal.c.seq,
        journal.c.at,
        journal.c.epoch,
        journal.c.actor,
        journal.c.origin,
        journal.c.data,
        journal.c.chain,
        # In the same look, so that they belong together while others write.
        *(
            select(column).scalar_subquery()
            for column in (history.c.base, history.c.chain, head.c.seq, head.c.chain)
        ),
    )
    .where(journal.c.seq >= bindparam("after"))
    .order_by(journal.c.seq)
    .limit(bindparam("limit"))
)
"""A row, and those behind it."""
_IMAGE = select(images.c.data, images.c.chain, images.c.checksum).where(
    images.c.seq == bindparam("seq")
)
