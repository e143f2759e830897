"""Checksums: a chain through the journal, and digests of what is kept beside it.

Every row of the journal holds a digest of itself and of the digest before it. So a row that was
changed, replaced by one from elsewhere, or put in another place breaks the chain there; and the
head of the journal, which is kept apart from it, says where the chain must end. There is no key:
this finds damage and mistakes, not a forger who can write to the database.
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
    """The digest of a row that stands behind one with the digest ``before``."""
    return checksum(before, seq, at, epoch, actor, origin, data)


def new_history() -> str:
    """A name for a history that begins, so that it is not taken for another one."""
    return secrets.token_hex(8)
