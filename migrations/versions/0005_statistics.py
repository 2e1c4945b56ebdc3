"""Statistics: events, their sums by hour, day and job, and which host had which graph."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_COUNTS = (
    "local_hits",
    "remote_hits",
    "waits",
    "compiles",
    "failures",
    "fallbacks",
    "uncacheable",
    "pushes",
    "bytes",
)


def _text(name: str, length: int, *, nullable: bool = False, default: str | None = None) -> sa.Column[str]:
    return sa.Column(name, sa.String(length=length), nullable=nullable, server_default=default)


def _number(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), server_default="0", nullable=False)


def _seconds() -> list[sa.Column[float]]:
    names = ("waited_seconds", "spent_seconds", "saved_seconds")
    return [sa.Column(name, sa.Double(), server_default="0", nullable=False) for name in names]


def _instant(name: str) -> sa.Column[float]:
    return sa.Column(name, sa.Double(), nullable=False)


def upgrade() -> None:
    """Six new tables; older code does not miss them."""
    op.create_table(
        "events",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        _instant("at"),
        _text("namespace", 63),
        _text("key", 64, nullable=True),
        _text("job", 255, nullable=True),
        _text("host", 255),
        sa.Column("rank", sa.BigInteger(), nullable=True),
        _text("verdict", 16),
        _text("reason", 32, default=""),
        _text("source", 8),
        *_seconds(),
        _number("bytes"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
    )
    op.create_index("ix_events_at", "events", ["at"])
    op.create_index("ix_events_job", "events", ["namespace", "job", "at"])
    op.create_index("ix_events_key", "events", ["namespace", "key", "at"])
    op.create_table(
        "rollups",
        _text("period", 8),
        sa.Column("starts_at", sa.BigInteger(), autoincrement=False, nullable=False),
        _text("namespace", 63),
        _text("verdict", 16),
        _text("reason", 32),
        _number("number"),
        *_seconds(),
        _number("bytes"),
        sa.PrimaryKeyConstraint("period", "starts_at", "namespace", "verdict", "reason", name=op.f("pk_rollups")),
    )
    op.create_table(
        "jobs",
        _text("namespace", 63),
        _text("job", 255),
        _instant("first_at"),
        _instant("last_at"),
        _number("hosts"),
        _number("ranks"),
        *(_number(name) for name in _COUNTS),
        *_seconds(),
        sa.PrimaryKeyConstraint("namespace", "job", name=op.f("pk_jobs")),
    )
    op.create_index("ix_jobs_last_at", "jobs", ["last_at"])
    op.create_table(
        "job_ranks",
        _text("namespace", 63),
        _text("job", 255),
        _text("host", 255),
        sa.Column("rank", sa.BigInteger(), autoincrement=False, nullable=False),
        _instant("first_at"),
        _instant("last_at"),
        *(_number(name) for name in _COUNTS),
        *_seconds(),
        sa.Column("ready_seconds", sa.Double(), nullable=True),
        sa.Column("fetch_seconds", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("namespace", "job", "host", "rank", name=op.f("pk_job_ranks")),
    )
    op.create_index("ix_job_ranks_last_at", "job_ranks", ["last_at"])
    op.create_table(
        "host_keys",
        _text("namespace", 63),
        _text("key", 64),
        _text("host", 255),
        _instant("first_at"),
        sa.PrimaryKeyConstraint("namespace", "key", "host", name=op.f("pk_host_keys")),
    )
    op.create_index("ix_host_keys_first_at", "host_keys", ["first_at"])
    op.create_table(
        "report_batches",
        _text("namespace", 63),
        _text("batch", 64),
        _instant("taken_at"),
        sa.PrimaryKeyConstraint("namespace", "batch", name=op.f("pk_report_batches")),
    )
    op.create_index("ix_report_batches_taken_at", "report_batches", ["taken_at"])


def downgrade() -> None:
    """Drop them."""
    for name in ("report_batches", "host_keys", "job_ranks", "jobs", "rollups", "events"):
        op.drop_table(name)
