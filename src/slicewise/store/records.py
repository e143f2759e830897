"""Rows and answers as they are kept, with their checksums; and what is said of damage."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from slicewise.control.answers import Answer
from slicewise.control.entries import Row, Seconds, concerns, decode, encode, kind
from slicewise.control.ports import DAMAGED, DamagedError, FencedError, Kept, Key, StoreError
from slicewise.store.chain import checksum, link

_log = logging.getLogger(__name__)

Record = tuple[int, Seconds, int, str, str, str, str | None, str, str, bytes]
"""A row of the table ``journal``."""


def records_of(rows: Iterable[Row], epoch: int, chain: bytes) -> list[Record]:
    """Rows as they are kept, behind one that has this digest."""
    records: list[Record] = []
    for row in rows:
        seq, at, actor, origin, entry = row.seq, float(row.at), row.actor, row.origin, row.entry
        tenant, subject = concerns(entry)
        data = encode(entry).decode()
        chain = link(chain, seq, at, epoch, actor, origin, data)
        records.append((seq, at, epoch, actor, origin, kind(entry), tenant, subject, data, chain))
    return records


def row_of(seq: int, at: Seconds, actor: str, origin: str, data: str) -> Row:
    """A row as it was."""
    try:
        return Row(seq, at, actor, decode(data), origin)
    except msgspec.DecodeError as error:
        raise damaged(f"entry {seq} of the journal cannot be read ({error})") from None


def damaged(what: str) -> DamagedError:
    """What is said about a journal that is not what was written."""
    return DamagedError(f"{what}: run 'slicewise verify' to see all damage, and restore a backup")


AnswerRecord = tuple[str, str, str, int, bytes, Seconds, int, bytes]
"""A row of the table ``answers``."""


def answer_of(key: Key, kept: Kept, at: Seconds, seq: int) -> AnswerRecord:
    """An answer as it is kept."""
    fields = (*key, kept.digest, *kept.answer, float(at), seq)
    return (*fields, checksum(*fields))


def kept_of(
    tenant: str, key: str, digest: str, status: int, body: bytes, at: float, seq: int, given: bytes
) -> Kept:
    """An answer as it was, if it is."""
    if given != checksum(tenant, key, digest, status, body, at, seq):
        _log.error("the answer to key %r of tenant %r is damaged", key, tenant)
        return DAMAGED
    return Kept(digest, Answer(status, body))


class Tail(NamedTuple):
    """The last row of the journal."""

    seq: int
    chain: bytes


def fenced(epoch: int) -> FencedError:
    """What is said to a leader that does not lead any more."""
    return FencedError(f"epoch {epoch} is over, another process leads; nothing was written")


def out_of_step(first: int, last: int) -> StoreError:
    """What is said to a leader that has not read the journal to its end."""
    return StoreError(
        f"the journal ends at entry {last}, so entry {first} cannot be written: "
        "it must be read again first"
    )


def ends_early(last: int, wanted: int) -> DamagedError:
    """What is said about a journal whose tail is missing, or another one."""
    return damaged(f"the journal ends at entry {last}, and should end at entry {wanted}")
