"""Rows and answers as they are stored, with their checksums, and the errors about damage."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from slicewise.control.answers import Answer
from slicewise.control.ports import (
    DAMAGED,
    DamagedError,
    FencedError,
    IdempotencyKey,
    Kept,
    StoreError,
)
from slicewise.journal.entries import Row, Seconds, decode, encode, index_keys
from slicewise.store.checksums import checksum, link

_log = logging.getLogger(__name__)

Record = tuple[int, Seconds, int, str, str, str, str | None, str, str, bytes]
"""A row of the table ``journal``."""


def records_of(rows: Iterable[Row], epoch: int, chain: bytes) -> list[Record]:
    """Rows as they are stored, after a row with the digest ``chain``."""
    records: list[Record] = []
    for row in rows:
        seq, at, actor, origin, entry = row.seq, float(row.at), row.actor, row.origin, row.entry
        data = encode(entry).decode()
        chain = link(chain, seq, at, epoch, actor, origin, data)
        records.append((seq, at, epoch, actor, origin, *index_keys(entry), data, chain))
    return records


def row_of(seq: int, at: Seconds, actor: str, origin: str, data: str) -> Row:
    """Decode a stored row."""
    try:
        return Row(seq, at, actor, decode(data), origin)
    except msgspec.DecodeError as error:
        raise damaged(f"entry {seq} of the journal cannot be read ({error})") from None


def damaged(what: str) -> DamagedError:
    """The error for a damaged journal."""
    return DamagedError(f"{what}: run 'slicewise verify' to see all damage, and restore a backup")


AnswerRecord = tuple[str, str, str, int, bytes, Seconds, int, bytes]
"""A row of the table ``answers``."""


def answer_of(key: IdempotencyKey, kept: Kept, at: Seconds, seq: int) -> AnswerRecord:
    """An answer as it is stored."""
    fields = (*key, kept.digest, *kept.answer, float(at), seq)
    return (*fields, checksum(*fields))


def kept_of(
    tenant: str, key: str, digest: str, status: int, body: bytes, at: float, seq: int, given: bytes
) -> Kept:
    """Decode a stored answer; DAMAGED if its checksum does not match."""
    if given != checksum(tenant, key, digest, status, body, at, seq):
        _log.error("the answer to key %r of tenant %r is damaged", key, tenant)
        return DAMAGED
    return Kept(digest, Answer(status, body))


class Tail(NamedTuple):
    """The last row of the journal."""

    seq: int
    chain: bytes


def fenced(epoch: int) -> FencedError:
    """The error for a leader that has been replaced."""
    return FencedError(f"epoch {epoch} is over, another process leads; nothing was written")


def out_of_step(first: int, last: int) -> StoreError:
    """The error for a leader that has not read the journal to its end."""
    return StoreError(
        f"the journal ends at entry {last}, so entry {first} cannot be written: "
        "read the journal again"
    )


def ends_early(last: int, wanted: int) -> DamagedError:
    """The error for a journal whose tail is missing or replaced."""
    return damaged(f"the journal ends at entry {last}, and should end at entry {wanted}")
