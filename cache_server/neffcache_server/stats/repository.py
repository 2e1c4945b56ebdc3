"""Statements behind /v1/stats."""

from __future__ import annotations

from dataclasses import fields

from neffcache_client.wire import JobRow, Stats
from sqlalchemy import func, select

from neffcache_server.database.engine import Database, ReadConnection
from neffcache_server.database.models import counters, entries, leases
from neffcache_server.recording.history import Figures, History
from neffcache_server.stats.counters import Counts


class StatsRepository:
    """Figures of a namespace, or of all."""

    def __init__(self, database: Database) -> None:
        self._clock = database.clock
        self._history = History(database)

    async def read(self, db: ReadConnection, namespace: str | None) -> Stats:
        """Counters since the database was made, and what is stored and running now."""
        sums = select(*(func.coalesce(func.sum(counters.c[f.name]), 0).label(f.name) for f in fields(Counts)))
        if namespace is not None:
            sums = sums.where(counters.c.namespace == namespace)
        stats = await self._present(db, namespace)
        counted = (await db.execute(sums)).one()
        for field in fields(Counts):
            value = getattr(counted, field.name)
            setattr(stats, field.name, float(value) if field.type == "float" else int(value))
        figures = await self._history.figures(db, namespace)
        stats.verdicts, stats.waited_seconds, stats.bytes_served = _shared(figures)
        return stats

    async def of_period(self, db: ReadConnection, namespace: str | None, since: float) -> Stats:
        """The same figures of the hours from that of `since` on."""
        figures = await self._history.figures(db, namespace, since)
        stats = await self._present(db, namespace)
        _fill(stats, figures)
        stats.since = float(int(since // 3600) * 3600)
        return stats

    async def of_job(self, db: ReadConnection, namespace: str, job: JobRow) -> Stats:
        """The same figures of one job."""
        stats = await self._present(db, namespace)
        _fill(stats, Figures(job.verdicts, {}, job.waited_seconds, job.spent_seconds, job.saved_seconds, job.bytes))
        stats.job, stats.since = job.job, job.first_at
        return stats

    async def _present(self, db: ReadConnection, namespace: str | None) -> Stats:
        stored = select(func.count(), func.coalesce(func.sum(entries.c.size), 0)).where(entries.c.state == "present")
        running = select(func.count()).where(leases.c.status == "live", leases.c.expires_at > self._clock.now())
        if namespace is not None:
            stored = stored.where(entries.c.namespace == namespace)
            running = running.where(leases.c.namespace == namespace)
        number, size = (await db.execute(stored)).one()
        live = (await db.execute(running)).scalar_one()
        return Stats(namespace=namespace, entries=number, bytes=int(size), live_leases=live)


def _shared(figures: Figures) -> tuple[dict[str, int], float, int]:
    return figures.verdicts, figures.waited_seconds, figures.bytes


def _fill(stats: Stats, figures: Figures) -> None:
    stats.verdicts, stats.waited_seconds, stats.bytes_served = _shared(figures)
    counts = figures.verdicts
    stats.waits = counts.get("waited", 0)
    stats.hits = counts.get("remote", 0) + stats.waits
    stats.publishes = counts.get("compiled", 0) + counts.get("pushed", 0)
    stats.failures = counts.get("failed", 0)
    stats.misses = figures.compiles
    stats.compile_seconds_spent = figures.spent_seconds
    stats.compile_seconds_saved = figures.saved_seconds
