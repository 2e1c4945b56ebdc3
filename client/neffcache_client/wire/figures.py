"""Figures: statistics, what clients report, jobs, compiles under way."""

from __future__ import annotations

from dataclasses import dataclass, field

from neffcache_client.wire.base import MAX_REPORTS, NESTED, VERDICTS, check_key
from neffcache_client.wire.leases import Holder


@dataclass(slots=True, kw_only=True)
class Stats:
    """Figures of one namespace, or of all. Counters are since the database was made."""

    namespace: str | None
    entries: int = 0
    bytes: int = 0
    hits: int = 0
    misses: int = 0
    waits: int = 0
    publishes: int = 0
    failures: int = 0
    nondeterministic: int = 0
    live_leases: int = 0
    compile_seconds_spent: float = 0.0
    compile_seconds_saved: float = 0.0
    waited_seconds: float = 0.0
    bytes_served: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)
    """How requests ended, those that clients reported included; see `records.VERDICTS`."""
    since: float | None = None
    """When counting began, for figures of a period. Then the counters above it are of that period as well."""
    job: str | None = None


@dataclass(slots=True, kw_only=True)
class Report:
    """How a request ended that the server did not answer. Told as an age, since clocks of hosts differ."""

    verdict: str
    age_seconds: float = 0.0
    host: str = ""
    rank: int | None = None
    job: str | None = None
    key: str | None = None
    reason: str | None = None
    waited_seconds: float = 0.0
    compile_seconds: float = 0.0
    bytes: int = 0

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict must be one of {', '.join(VERDICTS)}")
        if self.key is not None:
            check_key(self.key)
        if min(self.age_seconds, self.waited_seconds, self.compile_seconds, self.bytes) < 0:
            raise ValueError("durations and sizes must not be negative")


@dataclass(slots=True, kw_only=True)
class RunReport:
    """What a rank says when its process ends. Its verdicts were counted one by one already."""

    host: str
    job: str
    age_seconds: float = 0.0
    rank: int | None = None
    ready_seconds: float | None = None
    """From the activation of the cache to the end of the last request."""
    fetch_seconds: float | None = None
    """Spent on hits, waiting not included."""


@dataclass(slots=True, kw_only=True)
class ReportsRequest:
    """What clients noted since they last reported. A batch that is sent twice counts once."""

    batch: str
    reports: list[Report] = field(default_factory=list)
    runs: list[RunReport] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_key(self.batch, "batch")
        if len(self.reports) + len(self.runs) > MAX_REPORTS:
            raise ValueError(f"at most {MAX_REPORTS} reports and runs a batch")


@dataclass(slots=True, kw_only=True)
class ReportsAnswer:
    """`taken` is 0 for a batch that was taken before."""

    taken: int


@dataclass(slots=True, kw_only=True)
class JobRow:
    """A job's figures, or those of one of its ranks (then `host` is set, and `rank` unless it had none)."""

    job: str
    namespace: str
    first_at: float
    last_at: float
    hosts: int = 0
    ranks: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    waited_seconds: float = 0.0
    spent_seconds: float = 0.0
    saved_seconds: float = 0.0
    host: str | None = None
    rank: int | None = None
    ready_seconds: float | None = None
    fetch_seconds: float | None = None


@dataclass(slots=True, kw_only=True)
class JobList:
    """Jobs of a namespace, latest first."""

    jobs: list[JobRow]


@dataclass(slots=True, kw_only=True)
class JobShow:
    """A job and its ranks, those that took longest first."""

    job: JobRow
    ranks: list[JobRow] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class LiveLease:
    """A compile under way, as anybody may see it: without its lease id."""

    namespace: str
    key: str
    holder: Holder
    age_seconds: float
    heartbeat_age_seconds: float
    usual_seconds: float | None = None
    """How long this key took when it was last compiled."""
    phase: str | None = None
    rss_bytes: int | None = None
    waiters: int = 0
    """Requests that wait for it at the server process that answered."""
    stuck: bool = False
    """Silent for longer than two heartbeats."""


@dataclass(slots=True, kw_only=True)
class Live:
    """What goes on at present, and how much happened in the last minute."""

    now: float
    leases: list[LiveLease] = field(default_factory=list)
    waiters: int = 0
    failures: int = 0
    last_minute: dict[str, int] = field(default_factory=dict)


NESTED.update(
    {
        ("ReportsRequest", "reports"): Report,
        ("ReportsRequest", "runs"): RunReport,
        ("JobList", "jobs"): JobRow,
        ("JobShow", "job"): JobRow,
        ("JobShow", "ranks"): JobRow,
        ("LiveLease", "holder"): Holder,
        ("Live", "leases"): LiveLease,
    }
)
