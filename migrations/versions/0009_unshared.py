"""Compiles whose result could not be handed over."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """A column."""
    op.add_column("failures", sa.Column("unshared_at", sa.Double()))


def downgrade() -> None:
    """Drop it."""
    op.drop_column("failures", "unshared_at")
