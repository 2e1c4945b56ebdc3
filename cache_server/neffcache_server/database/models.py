"""The tables. SQLite and PostgreSQL share them; Alembic's revisions create them.

Instants are Unix seconds by the database's clock (see `clock`). Whoever changes an entry, or the lease or failure
of its key, first locks the key's row in `entries`, so transitions of one key queue up behind each other.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    false,
    text,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# SQLite gives only a column of type INTEGER its own numbers.
_SERIAL = BigInteger().with_variant(Integer, "sqlite")


def _namespace() -> Column[str]:
    return Column("namespace", String(63), primary_key=True)


def _key() -> Column[str]:
    return Column("key", String(64), primary_key=True)


def _holder() -> list[Column[str] | Column[int]]:
    return [
        Column("host", String(255)),
        Column("boot", String(255)),
        Column("pid", BigInteger),
        Column("rank", BigInteger),
        Column("job", String(255)),
    ]


entries = Table(
    "entries",
    metadata,
    _namespace(),
    _key(),
    # absent | present | missing (its blob is gone) | quarantined
    Column("state", String(16), nullable=False, server_default="absent"),
    Column("sha256", String(64)),
    Column("size", BigInteger),
    Column("compiler_version", String(255)),
    Column("target", String(255)),
    # The last three stay when the artifact goes: they are the history that estimates come from.
    Column("compile_seconds", Double),
    Column("cpu_seconds", Double),
    Column("peak_rss_bytes", BigInteger),
    Column("created_at", Double),
    *_holder(),
    Column("hits", BigInteger, nullable=False, server_default="0"),
    Column("last_hit_at", Double),
    Column("factors", Text),
    # Garbage collection leaves it alone.
    Column("pinned", Boolean, nullable=False, server_default=false()),
    # Of a key without an artifact: when a lease of it was last granted, somebody asked for it in vain, or the
    # artifact went. NULL: not known yet (from before there was the column), counts from the next collection.
    Column("asked_at", Double),
    CheckConstraint("state IN ('absent', 'present', 'missing', 'quarantined')", name="state"),
    CheckConstraint(
        "state = 'absent' OR (sha256 IS NOT NULL AND size IS NOT NULL AND created_at IS NOT NULL)", name="artifact"
    ),
    Index(
        "ix_entries_listing",
        "namespace",
        "created_at",
        "key",
        sqlite_where=text("state <> 'absent'"),
        postgresql_where=text("state <> 'absent'"),
    ),
    Index("ix_entries_blob", "namespace", "sha256"),
    # For look-ups of many keys on PostgreSQL: a quarter of the primary key's size, and one or two pages a key where
    # that takes four. SQLite is as fast without, so it has an index of no rows.
    Index("ix_entries_key", "key", postgresql_using="hash", sqlite_where=text("0")),
    Index(
        "ix_entries_history",
        "namespace",
        "asked_at",
        "key",
        sqlite_where=text("state = 'absent'"),
        postgresql_where=text("state = 'absent'"),
    ),
)

leases = Table(
    "leases",
    metadata,
    # AUTOINCREMENT and not a plain row id: SQLite would hand out the highest number again after its row was deleted.
    Column("epoch", _SERIAL, primary_key=True, autoincrement=True),
    Column("lease_id", String(64), nullable=False, unique=True),
    Column("namespace", String(63), nullable=False),
    Column("key", String(64), nullable=False),
    # live (expired ones too, until somebody supersedes them) | superseded | released | published | failed
    Column("status", String(16), nullable=False),
    Column("confirmed", Boolean, nullable=False),
    Column("retry_failed", Boolean, nullable=False),
    Column("granted_at", Double, nullable=False),
    Column("heartbeat_at", Double),
    Column("expires_at", Double, nullable=False),
    Column("ended_at", Double),
    *_holder(),
    Column("phase", String(64)),
    Column("rss_bytes", BigInteger),
    # The answer that ended it, so that a repeated request gets the same one.
    Column("outcome", Text),
    CheckConstraint("status IN ('live', 'superseded', 'released', 'published', 'failed')", name="status"),
    # What makes two compilers for one key impossible, whatever the code does.
    Index(
        "uq_leases_live",
        "namespace",
        "key",
        unique=True,
        sqlite_where=text("status = 'live'"),
        postgresql_where=text("status = 'live'"),
    ),
    Index("ix_leases_ended_at", "ended_at"),
    sqlite_autoincrement=True,
)

failures = Table(
    "failures",
    metadata,
    _namespace(),
    _key(),
    # The round: transient failures since the last publish.
    Column("transient_count", Integer, nullable=False),
    Column("last_failure_at", Double, nullable=False),
    Column("yield_host", String(255)),
    Column("yield_until", Double),
    # The failure in force, when there is one: deterministic | exhausted
    Column("kind", String(16)),
    Column("exit_code", BigInteger),
    Column("code", String(64)),
    Column("log_tail", Text),
    Column("host", String(255)),
    Column("first_seen_at", Double),
    Column("until", Double),
    # Set when a job passed over a failure with retry_failed and this is what came of it.
    Column("retried_job", String(255)),
    # When a compile of this round ended well and its result could not be handed over.
    Column("unshared_at", Double),
    Index("ix_failures_until", "namespace", "until"),
)

blobs = Table(
    "blobs",
    metadata,
    _namespace(),
    Column("sha256", String(64), primary_key=True),
    Column("size", BigInteger, nullable=False),
    Column("compiler_version", String(255)),
    Column("target", String(255)),
    Column("stored_at", Double, nullable=False),
    # When garbage collection found that nothing refers to it; the bytes go a grace later.
    Column("doomed_at", Double),
    Index(
        "ix_blobs_doomed_at",
        "doomed_at",
        sqlite_where=text("doomed_at IS NOT NULL"),
        postgresql_where=text("doomed_at IS NOT NULL"),
    ),
)

uploads = Table(
    "uploads",
    metadata,
    Column("epoch", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=False),
    Column("sha256", String(64), primary_key=True),
    Column("stored_at", Double, nullable=False),
)

# Uploads that were sent to the store by a presigned URL; the store is asked about them when they are published.
tickets = Table(
    "tickets",
    metadata,
    Column("epoch", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=False),
    Column("sha256", String(64), primary_key=True),
    Column("size", BigInteger, nullable=False),
    Column("issued_at", Double, nullable=False),
)

# One row: when some replica could last have taken a heartbeat.
pulse = Table(
    "pulse",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("beaten_at", Double, nullable=False),
)

differences = Table(
    "differences",
    metadata,
    Column("id", _SERIAL, primary_key=True, autoincrement=True),
    Column("namespace", String(63), nullable=False),
    Column("key", String(64), nullable=False),
    Column("stored_sha256", String(64), nullable=False),
    Column("offered_sha256", String(64), nullable=False),
    Column("members", Text, nullable=False),
    Column("host", String(255)),
    Column("compiler_version", String(255)),
    Column("seen_at", Double, nullable=False),
    Index("ix_differences_key", "namespace", "key"),
)

counters = Table(
    "counters",
    metadata,
    _namespace(),
    *(
        Column(name, BigInteger, nullable=False, server_default="0")
        for name in ("hits", "misses", "waits", "publishes", "failures", "nondeterministic")
    ),
    *(
        Column(name, Double, nullable=False, server_default="0")
        for name in ("compile_seconds_spent", "compile_seconds_saved")
    ),
)

# From here on: what misses are explained with. Losing a row costs an explanation, never a hit.

graphs = Table(
    "graphs",
    metadata,
    _namespace(),
    _key(),
    # What two keys may have in common; the nearest one is looked for along the indexes on these.
    Column("ir_digest", String(64)),
    Column("ir_shape", String(16)),  # digest of the op counts: equal for graphs that differ in constants or shapes
    Column("ir_ops", BigInteger),  # number of operations: close for graphs that differ by a few
    Column("settings", String(16), nullable=False),  # digest of all factors but the graph
    Column("seen_at", Double, nullable=False),
    Column("summary", Text),
    Column("counts", Text),
    Column("described_at", Double),
    Index("ix_graphs_ir_digest", "namespace", "ir_digest", "seen_at"),
    Index("ix_graphs_ir_shape", "namespace", "ir_shape", "seen_at"),
    Index("ix_graphs_ir_ops", "namespace", "ir_ops"),
    Index("ix_graphs_settings", "namespace", "settings", "seen_at"),
    Index("ix_graphs_described_at", "described_at"),
)

# What one replica does for all of them, and when it is due next.
chores = Table(
    "chores",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("next_at", Double, nullable=False),
)

tokens = Table(
    "tokens",
    metadata,
    # Public; the token itself is nowhere.
    Column("id", String(32), primary_key=True),
    Column("sha256", String(64), nullable=False, unique=True),
    Column("name", String(255), nullable=False),
    # read | write | admin
    Column("role", String(8), nullable=False),
    # One namespace, or * for all
    Column("namespace", String(63), nullable=False),
    Column("created_by", String(32), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    Column("revoked_at", Double),
    CheckConstraint("role IN ('read', 'write', 'admin')", name="role"),
    Index("ix_tokens_namespace", "namespace"),
)

# What replicas share and nobody else may know: the key that signs sessions.
secrets = Table(
    "secrets",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("value", String(255), nullable=False),
)

misses = Table(
    "misses",
    metadata,
    _namespace(),
    # No job is '' and no rank is -1: a primary key has no NULLs.
    Column("job", String(255), primary_key=True),
    _key(),
    Column("host", String(255), primary_key=True),
    Column("rank", BigInteger, primary_key=True, autoincrement=False),
    Column("at", Double, nullable=False),
    Index("ix_misses_key", "namespace", "key", "at"),
    Index("ix_misses_at", "at"),
)


# What happened, see docs/savings.md. `events` are kept for days, `rollups` for good in their coarsest form.
COUNT_COLUMNS = {
    "local": "local_hits",
    "remote": "remote_hits",
    "waited": "waits",
    "compiled": "compiles",
    "failed": "failures",
    "fallback": "fallbacks",
    "uncacheable": "uncacheable",
    "pushed": "pushes",
}
"""The verdicts of events, and the columns that count them."""


def _amounts() -> list[Column[float]]:
    seconds = ("waited_seconds", "spent_seconds", "saved_seconds")
    return [Column(name, Double, nullable=False, server_default="0") for name in seconds]


def _counts() -> list[Column[int]]:
    return [
        Column(name, BigInteger, nullable=False, server_default="0") for name in (*COUNT_COLUMNS.values(), "bytes")
    ]


events = Table(
    "events",
    metadata,
    Column("id", _SERIAL, primary_key=True, autoincrement=True),
    # When the request ended.
    Column("at", Double, nullable=False),
    Column("namespace", String(63), nullable=False),
    Column("key", String(64)),
    Column("job", String(255)),
    Column("host", String(255), nullable=False),
    Column("rank", BigInteger),
    Column("verdict", String(16), nullable=False),
    Column("reason", String(32), nullable=False, server_default=""),
    # server | client
    Column("source", String(8), nullable=False),
    *_amounts(),
    Column("bytes", BigInteger, nullable=False, server_default="0"),
    Index("ix_events_at", "at"),
    Index("ix_events_job", "namespace", "job", "at"),
    Index("ix_events_key", "namespace", "key", "at"),
)

rollups = Table(
    "rollups",
    metadata,
    # hour | day | total
    Column("period", String(8), primary_key=True),
    Column("starts_at", BigInteger, primary_key=True, autoincrement=False),
    _namespace(),
    Column("verdict", String(16), primary_key=True),
    Column("reason", String(32), primary_key=True),
    Column("number", BigInteger, nullable=False, server_default="0"),
    *_amounts(),
    Column("bytes", BigInteger, nullable=False, server_default="0"),
)

jobs = Table(
    "jobs",
    metadata,
    _namespace(),
    Column("job", String(255), primary_key=True),
    Column("first_at", Double, nullable=False),
    Column("last_at", Double, nullable=False),
    Column("hosts", BigInteger, nullable=False, server_default="0"),
    Column("ranks", BigInteger, nullable=False, server_default="0"),
    *_counts(),
    *_amounts(),
    Index("ix_jobs_last_at", "last_at"),
)

job_ranks = Table(
    "job_ranks",
    metadata,
    _namespace(),
    Column("job", String(255), primary_key=True),
    Column("host", String(255), primary_key=True),
    # -1 for a process without a rank
    Column("rank", BigInteger, primary_key=True, autoincrement=False),
    Column("first_at", Double, nullable=False),
    Column("last_at", Double, nullable=False),
    *_counts(),
    *_amounts(),
    # From the rank's own report at its end.
    Column("ready_seconds", Double),
    Column("fetch_seconds", Double),
    Index("ix_job_ranks_last_at", "last_at"),
)

# Hosts that had a key once: a second hit there is no saving.
host_keys = Table(
    "host_keys",
    metadata,
    _namespace(),
    _key(),
    Column("host", String(255), primary_key=True),
    Column("first_at", Double, nullable=False),
    Index("ix_host_keys_first_at", "first_at"),
)

# Reports that were taken: one that is sent again, because its answer was lost, counts once.
report_batches = Table(
    "report_batches",
    metadata,
    _namespace(),
    Column("batch", String(64), primary_key=True),
    Column("taken_at", Double, nullable=False),
    Index("ix_report_batches_taken_at", "taken_at"),
)
