"""Restoring: a backup becomes the contents of an empty store, all of it or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Connection, insert, select, update

from slicewise.control.entries import concerns, decode, kind
from slicewise.core.errors import SlicewiseError
from slicewise.store.backups import Tick, no_tick, open_backup
from slicewise.store.chain import checksum, link, new_history
from slicewise.store.contents import Contents, StoredRow
from slicewise.store.sql import SqlStore
from slicewise.store.tables import answers, head, history, images, journal, leader

_AT_ONCE = 2_000
_Item = TypeVar("_Item")


def restore(path: Path, store: SqlStore, tick: Tick = no_tick) -> int:
    """Bring a backup into an empty store, and return how many rows it had."""
    with open_backup(path) as contents, store.transaction(long=True) as connection:
        # Locked until the end: nobody who leads can write in between.
        connection.execute(update(leader).values(epoch=leader.c.epoch))
        for table in (journal, answers, images):
            if connection.execute(select(table.c.at).limit(1)).first() is not None:
                raise SlicewiseError(
                    "a backup is restored into an empty database only, and this one holds "
                    f"{table.name}: use a new data folder or a new database"
                )
        return _fill(connection, contents, tick)


def _fill(connection: Connection, contents: Contents, tick: Tick) -> int:
    begins = contents.head
    epoch, last, chain = contents.epoch, begins.base, begins.base_chain
    for image in contents.images():
        connection.execute(insert(images), {**image._asdict(), "data": image.data.encode()})
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
    # What follows is another story than what followed where the backup was made.
    name, former = new_history(), f"{begins.former} {begins.history}".strip()
    fields = (name, former, begins.base, begins.base_chain)
    names = ("name", "former", "base", "chain", "checksum")
    connection.execute(
        update(history).values(dict(zip(names, (*fields, checksum(*fields)), strict=True)))
    )
    # Greater than any that was ever written down, and than that of whoever leads here by chance.
    present = connection.execute(select(leader.c.epoch)).scalar_one()
    connection.execute(update(leader).values(epoch=max(epoch, present) + 1, until=0.0, steady=0.0))
    return count


def _record(row: StoredRow) -> dict[str, Any]:
    try:
        entry = decode(row.data)
    except msgspec.DecodeError as error:
        raise SlicewiseError(f"entry {row.seq} of the backup cannot be read: {error}") from None
    tenant, subject = concerns(entry)
    return {
        "seq": row.seq,
        "at": row.at,
        "epoch": row.epoch,
        "actor": row.actor,
        "origin": row.origin,
        "kind": kind(entry),
        "tenant": tenant,
        "subject": subject,
        "data": row.data,
        "chain": row.chain,
    }


def _pages(items: Iterator[_Item]) -> Iterator[list[_Item]]:
    while page := list(islice(items, _AT_ONCE)):
        yield page
