"""Restoring a backup into an empty store, in one transaction."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Connection, insert, select, update

from slicewise.core.errors import SlicewiseError
from slicewise.journal.entries import decode, index_keys
from slicewise.store.backup_file import Tick, no_tick, open_backup
from slicewise.store.checksums import checksum, link, new_history
from slicewise.store.contents import Contents, StoredRow
from slicewise.store.schema import answers, head, history, journal, leader, snapshots
from slicewise.store.sql import SqlStore

_AT_ONCE = 2_000
_Item = TypeVar("_Item")


def restore(path: Path, store: SqlStore, tick: Tick = no_tick) -> int:
    """Restore a backup into an empty store and return its number of rows."""
    with open_backup(path) as contents, store.transaction(long=True) as connection:
        # Locks the row until the end: no leader can write in between.
        connection.execute(update(leader).values(epoch=leader.c.epoch))
        for table in (journal, answers, snapshots):
            if connection.execute(select(table.c.at).limit(1)).first() is not None:
                raise SlicewiseError(
                    "a backup can be restored into an empty database only, and this one has "
                    f"{table.name}: use a new data folder or a new database"
                )
        return _fill(connection, contents, tick)


def _fill(connection: Connection, contents: Contents, tick: Tick) -> int:
    begins = contents.head
    epoch, last, chain = contents.epoch, begins.base, begins.base_chain
    for snapshot in contents.snapshots():
        connection.execute(
            insert(snapshots), {**snapshot._asdict(), "data": snapshot.data.encode()}
        )
    for some in _pages(contents.answers()):
        connection.execute(
            insert(answers), [{**one._asdict(), "body": one.body.encode()} for one in some]
        )
    count = 0
    for page in _pages(contents.rows()):
        for row in page:
            if row.seq != last + 1:
                raise SlicewiseError(f"the backup's journal jumps from entry {last} to {row.seq}")
            if row.chain != link(chain, *row[:-2]):
                raise SlicewiseError(f"entry {row.seq} of the backup is not what was written")
            last, epoch, chain = row.seq, max(epoch, row.epoch), row.chain
        connection.execute(insert(journal), [_record(row) for row in page])
        count += len(page)
        tick(len(page))
    if (last, chain) != (begins.seq, begins.chain):
        raise SlicewiseError(f"the backup's journal ends at entry {last}, not at {begins.seq}")
    connection.execute(update(head).values(seq=last, chain=chain))
    # A new history: the service that made the backup may have gone on differently.
    name, former = new_history(), f"{begins.former} {begins.history}".strip()
    fields = (name, former, begins.base, begins.base_chain)
    names = ("name", "former", "base", "chain", "checksum")
    connection.execute(
        update(history).values(dict(zip(names, (*fields, checksum(*fields)), strict=True)))
    )
    # Greater than any epoch in the backup, and than that of a leader of this database.
    present = connection.execute(select(leader.c.epoch)).scalar_one()
    connection.execute(update(leader).values(epoch=max(epoch, present) + 1, until=0.0, steady=0.0))
    return count


def _record(row: StoredRow) -> dict[str, Any]:
    try:
        entry = decode(row.data)
    except msgspec.DecodeError as error:
        raise SlicewiseError(f"entry {row.seq} of the backup cannot be read: {error}") from None
    kind, tenant, subject = index_keys(entry)
    return {
        "seq": row.seq,
        "at": row.at,
        "epoch": row.epoch,
        "actor": row.actor,
        "origin": row.origin,
        "kind": kind,
        "tenant": tenant,
        "subject": subject,
        "data": row.data,
        "chain": row.chain,
    }


def _pages(items: Iterator[_Item]) -> Iterator[list[_Item]]:
    while page := list(islice(items, _AT_ONCE)):
        yield page
