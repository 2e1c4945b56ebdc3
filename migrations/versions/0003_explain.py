"""What misses are explained with: graphs by what they have in common, and who missed which key."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Two new tables; older code does not miss them. Keys from before are not found as neighbours."""
    op.create_table(
        "graphs",
        sa.Column("namespace", sa.String(length=63), nullable=False),
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("ir_digest", sa.String(length=64), nullable=True),
        sa.Column("ir_shape", sa.String(length=16), nullable=True),
        sa.Column("ir_ops", sa.BigInteger(), nullable=True),
        sa.Column("settings", sa.String(length=16), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.Column("summary", sa.Text(), nullable=True),
        sa.Column("counts", sa.Text(), nullable=True),
        sa.Column("described_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("namespace", "key", name=op.f("pk_graphs")),
    )
    op.create_index("ix_graphs_ir_digest", "graphs", ["namespace", "ir_digest", "seen_at"])
    op.create_index("ix_graphs_ir_shape", "graphs", ["namespace", "ir_shape", "seen_at"])
    op.create_index("ix_graphs_ir_ops", "graphs", ["namespace", "ir_ops"])
    op.create_index("ix_graphs_settings", "graphs", ["namespace", "settings", "seen_at"])
    op.create_index("ix_graphs_described_at", "graphs", ["described_at"])
    op.create_table(
        "misses",
        sa.Column("namespace", sa.String(length=63), nullable=False),
        sa.Column("job", sa.String(length=255), nullable=False),
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("host", sa.String(length=255), nullable=False),
        sa.Column("rank", sa.BigInteger(), nullable=False, autoincrement=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("namespace", "job", "key", "host", "rank", name=op.f("pk_misses")),
    )
    op.create_index("ix_misses_key", "misses", ["namespace", "key", "at"])
    op.create_index("ix_misses_at", "misses", ["at"])


def downgrade() -> None:
    """Drop them."""
    op.drop_table("misses")
    op.drop_table("graphs")
