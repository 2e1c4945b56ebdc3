"""Statements behind /v1/stats."""

from __future__ import annotations

from dataclasses import fields

from neffcache_client.wire import Stats
from sqlalchemy import func, select

from neffcache_server.database.engine import Database, ReadConnection
from neffcache_server.database.models import counters, entries, leases
from neffcache_server.stats.counters import Counts


class StatsRepository:
    """Figures of a namespace, or of all."""

    def __init__(self, database: Database) -> None:
        self._clock = database.clock

    async def read(self, db: ReadConnection, namespace: str | None) -> Stats:
        """Counters since the database was made, and what is stored and running now."""
        sums = select(*(func.coalesce(func.sum(counters.c[f.name]), 0).label(f.name) for f in fields(Counts)))
        stored = select(func.count(), func.coalesce(func.sum(entries.c.size), 0)).where(entries.c.state == "present")
        running = select(func.count()).where(leases.c.status == "live", leases.c.expires_at > self._clock.now())
        if namespace is not None:
            sums = sums.where(counters.c.namespace == namespace)
            stored = stored.where(entries.c.namespace == namespace)
            running = running.where(leases.c.namespace == namespace)
        counted = (await db.execute(sums)).one()
        number, size = (await db.execute(stored)).one()
        live = (await db.execute(running)).scalar_one()
        stats = Stats(namespace=namespace, entries=number, bytes=int(size), live_leases=live)
        for field in fields(Counts):
            value = getattr(counted, field.name)
            setattr(stats, field.name, float(value) if field.type == "float" else int(value))
        return stats
