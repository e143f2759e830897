"""Checksums: a chain through the journal, and digests of the other tables.

Every row of the journal holds a digest of itself and of the previous digest. A row that was
changed, replaced or moved breaks the chain, and the head, which is stored apart from the journal,
records where the chain must end. There is no key: this finds damage and mistakes, not a forger who
can write to the database.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b

import msgspec

SIZE = 16
_encode = msgspec.msgpack.Encoder().encode


def checksum(*parts: float | str | bytes | None) -> bytes:
    """A digest of these values, their types and their order included."""
    return blake2b(_encode(parts), digest_size=SIZE).digest()


def link(
    before: bytes, seq: int, at: float, epoch: int, actor: str, origin: str, data: str
) -> bytes:
    """The digest of a row that follows one with the digest ``before``."""
    return checksum(before, seq, at, epoch, actor, origin, data)


def new_history() -> str:
    """A unique id for a new history."""
    return secrets.token_hex(8)
