"""An event: how one request for a key ended; and sums of events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from time import monotonic

from neffcache_client.wire import VERDICTS, Holder

from neffcache_server.database.models import COUNT_COLUMNS

assert tuple(COUNT_COLUMNS) == VERDICTS

REASONS = frozenset(
    (
        # failed
        "deterministic",
        "transient",
        "exhausted",
        "lost",
        "released",
        "aborted",
        "required",
        # fallback, and compiled without being published
        "unreachable",
        "breaker_open",
        "not_allowed",
        "refused",
        "corrupt",
        "blob_missing",
        "server_lost",
        "not_shared",
        "lease_lost",
        "spooled",
        "not_spooled",
        "publish_refused",
        "readonly",
        "download_failed",
        "download_slow",
        "mismatch",
        "unpublishable",
        "not_a_neff",
        "out_of_memory",
        # uncacheable
        "no_target",
        "no_input",
        "several_inputs",
        "unreadable_input",
        "missing_kernel",
        "unclear_kernel",
        "missing_file",
        "names_a_folder",
        "extract_only",
        "compiler_unknown",
    )
)
"""Reasons that are counted by name. Metrics have these as a label, so no client may add any."""

WRITE_ERRORS = frozenset(("spooled", "not_spooled", "publish_refused", "not_allowed", "lease_lost"))
"""Reasons that mean: a NEFF was compiled and nobody else got it (UC-23)."""

MAX_AGE_SECONDS = 30 * 86400.0
"""Older reports are counted as this old."""


def known_reason(reason: str | None) -> str:
    """`reason` if it is counted by name, `other` if not, empty for none."""
    if not reason:
        return ""
    return reason if reason in REASONS else "other"


@dataclass(slots=True)
class Event:
    """How one request ended. `happened` is monotonic time of this process."""

    namespace: str
    verdict: str
    host: str
    key: str | None = None
    job: str | None = None
    rank: int | None = None
    reason: str = ""
    source: str = "server"
    waited_seconds: float = 0.0
    spent_seconds: float = 0.0
    saved_seconds: float = 0.0
    """For a hit: what its compile took. Kept only for a host's first (see docs/savings.md)."""
    bytes: int = 0
    happened: float = field(default_factory=monotonic)
    at: float = 0.0
    """By the database's clock, known once it is written."""


def of_holder(namespace: str, key: str, holder: Holder, verdict: str) -> Event:
    """An event of the process that `holder` describes."""
    return Event(namespace, verdict, holder.host, key=key, job=holder.job, rank=holder.rank)


@dataclass(slots=True)
class Sums:
    """Amounts of several events."""

    number: int = 0
    waited_seconds: float = 0.0
    spent_seconds: float = 0.0
    saved_seconds: float = 0.0
    bytes: int = 0

    def add(self, event: Event) -> None:
        self.number += 1
        self.waited_seconds += event.waited_seconds
        self.spent_seconds += event.spent_seconds
        self.saved_seconds += event.saved_seconds
        self.bytes += event.bytes


@dataclass(slots=True)
class RankSums(Sums):
    """The same of one rank or job, with counts by verdict and the time they span."""

    verdicts: dict[str, int] = field(default_factory=dict)
    first_at: float = 0.0
    last_at: float = 0.0

    def add(self, event: Event) -> None:
        Sums.add(self, event)
        self.verdicts[event.verdict] = self.verdicts.get(event.verdict, 0) + 1
        began = event.at - event.waited_seconds - event.spent_seconds
        self.first_at = min(self.first_at or began, began)
        self.last_at = max(self.last_at, event.at)

    def row(self) -> dict[str, float]:
        """Values of the columns that `jobs` and `job_ranks` share."""
        counts = {column: self.verdicts.get(verdict, 0) for verdict, column in COUNT_COLUMNS.items()}
        return {
            **counts,
            "first_at": self.first_at,
            "last_at": self.last_at,
            "bytes": self.bytes,
            "waited_seconds": self.waited_seconds,
            "spent_seconds": self.spent_seconds,
            "saved_seconds": self.saved_seconds,
        }


Period = tuple[str, int, str, str, str]
"""hour, day or total; its start; namespace, verdict, reason."""


def by_period(events: Iterable[Event]) -> dict[Period, Sums]:
    """Sums for each hour, day and for good. The events have their `at`."""
    sums: dict[Period, Sums] = {}
    for e in events:
        hour, day = int(e.at // 3600) * 3600, int(e.at // 86400) * 86400
        for period, start in (("hour", hour), ("day", day), ("total", 0)):
            sums.setdefault((period, start, e.namespace, e.verdict, e.reason), Sums()).add(e)
    return sums


def by_rank(events: Iterable[Event]) -> dict[tuple[str, str, str, int], RankSums]:
    """Sums for each (namespace, job, host, rank); events of no job are left out."""
    sums: dict[tuple[str, str, str, int], RankSums] = {}
    for e in events:
        if e.job:
            rank = -1 if e.rank is None else e.rank
            sums.setdefault((e.namespace, e.job, e.host, rank), RankSums()).add(e)
    return sums


def by_job(events: Iterable[Event]) -> dict[tuple[str, str], RankSums]:
    """Sums for each (namespace, job)."""
    sums: dict[tuple[str, str], RankSums] = {}
    for e in events:
        if e.job:
            sums.setdefault((e.namespace, e.job), RankSums()).add(e)
    return sums
