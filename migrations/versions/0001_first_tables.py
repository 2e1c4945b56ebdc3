"""First tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Everything that version 0.1 needs."""
    op.create_table(
        "blobs",
        sa.Column("namespace", sa.String(length=63), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("compiler_version", sa.String(length=255), nullable=True),
        sa.Column("target", sa.String(length=255), nullable=True),
        sa.Column("stored_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("namespace", "sha256", name=op.f("pk_blobs")),
    )
    op.create_table(
        "counters",
        sa.Column("namespace", sa.String(length=63), nullable=False),
        sa.Column("hits", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("misses", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("waits", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("publishes", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("failures", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("nondeterministic", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("compile_seconds_spent", sa.Double(), server_default="0", nullable=False),
        sa.Column("compile_seconds_saved", sa.Double(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("namespace", name=op.f("pk_counters")),
    )
    op.create_table(
        "differences",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("namespace", sa.String(length=63), nullable=False),
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("stored_sha256", sa.String(length=64), nullable=False),
        sa.Column("offered_sha256", sa.String(length=64), nullable=False),
        sa.Column("members", sa.Text(), nullable=False),
        sa.Column("host", sa.String(length=255), nullable=True),
        sa.Column("compiler_version", sa.String(length=255), nullable=True),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_differences")),
    )
    with op.batch_alter_table("differences", schema=None) as batch_op:
        batch_op.create_index("ix_differences_key", ["namespace", "key"], unique=False)

    op.create_table(
        "entries",
        sa.Column("namespace", sa.String(length=63), nullable=False),
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), server_default="absent", nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=True),
        sa.Column("size", sa.BigInteger(), nullable=True),
        sa.Column("compiler_version", sa.String(length=255), nullable=True),
        sa.Column("target", sa.String(length=255), nullable=True),
        sa.Column("compile_seconds", sa.Double(), nullable=True),
        sa.Column("cpu_seconds", sa.Double(), nullable=True),
        sa.Column("peak_rss_bytes", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=True),
        sa.Column("host", sa.String(length=255), nullable=True),
        sa.Column("boot", sa.String(length=255), nullable=True),
        sa.Column("pid", sa.BigInteger(), nullable=True),
        sa.Column("rank", sa.BigInteger(), nullable=True),
        sa.Column("job", sa.String(length=255), nullable=True),
        sa.Column("hits", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("last_hit_at", sa.Double(), nullable=True),
        sa.Column("factors", sa.Text(), nullable=True),
        sa.CheckConstraint(
            "state = 'absent' OR (sha256 IS NOT NULL AND size IS NOT NULL AND created_at IS NOT NULL)",
            name=op.f("ck_entries_artifact"),
        ),
        sa.CheckConstraint("state IN ('absent', 'present', 'missing', 'quarantined')", name=op.f("ck_entries_state")),
        sa.PrimaryKeyConstraint("namespace", "key", name=op.f("pk_entries")),
    )
    with op.batch_alter_table("entries", schema=None) as batch_op:
        batch_op.create_index("ix_entries_blob", ["namespace", "sha256"], unique=False)
        batch_op.create_index(
            "ix_entries_listing",
            ["namespace", "created_at", "key"],
            unique=False,
            sqlite_where=sa.text("state <> 'absent'"),
            postgresql_where=sa.text("state <> 'absent'"),
        )

    op.create_table(
        "failures",
        sa.Column("namespace", sa.String(length=63), nullable=False),
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("transient_count", sa.Integer(), nullable=False),
        sa.Column("last_failure_at", sa.Double(), nullable=False),
        sa.Column("yield_host", sa.String(length=255), nullable=True),
        sa.Column("yield_until", sa.Double(), nullable=True),
        sa.Column("kind", sa.String(length=16), nullable=True),
        sa.Column("exit_code", sa.BigInteger(), nullable=True),
        sa.Column("code", sa.String(length=64), nullable=True),
        sa.Column("log_tail", sa.Text(), nullable=True),
        sa.Column("host", sa.String(length=255), nullable=True),
        sa.Column("first_seen_at", sa.Double(), nullable=True),
        sa.Column("until", sa.Double(), nullable=True),
        sa.Column("retried_job", sa.String(length=255), nullable=True),
        sa.PrimaryKeyConstraint("namespace", "key", name=op.f("pk_failures")),
    )
    with op.batch_alter_table("failures", schema=None) as batch_op:
        batch_op.create_index("ix_failures_until", ["namespace", "until"], unique=False)

    op.create_table(
        "leases",
        sa.Column("epoch", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("lease_id", sa.String(length=64), nullable=False),
        sa.Column("namespace", sa.String(length=63), nullable=False),
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("confirmed", sa.Boolean(), nullable=False),
        sa.Column("retry_failed", sa.Boolean(), nullable=False),
        sa.Column("granted_at", sa.Double(), nullable=False),
        sa.Column("heartbeat_at", sa.Double(), nullable=True),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("host", sa.String(length=255), nullable=True),
        sa.Column("boot", sa.String(length=255), nullable=True),
        sa.Column("pid", sa.BigInteger(), nullable=True),
        sa.Column("rank", sa.BigInteger(), nullable=True),
        sa.Column("job", sa.String(length=255), nullable=True),
        sa.Column("phase", sa.String(length=64), nullable=True),
        sa.Column("rss_bytes", sa.BigInteger(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.CheckConstraint(
            "status IN ('live', 'superseded', 'released', 'published', 'failed')", name=op.f("ck_leases_status")
        ),
        sa.PrimaryKeyConstraint("epoch", name=op.f("pk_leases")),
        sa.UniqueConstraint("lease_id", name=op.f("uq_leases_lease_id")),
        sqlite_autoincrement=True,
    )
    with op.batch_alter_table("leases", schema=None) as batch_op:
        batch_op.create_index("ix_leases_ended_at", ["ended_at"], unique=False)
        batch_op.create_index(
            "uq_leases_live",
            ["namespace", "key"],
            unique=True,
            sqlite_where=sa.text("status = 'live'"),
            postgresql_where=sa.text("status = 'live'"),
        )

    op.create_table(
        "uploads",
        sa.Column("epoch", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=False, nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("stored_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("epoch", "sha256", name=op.f("pk_uploads")),
    )


def downgrade() -> None:
    """An empty database."""
    op.drop_table("uploads")
    with op.batch_alter_table("leases", schema=None) as batch_op:
        batch_op.drop_index(
            "uq_leases_live", sqlite_where=sa.text("status = 'live'"), postgresql_where=sa.text("status = 'live'")
        )
        batch_op.drop_index("ix_leases_ended_at")

    op.drop_table("leases")
    with op.batch_alter_table("failures", schema=None) as batch_op:
        batch_op.drop_index("ix_failures_until")

    op.drop_table("failures")
    with op.batch_alter_table("entries", schema=None) as batch_op:
        batch_op.drop_index(
            "ix_entries_listing",
            sqlite_where=sa.text("state <> 'absent'"),
            postgresql_where=sa.text("state <> 'absent'"),
        )
        batch_op.drop_index("ix_entries_blob")

    op.drop_table("entries")
    with op.batch_alter_table("differences", schema=None) as batch_op:
        batch_op.drop_index("ix_differences_key")

    op.drop_table("differences")
    op.drop_table("counters")
    op.drop_table("blobs")
