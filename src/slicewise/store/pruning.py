"""Retention: old entries leave the journal, a few at a time, and the chain goes on from there.

Nothing leaves that a start needs: the last two images stay, and every entry behind the older one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import takewhile
from pathlib import Path
from typing import Protocol

from sqlalchemy import Connection, delete, select, update

from slicewise.control.entries import Seconds
from slicewise.store import archive
from slicewise.store.chain import checksum, link
from slicewise.store.contents import Head, StoredRow
from slicewise.store.reading import IMAGES_KEPT, chain_at, head_of, stored_row
from slicewise.store.records import damaged, fenced
from slicewise.store.tables import history, images, journal, leader

AT_ONCE = 500
"""Entries that leave in one transaction, so that commits get in between."""


class Prunable(Protocol):
    """A store, as far as it takes to prune it."""

    def session(self) -> AbstractContextManager[Connection]:
        """A connection on which every statement is a transaction."""

    def transaction(self) -> AbstractContextManager[Connection]:
        """A connection in a transaction."""


def prune(store: Prunable, epoch: int, before: Seconds, folder: Path | None) -> int:
    """Take some entries written before then out of the journal, and return how many.

    Where there is a ``folder``, they are appended to the archive in it first.
    """
    with store.session() as connection:
        head = head_of(connection)
        newest = _needed_behind(connection)
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


def _needed_behind(connection: Connection) -> int:
    """The last entry that no start needs; 0 unless all images are there, and intact."""
    seqs: Sequence[int] = (
        connection.execute(select(images.c.seq).order_by(images.c.seq)).scalars().all()
    )
    if len(seqs) < IMAGES_KEPT:
        return 0
    for seq in seqs:
        image = connection.execute(select(images).where(images.c.seq == seq)).one()
        if image.checksum != checksum(seq, image.data, image.chain) or (
            image.chain != chain_at(connection, seq)
        ):
            raise damaged(f"the image at entry {seq} is not what was written")
    return seqs[0]


def _check(head: Head, rows: list[StoredRow]) -> None:
    """What is damaged does not leave, so that it is found."""
    seq, chain = head.base, head.base_chain
    for row in rows:
        if row.seq != seq + 1 or row.chain != link(chain, *row[:-2]):
            raise damaged(f"entry {row.seq} of the journal is not what was written")
        seq, chain = row.seq, row.chain
