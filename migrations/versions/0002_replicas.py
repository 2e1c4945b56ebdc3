"""What several replicas share: when one of them last took heartbeats, and uploads that go past them to the store."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Two new tables; older code does not miss them."""
    op.create_table(
        "pulse",
        sa.Column("id", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("beaten_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_pulse")),
    )
    op.create_table(
        "tickets",
        sa.Column("epoch", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False, autoincrement=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("issued_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("epoch", "sha256", name=op.f("pk_tickets")),
    )


def downgrade() -> None:
    """Drop them."""
    op.drop_table("tickets")
    op.drop_table("pulse")
