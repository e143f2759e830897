"""The tables, the same on SQLite and PostgreSQL.

Text that is JSON is kept as text: it is written once, read whole, and must come back to the byte.
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

# SQLite takes the primary key for the row's own number only if its type is INTEGER by name.
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
"""One row an entry. ``tenant`` and ``subject`` are what the entry concerns, for looking back.

``chain`` is the digest of the row and of the chain before it; see `store.chain`.
"""

head = Table(
    "head",
    metadata,
    Column("id", SmallInteger, primary_key=True, autoincrement=False),
    Column("seq", _Number, nullable=False),
    Column("chain", LargeBinary, nullable=False),
    CheckConstraint("id = 1", name="head_is_one"),
)
"""One row: the last row of the journal and its digest, so that a tail that is missing shows."""

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
"""One row: which history this is, which ones it went on from, and where its journal begins.

The rows up to ``base`` are not kept any more; ``chain`` was the digest of the last of them.
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
    # The last row of the journal when it was given: a backup that ends there takes it along.
    Column("seq", _Number, nullable=False),
    Column("checksum", LargeBinary, nullable=False),
    Index("answers_by_time", "at"),
)
"""What was answered for each idempotency key."""

images = Table(
    "images",
    metadata,
    Column("seq", _Number, primary_key=True, autoincrement=False),
    Column("at", Double, nullable=False),
    Column("data", LargeBinary, nullable=False),
    Column("chain", LargeBinary, nullable=False),
    Column("checksum", LargeBinary, nullable=False),
)
"""Images of the state; the journal goes on behind ``seq``, where its digest is ``chain``."""

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
"""One row: who leads, or led last, for how long at a time, and the steady time it kept."""
