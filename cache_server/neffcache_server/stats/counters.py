"""Counts that are gathered in memory and written once a second.

Only counts whose loss does no harm: a killed server loses at most the last second of hits and waits. What says how
often something was compiled (publishes, failures) is written in the transaction that it belongs to.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, fields

from sqlalchemy import update

from neffcache_server.database.dialect import upsert
from neffcache_server.database.engine import Database, WriteConnection
from neffcache_server.database.models import counters, entries
from neffcache_server.problems import ServerProblem

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Counts:
    """Amounts to add to a namespace's counters."""

    hits: int = 0
    misses: int = 0
    waits: int = 0
    publishes: int = 0
    failures: int = 0
    nondeterministic: int = 0
    compile_seconds_spent: float = 0.0
    compile_seconds_saved: float = 0.0

    def add(self, other: Counts) -> None:
        for field in fields(Counts):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


async def add_counts(db: WriteConnection, dialect: str, namespace: str, counts: Counts) -> None:
    """Add to a namespace's counters within a transaction."""
    amounts = {f.name: value for f in fields(Counts) if (value := getattr(counts, f.name))}
    if not amounts:
        return
    statement = upsert(dialect, counters).values(namespace=namespace, **amounts)
    grown = {name: counters.c[name] + statement.excluded[name] for name in amounts}
    await db.execute(statement.on_conflict_do_update(index_elements=["namespace"], set_=grown))


class HitCounter:
    """Gathers hits, waits and misses; `flush` writes them."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._counts: dict[str, Counts] = {}
        self._hits: dict[tuple[str, str], int] = {}
        self._flushing = asyncio.Lock()

    def hit(self, namespace: str, key: str, *, waited: bool) -> None:
        """An artifact was served for a key."""
        self._hits[namespace, key] = self._hits.get((namespace, key), 0) + 1
        counts = self._counts.setdefault(namespace, Counts())
        counts.hits += 1
        counts.waits += waited

    def touch(self, namespace: str, key: str) -> None:
        """An artifact was served to somebody in another namespace: it is in use, and no hit of this one."""
        self._hits[namespace, key] = self._hits.get((namespace, key), 0) + 1

    def miss(self, namespace: str) -> None:
        """A lease was granted."""
        self._counts.setdefault(namespace, Counts()).misses += 1

    async def flush(self) -> None:
        """Write what was gathered. Raises DatabaseUnavailable and keeps the counts then."""
        async with self._flushing:
            counts, self._counts = self._counts, {}
            hits, self._hits = self._hits, {}
            if not counts and not hits:
                return
            try:
                await self._write(counts, hits)
            except ServerProblem:
                for namespace, amount in counts.items():
                    self._counts.setdefault(namespace, Counts()).add(amount)
                for topic, number in hits.items():
                    self._hits[topic] = self._hits.get(topic, 0) + number
                raise

    async def _write(self, counts: dict[str, Counts], hits: dict[tuple[str, str], int]) -> None:
        async with self._database.write() as db:
            # Sorted: two replicas that flush the same rows in different orders would lock each other out.
            for (namespace, key), number in sorted(hits.items()):
                await db.execute(
                    update(entries)
                    .where(entries.c.namespace == namespace, entries.c.key == key)
                    .values(hits=entries.c.hits + number, last_hit_at=self._database.clock.now())
                )
            for namespace, amount in sorted(counts.items()):
                await add_counts(db, self._database.dialect, namespace, amount)

    async def flush_every(self, seconds: float) -> None:
        """Flush for ever; faults are retried at the next turn."""
        while True:
            await asyncio.sleep(seconds)
            try:
                await self.flush()
            except ServerProblem as exc:
                _log.warning("hits could not be written yet: %s", exc.detail)
