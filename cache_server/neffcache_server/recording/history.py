"""Statements that read what was recorded. Nothing here changes anything."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from neffcache_client.wire import JobRow
from sqlalchemy import ColumnElement, Select, and_, func, select

from neffcache_server.database.engine import Database, ReadConnection
from neffcache_server.database.models import COUNT_COLUMNS, events, job_ranks, jobs, rollups
from neffcache_server.recording.events import WRITE_ERRORS

_AMOUNTS = ("waited_seconds", "spent_seconds", "saved_seconds", "bytes")


@dataclass(slots=True)
class Figures:
    """Sums over requests, by verdict and reason."""

    verdicts: dict[str, int] = field(default_factory=dict)
    reasons: dict[tuple[str, str], int] = field(default_factory=dict)
    waited_seconds: float = 0.0
    spent_seconds: float = 0.0
    saved_seconds: float = 0.0
    bytes: int = 0

    def add(self, row: Any) -> None:
        self.verdicts[row.verdict] = self.verdicts.get(row.verdict, 0) + int(row.number)
        if row.reason:
            place = (row.verdict, row.reason)
            self.reasons[place] = self.reasons.get(place, 0) + int(row.number)
        self.waited_seconds += float(row.waited_seconds)
        self.spent_seconds += float(row.spent_seconds)
        self.saved_seconds += float(row.saved_seconds)
        self.bytes += int(row.bytes)

    @property
    def requests(self) -> int:
        """All that ranks asked for; what was pushed from a spool was asked for before."""
        return sum(n for verdict, n in self.verdicts.items() if verdict != "pushed")

    @property
    def hits(self) -> int:
        """Requests that no compile of their own followed."""
        return sum(self.verdicts.get(v, 0) for v in ("local", "remote", "waited"))

    @property
    def compiles(self) -> int:
        """Runs of the compiler that gave a NEFF, published or not."""
        return sum(self.verdicts.get(v, 0) for v in ("compiled", "fallback", "uncacheable"))

    @property
    def hit_rate(self) -> float | None:
        """Hits of all requests, None before the first."""
        return self.hits / self.requests if self.requests else None

    @property
    def write_errors(self) -> int:
        """NEFFs that were compiled and reached nobody else."""
        return sum(
            n for (verdict, reason), n in self.reasons.items() if verdict != "failed" and reason in WRITE_ERRORS
        )


class History:
    """Reads sums, events and jobs."""

    def __init__(self, database: Database) -> None:
        self._clock = database.clock

    async def now(self, db: ReadConnection) -> float:
        """The database's clock."""
        return float((await db.execute(select(self._clock.now()))).scalar_one())

    async def figures(self, db: ReadConnection, namespace: str | None, since: float | None = None) -> Figures:
        """Sums for good, or of the hours from that of `since` on (days, where hours are kept no longer)."""
        period: ColumnElement[bool] = rollups.c.period == "total"
        if since is not None:
            period = and_(rollups.c.period == "hour", rollups.c.starts_at >= int(since // 3600) * 3600)
        return _summed(await db.execute(self._sums(namespace, period)))

    async def series(
        self, db: ReadConnection, namespace: str | None, period: str, since: float, step: int
    ) -> dict[int, Figures]:
        """Figures by start of each step of `step` seconds, from hourly or daily sums (`period`)."""
        start = (rollups.c.starts_at - rollups.c.starts_at % step).label("start")
        where = (rollups.c.period == period) & (rollups.c.starts_at >= int(since))
        statement = self._sums(namespace, where).add_columns(start).group_by(start)
        found: dict[int, Figures] = {}
        for row in await db.execute(statement):
            found.setdefault(int(row.start), Figures()).add(row)
        return found

    async def by_namespace(self, db: ReadConnection, since: float, period: str = "day") -> dict[str, Figures]:
        """Figures of each namespace."""
        where: ColumnElement[bool] = rollups.c.period == period
        if period != "total":
            where = and_(where, rollups.c.starts_at >= int(since))
        statement = self._sums(None, where).add_columns(rollups.c.namespace).group_by(rollups.c.namespace)
        found: dict[str, Figures] = {}
        for row in await db.execute(statement):
            found.setdefault(row.namespace, Figures()).add(row)
        return found

    def _sums(self, namespace: str | None, where: ColumnElement[bool]) -> Select[Any]:
        sums = [func.sum(rollups.c[name]).label(name) for name in ("number", *_AMOUNTS)]
        statement = select(rollups.c.verdict, rollups.c.reason, *sums).where(where)
        if namespace is not None:
            statement = statement.where(rollups.c.namespace == namespace)
        return statement.group_by(rollups.c.verdict, rollups.c.reason)

    async def jobs(
        self,
        db: ReadConnection,
        namespace: str | None,
        *,
        limit: int = 100,
        offset: int = 0,
        search: str = "",
        order: str = "last_at",
        since: float | None = None,
    ) -> list[JobRow]:
        """Jobs by a column of theirs, largest first."""
        statement = self._jobs(select(jobs), namespace, search, since)
        statement = statement.order_by(jobs.c[order].desc(), jobs.c.job).limit(limit).offset(offset)
        return [_job(row) for row in await db.execute(statement)]

    async def count_jobs(self, db: ReadConnection, namespace: str | None, search: str = "") -> int:
        """How many jobs `jobs` would find."""
        statement = self._jobs(select(func.count()).select_from(jobs), namespace, search, None)
        return int((await db.execute(statement)).scalar_one())

    def _jobs(self, statement: Any, namespace: str | None, search: str, since: float | None) -> Any:
        if namespace is not None:
            statement = statement.where(jobs.c.namespace == namespace)
        if search:
            statement = statement.where(jobs.c.job.icontains(search, autoescape=True))
        if since is not None:
            statement = statement.where(jobs.c.last_at >= since)
        return statement

    async def job(self, db: ReadConnection, namespace: str, name: str) -> JobRow | None:
        """One job."""
        row = (await db.execute(select(jobs).where(jobs.c.namespace == namespace, jobs.c.job == name))).one_or_none()
        return _job(row) if row is not None else None

    async def ranks(self, db: ReadConnection, namespace: str, name: str, limit: int) -> list[JobRow]:
        """A job's ranks, those that waited and compiled longest first."""
        took = job_ranks.c.waited_seconds + job_ranks.c.spent_seconds
        statement = (
            select(job_ranks)
            .where(job_ranks.c.namespace == namespace, job_ranks.c.job == name)
            .order_by(took.desc(), job_ranks.c.rank, job_ranks.c.host)
            .limit(limit)
        )
        return [_rank(row) for row in await db.execute(statement)]

    async def job_events(self, db: ReadConnection, namespace: str, name: str, limit: int) -> list[Any]:
        """A job's single requests, earliest first, as long as they are kept."""
        statement = (
            select(events)
            .where(events.c.namespace == namespace, events.c.job == name)
            .order_by(events.c.at)
            .limit(limit)
        )
        return list(await db.execute(statement))

    async def key_events(self, db: ReadConnection, namespace: str, key: str, limit: int) -> list[Any]:
        """Requests for a key, latest first, as long as they are kept."""
        statement = (
            select(events)
            .where(events.c.namespace == namespace, events.c.key == key)
            .order_by(events.c.at.desc())
            .limit(limit)
        )
        return list(await db.execute(statement))


def _summed(rows: Any) -> Figures:
    figures = Figures()
    for row in rows:
        figures.add(row)
    return figures


def _common(row: Any) -> dict[str, Any]:
    return {
        "job": row.job,
        "namespace": row.namespace,
        "first_at": row.first_at,
        "last_at": row.last_at,
        "verdicts": {verdict: n for verdict, column in COUNT_COLUMNS.items() if (n := getattr(row, column))},
        "bytes": row.bytes,
        "waited_seconds": row.waited_seconds,
        "spent_seconds": row.spent_seconds,
        "saved_seconds": row.saved_seconds,
    }


def _job(row: Any) -> JobRow:
    return JobRow(**_common(row), hosts=row.hosts, ranks=row.ranks)


def _rank(row: Any) -> JobRow:
    return JobRow(
        **_common(row),
        host=row.host,
        rank=row.rank if row.rank >= 0 else None,
        ready_seconds=row.ready_seconds,
        fetch_seconds=row.fetch_seconds,
    )
