"""The tables, the same on SQLite and PostgreSQL.

JSON is stored as text: it is written once, read whole, and must come back byte for byte.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
)

metadata = MetaData()

# SQLite uses the primary key as the row id only if its type is named INTEGER.
_Number = BigInteger().with_variant(Integer(), "sqlite")

journal = Table(
    "journal",
    metadata,
    Column("seq", _Number, primary_key=True, autoincrement=False),
    Column("at", Double, nullable=False),
    Column("epoch", _Number, nullable=False),
    Column("actor", Text, nullable=False),
    Column("origin", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("tenant", Text),
    Column("subject", Text, nullable=False),
    Column("data", Text, nullable=False),
    Column("chain", LargeBinary, nullable=False),
    Index("journal_by_tenant", "tenant", "seq"),
    Index("journal_by_subject", "subject", "seq"),
    Index("journal_by_kind", "kind", "seq"),
)
"""One row per entry. ``tenant`` (an id) and ``subject`` are what it concerns, for the audit log.

``chain`` is the digest of the row and of the chain before it; see `store.checksums`.
"""

head = Table(
    "head",
    metadata,
    Column("id", SmallInteger, primary_key=True, autoincrement=False),
    Column("seq", _Number, nullable=False),
    Column("chain", LargeBinary, nullable=False),
    CheckConstraint("id = 1", name="head_is_one"),
)
"""One row: the last row of the journal and its digest, so that a missing tail is noticed."""

history = Table(
    "history",
    metadata,
    Column("id", SmallInteger, primary_key=True, autoincrement=False),
    Column("name", Text, nullable=False),
    Column("former", Text, nullable=False),
    Column("base", _Number, nullable=False),
    Column("chain", LargeBinary, nullable=False),
    Column("checksum", LargeBinary, nullable=False),
    CheckConstraint("id = 1", name="history_is_one"),
)
"""One row: the history, the former histories that it continues, and where its journal begins.

Rows up to ``base`` have been pruned; ``chain`` is the digest of the last of them.
"""

answers = Table(
    "answers",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("digest", Text, nullable=False),
    Column("status", SmallInteger, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("at", Double, nullable=False),
    # The last row when the answer was given: a backup that ends there includes the answer.
    Column("seq", _Number, nullable=False),
    Column("checksum", LargeBinary, nullable=False),
    Index("answers_by_time", "at"),
)
"""The answer for each idempotency key."""

snapshots = Table(
    "snapshots",
    metadata,
    Column("seq", _Number, primary_key=True, autoincrement=False),
    Column("at", Double, nullable=False),
    Column("data", LargeBinary, nullable=False),
    Column("chain", LargeBinary, nullable=False),
    Column("checksum", LargeBinary, nullable=False),
)
"""Snapshots of the state; the journal continues after ``seq``, where its digest is ``chain``."""

leader = Table(
    "leader",
    metadata,
    Column("id", SmallInteger, primary_key=True, autoincrement=False),
    Column("epoch", _Number, nullable=False),
    Column("holder", Text, nullable=False),
    Column("address", Text, nullable=False),
    Column("until", Double, nullable=False),
    Column("lease", Double, nullable=False),
    Column("steady", Double, nullable=False),
    CheckConstraint("id = 1", name="leader_is_one"),
)
"""One row: the current or last leader, the length of its lease, and the steady time it saved."""
