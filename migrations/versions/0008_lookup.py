"""Look-ups of many keys on PostgreSQL by a hash index."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_NEVER = sa.text("0")


def upgrade() -> None:
    """An index; on SQLite an empty one."""
    op.create_index("ix_entries_key", "entries", ["key"], postgresql_using="hash", sqlite_where=_NEVER)


def downgrade() -> None:
    """Drop it."""
    op.drop_index("ix_entries_key", table_name="entries", postgresql_using="hash", sqlite_where=_NEVER)
