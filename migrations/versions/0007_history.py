"""Garbage collection forgets keys that have no artifact and that nobody asks for."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_ABSENT = sa.text("state = 'absent'")


def upgrade() -> None:
    """A column that may be empty; older code does not miss it. Keys from before count from the first collection."""
    op.add_column("entries", sa.Column("asked_at", sa.Double(), nullable=True))
    op.create_index(
        "ix_entries_history",
        "entries",
        ["namespace", "asked_at", "key"],
        sqlite_where=_ABSENT,
        postgresql_where=_ABSENT,
    )


def downgrade() -> None:
    """Drop them."""
    op.drop_index("ix_entries_history", table_name="entries", sqlite_where=_ABSENT, postgresql_where=_ABSENT)
    with op.batch_alter_table("entries") as batch_op:
        batch_op.drop_column("asked_at")
