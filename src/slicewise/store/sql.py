"""The SQL that both databases share: reading, leadership, snapshots and retention."""

from __future__ import annotations

import heapq
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

from slicewise.control.ports import (
    DamagedError,
    IdempotencyKey,
    Kept,
    Leader,
    Span,
    StoreError,
)
from slicewise.control.snapshot import Snapshot, decode_snapshot, encode_snapshot
from slicewise.journal.entries import Row, Seconds
from slicewise.store.checksums import checksum, link
from slicewise.store.contents import SNAPSHOTS_KEPT, StoreContents, chain_at, head_of
from slicewise.store.records import Tail, damaged, ends_early, row_of
from slicewise.store.retention import prune
from slicewise.store.schema import answers, head, history, journal, leader, snapshots

FORGET_PAGE = 5_000
"""Answers deleted in one transaction; commits go on between two."""
_log = logging.getLogger(__name__)

_RARE_KINDS = frozenset(
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
"""Kinds with few entries, for every tenant."""

_NUL = "\0"
"""No name contains this character, and PostgreSQL refuses to search for it."""


class SqlStore(ABC):
    """A store in an SQL database; `control.ports.Store` documents the methods."""

    _now: ColumnElement[float]
    """The database's clock, in seconds since the epoch."""

    @property
    def _lease_is_valid(self) -> str:
        """The condition that the leader's lease is valid.

        A lease that ends later than its length from now was granted before the clock was set back:
        it is not valid.
        """
        return f"(until > {self._now} AND until <= {self._now} + lease)"

    _scan_limit: int | None = None
    """The number of rows that one query of the history may scan, if limited."""
    _tail: Tail | None = None
    """The end of the journal, while this process is the only writer."""
    _seen: Tail | None = None
    """The last row that any reader has read."""
    _faults: Mapping[int, str] = {}
    """The problem of each damaged snapshot, by its row."""

    @abstractmethod
    def session(self) -> AbstractContextManager[Connection]:
        """A connection where every statement is its own transaction; errors become StoreError."""

    @abstractmethod
    def transaction(self, *, long: bool = False) -> AbstractContextManager[Connection]:
        """A connection in a transaction; an exception rolls it back."""

    @abstractmethod
    def append(
        self,
        epoch: int,
        rows: Sequence[Row],
        answers: Iterable[tuple[IdempotencyKey, Kept, Seconds]],
    ) -> None:
        """Commit rows and answers in one transaction."""

    @abstractmethod
    def answers(self, keys: Sequence[IdempotencyKey]) -> dict[IdempotencyKey, Kept]:
        """The stored answers for these keys."""

    @abstractmethod
    def lead(self, holder: str, address: str, seconds: float) -> int | None:
        """Become the leader unless a lease is held; returns the epoch."""

    @abstractmethod
    def wait_for_rows(self, after: int, seconds: float) -> bool:
        """Block until there are rows after ``after``, or the time is up."""

    @abstractmethod
    def close(self) -> None:
        """Close all connections."""

    # The journal

    def rows(self, after: int, limit: int) -> list[Row]:
        """Rows in order from the one after ``after``, each checked against the previous digest."""
        for _ in range(2):
            with self.session() as connection:
                asked = {"after": after, "limit": limit + 1}
                found = list(connection.execute(_ROWS, asked))
                if found:
                    break
                ends = head_of(connection)
            if ends.seq <= after:
                return []
            # Rows were written between the two queries, or rows are missing.
        else:
            raise ends_early(after, ends.seq)
        complete = len(found) <= limit
        *_, base, base_chain, last, last_chain = found[0]
        if found[0].seq == after:
            before: bytes = found[0].chain
            known = self._seen
            if known is not None and known.seq == after and known.chain != before:
                raise damaged(f"entry {after} of the journal has changed since it was read")
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
        """The history, and its first and last row."""
        with self.session() as connection:
            found = head_of(connection)
        return Span(found.history, tuple(found.former.split()), found.base, found.seq)

    def _current_tail(self) -> Tail:
        """The end of the journal; read once, and again after an error."""
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
        """Rows before ``before``, newest first.

        Every combination of filters uses the index that scans the fewest rows.
        """
        if _NUL in f"{tenant}{subject}":
            return []
        top = self.last_seq() + 1  # nothing to scan after the last row
        if before is not None:
            top = min(top, before)
        wanted = _BACKWARD.limit(limit)
        if subject is not None:
            wanted = wanted.where(journal.c.subject == subject)
            if tenant is not None:
                wanted = wanted.where(_aside("tenant") == tenant)
            if kinds:
                wanted = wanted.where(_aside("kind").in_(kinds))
            return self._select(wanted.where(journal.c.seq < top))
        if kinds and (tenant is None or _RARE_KINDS.issuperset(kinds)):
            if tenant is not None:
                wanted = wanted.where(_aside("tenant") == tenant)
            found = [
                self._select(wanted.where(journal.c.seq < top, journal.c.kind == one))
                for one in dict.fromkeys(kinds)
            ]
            merged = heapq.merge(*found, key=lambda row: row.seq, reverse=True)
            return list(islice(merged, limit))
        if tenant is None:
            return self._select(wanted.where(journal.c.seq < top))
        wanted = wanted.where(journal.c.tenant == tenant)
        if not kinds:
            return self._select(wanted.where(journal.c.seq < top))
        wanted = wanted.where(_aside("kind").in_(kinds))
        if self._scan_limit is None:
            return self._select(wanted.where(journal.c.seq < top))
        rows: list[Row] = []
        while top > 0 and len(rows) < limit:
            bottom = max(0, top - self._scan_limit)
            part = wanted.where(journal.c.seq < top, journal.c.seq >= bottom)
            rows += self._select(part.limit(limit - len(rows)))
            top = bottom
        return rows

    def _select(self, wanted: Select[int, float, str, str, str]) -> list[Row]:
        with self.session() as connection:
            found = connection.execute(wanted).all()
        return [row_of(*row) for row in found]

    # Snapshots and answers

    def last_snapshot(self) -> Snapshot | None:
        """The latest intact snapshot, or None.

        With an older snapshot the start takes longer, but the result is the same.
        """
        faults: dict[int, str] = {}
        with self.session() as connection:
            begins = head_of(connection)
            seqs = connection.execute(
                select(snapshots.c.seq).order_by(snapshots.c.seq.desc())
            ).scalars()
            found: Snapshot | None = None
            for seq in seqs.all():
                try:
                    found = self._snapshot(connection, seq)
                    break
                except (DamagedError, DBAPIError, TypeError, ValueError) as error:
                    faults[seq] = f"the snapshot at entry {seq} is damaged"
                    _log.error("the snapshot at entry %d is damaged: %s", seq, error)
        self._faults = faults
        if not begins.intact:
            raise damaged("the record of the journal's start is not what was written")
        if found is None and begins.base > 0:
            what = " and ".join(faults.values()) or "there is no snapshot of the state"
            raise damaged(f"{what}, and the journal begins behind entry {begins.base}")
        return found

    def _snapshot(self, connection: Connection, seq: int) -> Snapshot:
        stored = connection.execute(_SNAPSHOT, {"seq": seq}).one()
        if stored.checksum != checksum(seq, stored.data, stored.chain):
            raise damaged(f"the snapshot at entry {seq} is not what was written")
        if stored.chain != chain_at(connection, seq):
            raise damaged(f"the snapshot at entry {seq} is of another journal")
        return decode_snapshot(stored.data)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Damage that the service can work with."""
        return tuple(self._faults.values())

    def save_snapshot(self, snapshot: Snapshot) -> None:
        """Store a snapshot, and delete those that are no longer needed."""
        data = encode_snapshot(snapshot)
        oldest = (
            select(snapshots.c.seq)
            .order_by(snapshots.c.seq.desc())
            .offset(SNAPSHOTS_KEPT - 1)
            .limit(1)
            .scalar_subquery()
        )
        with self.transaction() as connection:
            chain = chain_at(connection, snapshot.seq)
            if chain is None:
                raise StoreError(f"there is no entry {snapshot.seq} to store a snapshot of")
            # All snapshots of a row are the same, whichever process stored them.
            connection.execute(delete(snapshots).where(snapshots.c.seq == snapshot.seq))
            connection.execute(
                insert(snapshots),
                {
                    "seq": snapshot.seq,
                    "at": time.time(),
                    "data": data,
                    "chain": chain,
                    "checksum": checksum(snapshot.seq, data, chain),
                },
            )
            connection.execute(delete(snapshots).where(snapshots.c.seq < oldest))
            kept = connection.execute(select(snapshots.c.seq)).scalars().all()
        faults = self._faults.items()
        self._faults = {at: what for at, what in faults if at in kept and at != snapshot.seq}

    def forget_answers(self, before: Seconds) -> int:
        """Delete some of the answers given before ``before``, oldest first."""
        some = (
            select(answers.c.tenant, answers.c.key)
            .where(answers.c.at < before)
            .order_by(answers.c.at)
            .limit(FORGET_PAGE)
            .subquery()
        )
        with self.session() as connection:
            return connection.execute(
                delete(answers).where(tuple_(answers.c.tenant, answers.c.key).in_(select(some)))
            ).rowcount

    def prune(self, epoch: int, before: Seconds, archive: Path | None) -> int:
        """Prune some of the entries written before ``before``, after archiving them."""
        return prune(self, epoch, before, archive)

    # Leadership

    def renew(self, epoch: int, seconds: float, steady: Seconds) -> bool:
        """Extend the lease and save the steady time; False if the epoch is over."""
        with self.session() as connection:
            done = connection.execute(
                update(leader)
                .where(leader.c.epoch == epoch)
                .values(until=self._now + seconds, lease=seconds, steady=steady)
            )
        return done.rowcount == 1

    def reached(self) -> Seconds:
        """The steady time that the last leader saved."""
        with self.session() as connection:
            kept: Seconds = connection.execute(select(leader.c.steady)).scalar_one()
        return kept

    def resign(self, epoch: int) -> None:
        """End the lease now."""
        with self.session() as connection:
            connection.execute(update(leader).where(leader.c.epoch == epoch).values(until=0.0))

    def leader(self) -> Leader | None:
        """The leader, if its lease is valid."""
        with self.session() as connection:
            found = connection.execute(
                select(
                    leader.c.epoch,
                    leader.c.holder,
                    leader.c.address,
                    leader.c.until,
                    leader.c.lease,
                    leader.c.steady,
                ).where(literal_column(self._lease_is_valid))
            ).one_or_none()
        return None if found is None else Leader(*found)

    def damage(self) -> list[str]:
        """The problems that the database itself finds in its files, if it can check them."""
        return []

    def contents(self) -> StoreContents:
        """The contents of the store as of now; commits may go on while they are read."""
        return StoreContents(self)

    def backup(self) -> Iterator[bytes]:
        """A backup in pieces, as `slicewise backup` writes it to a file."""
        from slicewise.store.backup_file import backup_pieces

        return backup_pieces(self.contents())


def _last_seq(connection: Connection) -> int:
    last: int = connection.execute(select(func.coalesce(func.max(journal.c.seq), 0))).scalar_one()
    return last


def _aside(column: str) -> ColumnElement[str]:
    """A column to compare without using its index."""
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
        # In the same statement, so that the values are consistent while others write.
        *(
            select(column).scalar_subquery()
            for column in (history.c.base, history.c.chain, head.c.seq, head.c.chain)
        ),
    )
    .where(journal.c.seq >= bindparam("after"))
    .order_by(journal.c.seq)
    .limit(bindparam("limit"))
)
"""A row and the rows after it."""
_SNAPSHOT = select(snapshots.c.data, snapshots.c.chain, snapshots.c.checksum).where(
    snapshots.c.seq == bindparam("seq")
)
