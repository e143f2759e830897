"""The initial schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from slicewise.store.checksums import checksum, new_history

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables."""
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "journal",
        sa.Column("seq", number, primary_key=True, autoincrement=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("epoch", number, nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("origin", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text),
        sa.Column("subject", sa.Text, nullable=False),
        sa.Column("data", sa.Text, nullable=False),
        sa.Column("chain", sa.LargeBinary, nullable=False),
    )
    op.create_index("journal_by_tenant", "journal", ["tenant", "seq"])
    op.create_index("journal_by_subject", "journal", ["subject", "seq"])
    op.create_index("journal_by_kind", "journal", ["kind", "seq"])
    op.create_table(
        "answers",
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("digest", sa.Text, nullable=False),
        sa.Column("status", sa.SmallInteger, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("seq", number, nullable=False),
        sa.Column("checksum", sa.LargeBinary, nullable=False),
    )
    op.create_index("answers_by_time", "answers", ["at"])
    op.create_table(
        "snapshots",
        sa.Column("seq", number, primary_key=True, autoincrement=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sa.Column("chain", sa.LargeBinary, nullable=False),
        sa.Column("checksum", sa.LargeBinary, nullable=False),
    )
    leader = op.create_table(
        "leader",
        sa.Column("id", sa.SmallInteger, primary_key=True, autoincrement=False),
        sa.Column("epoch", number, nullable=False),
        sa.Column("holder", sa.Text, nullable=False),
        sa.Column("address", sa.Text, nullable=False),
        sa.Column("until", sa.Double, nullable=False),
        sa.Column("lease", sa.Double, nullable=False),
        sa.Column("steady", sa.Double, nullable=False),
        sa.CheckConstraint("id = 1", name="leader_is_one"),
    )
    vacant = {"epoch": 0, "holder": "", "address": "", "until": 0.0, "lease": 0.0, "steady": 0.0}
    op.bulk_insert(leader, [{"id": 1, **vacant}])
    head = op.create_table(
        "head",
        sa.Column("id", sa.SmallInteger, primary_key=True, autoincrement=False),
        sa.Column("seq", number, nullable=False),
        sa.Column("chain", sa.LargeBinary, nullable=False),
        sa.CheckConstraint("id = 1", name="head_is_one"),
    )
    history = op.create_table(
        "history",
        sa.Column("id", sa.SmallInteger, primary_key=True, autoincrement=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("former", sa.Text, nullable=False),
        sa.Column("base", number, nullable=False),
        sa.Column("chain", sa.LargeBinary, nullable=False),
        sa.Column("checksum", sa.LargeBinary, nullable=False),
        sa.CheckConstraint("id = 1", name="history_is_one"),
    )
    name = new_history()
    chain = checksum(name)  # the digest before the first row, different for every journal
    op.bulk_insert(head, [{"id": 1, "seq": 0, "chain": chain}])
    row = {"id": 1, "name": name, "former": "", "base": 0, "chain": chain}
    op.bulk_insert(history, [{**row, "checksum": checksum(name, "", 0, chain)}])
