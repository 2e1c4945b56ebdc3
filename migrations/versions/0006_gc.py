"""Garbage collection: pins, blobs on their way out, and whose turn it is."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_DOOMED = sa.text("doomed_at IS NOT NULL")


def upgrade() -> None:
    """Columns with defaults and a new table; older code does not miss them."""
    op.add_column("entries", sa.Column("pinned", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.add_column("blobs", sa.Column("doomed_at", sa.Double(), nullable=True))
    op.create_index("ix_blobs_doomed_at", "blobs", ["doomed_at"], sqlite_where=_DOOMED, postgresql_where=_DOOMED)
    op.create_table(
        "chores",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("next_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_chores")),
    )


def downgrade() -> None:
    """Drop them."""
    op.drop_table("chores")
    op.drop_index("ix_blobs_doomed_at", table_name="blobs", sqlite_where=_DOOMED, postgresql_where=_DOOMED)
    with op.batch_alter_table("blobs") as batch_op:
        batch_op.drop_column("doomed_at")
    with op.batch_alter_table("entries") as batch_op:
        batch_op.drop_column("pinned")
