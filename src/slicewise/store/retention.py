"""Retention: prunes old entries from the journal, a page at a time.

Nothing that a start needs is pruned: the last two snapshots stay, and every entry after the older
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import takewhile
from pathlib import Path
from typing import Protocol

from sqlalchemy import Connection, delete, select, update

from slicewise.journal.entries import Seconds
from slicewise.store import archive
from slicewise.store.checksums import checksum, link
from slicewise.store.contents import (
    SNAPSHOTS_KEPT,
    JournalHead,
    StoredRow,
    chain_at,
    head_of,
    stored_row,
)
from slicewise.store.records import damaged, fenced
from slicewise.store.schema import history, journal, leader, snapshots

AT_ONCE = 500
"""Entries pruned in one transaction; commits go on between two."""


class Prunable(Protocol):
    """A store that can be pruned."""

    def session(self) -> AbstractContextManager[Connection]:
        """A connection on which every statement is its own transaction."""

    def transaction(self) -> AbstractContextManager[Connection]:
        """A connection in a transaction."""


def prune(store: Prunable, epoch: int, before: Seconds, folder: Path | None) -> int:
    """Prune some of the entries written before ``before`` and return how many.

    With a ``folder``, they are appended to the archive in it first.
    """
    with store.session() as connection:
        head = head_of(connection)
        newest = _last_prunable(connection)
        found = connection.execute(
            select(journal)
            .where(journal.c.seq > head.base, journal.c.seq <= newest)
            .order_by(journal.c.seq)
            .limit(AT_ONCE)
        ).all()
    rows = list(takewhile(lambda row: row.at < before, map(stored_row, found)))
    if not rows:
        return 0
    _check(head, rows)
    if folder is not None:
        archive.append(folder, head, rows)
    fields = (head.history, head.former, rows[-1].seq, rows[-1].chain)
    _, _, base, chain = fields
    leads = select(leader.c.epoch).scalar_subquery() == epoch
    with store.transaction() as connection:
        done = connection.execute(
            update(history)
            .where(history.c.base == head.base, leads)
            .values(base=base, chain=chain, checksum=checksum(*fields))
        )
        if not done.rowcount:
            raise fenced(epoch)
        connection.execute(delete(journal).where(journal.c.seq <= base))
    return len(rows)


def _last_prunable(connection: Connection) -> int:
    """The last entry that no start needs; 0 unless both snapshots exist."""
    seqs: Sequence[int] = (
        connection.execute(select(snapshots.c.seq).order_by(snapshots.c.seq)).scalars().all()
    )
    if len(seqs) < SNAPSHOTS_KEPT:
        return 0
    for seq in seqs:
        snapshot = connection.execute(select(snapshots).where(snapshots.c.seq == seq)).one()
        if snapshot.checksum != checksum(seq, snapshot.data, snapshot.chain) or (
            snapshot.chain != chain_at(connection, seq)
        ):
            raise damaged(f"the snapshot at entry {seq} is not what was written")
    return seqs[0]


def _check(head: JournalHead, rows: list[StoredRow]) -> None:
    """Refuse to prune damaged entries, so that the damage is found."""
    seq, chain = head.base, head.base_chain
    for row in rows:
        if row.seq != seq + 1 or row.chain != link(chain, *row[:-2]):
            raise damaged(f"entry {row.seq} of the journal is not what was written")
        seq, chain = row.seq, row.chain
