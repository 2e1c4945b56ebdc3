"""Statements on what is kept to explain misses."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from neffcache_client.explanation import KnownKey, Miss
from neffcache_client.wire import Holder
from sqlalchemy import ColumnElement, and_, delete, select, update

from neffcache_server.database.dialect import upsert
from neffcache_server.database.engine import Database, ReadConnection, WriteConnection
from neffcache_server.database.models import entries, events, graphs, misses
from neffcache_server.explain.factors import Factors, graph_digest, settings_digest
from neffcache_server.kit.storable import storable, storable_rank
from neffcache_server.leases.repository import holder_of

_PER_INDEX = 20
"""Candidates taken along each index: what bounds the cost of an explanation, however many keys there are."""
_NO_RANK = -1


MissKey = tuple[str, str, str, int]
"""Job, key, host and rank of a row of `misses`."""


def miss_key(key: str, holder: Holder) -> MissKey:
    """The row of a holder's miss."""
    rank = storable_rank(holder.rank)
    return storable(holder.job or "")[:255], key, storable(holder.host)[:255], _NO_RANK if rank is None else rank


@dataclass(slots=True)
class Described:
    """A key with all that is kept of it but its summary."""

    known: KnownKey
    factors: Factors
    shape: str | None
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class MissRow:
    """One row of `misses`."""

    key: str
    miss: Miss


class ExplainRepository:
    """Bound to a database only for its clock and dialect."""

    def __init__(self, database: Database) -> None:
        self._dialect = database.dialect
        self._clock = database.clock

    async def keep_factors(self, db: WriteConnection, namespace: str, key: str, factors: Factors) -> None:
        """Remember by what a key may be found as a neighbour, if that is not known yet."""
        row = {
            "namespace": namespace,
            "key": key,
            "ir_digest": graph_digest(factors),
            "settings": settings_digest(factors),
            "seen_at": self._clock.now(),
        }
        await db.execute(upsert(self._dialect, graphs).values(row).on_conflict_do_nothing())

    async def keep_summary(
        self, db: WriteConnection, namespace: str, key: str, text: str, counts: dict[str, int]
    ) -> bool:
        """Keep the summary of a known key's graph and its op counts, the first that come. False: no such key."""
        where = (graphs.c.namespace == namespace) & (graphs.c.key == key)
        if (await db.execute(select(graphs.c.key).where(where))).one_or_none() is None:
            return False
        values = {
            "summary": text,
            "counts": json.dumps(counts, sort_keys=True),
            "ir_shape": shape_of(counts),
            "ir_ops": sum(counts.values()),
            "described_at": self._clock.now(),
        }
        await db.execute(update(graphs).where(where, graphs.c.summary.is_(None)).values(values))
        return True

    async def keep_unclaimed(
        self, db: WriteConnection, namespace: str, key: str, factors: Factors | None, text: str | None
    ) -> None:
        """Keep that a key without a lease was asked for, and its factors; `text` is what they were sent as."""
        now = self._clock.now()
        if factors is None:
            this = and_(entries.c.namespace == namespace, entries.c.key == key)
            await db.execute(update(entries).where(this).values(asked_at=now))
            return
        row = upsert(self._dialect, entries).values(namespace=namespace, key=key, factors=text, asked_at=now)
        await db.execute(
            row.on_conflict_do_update(index_elements=["namespace", "key"], set_={"asked_at": row.excluded.asked_at})
        )
        await self.keep_factors(db, namespace, key, factors)

    async def note_misses(self, db: WriteConnection, namespace: str, rows: Iterable[MissKey]) -> None:
        """Note who asked for which keys in vain; asking again moves the time. No row may come twice."""
        names = ("job", "key", "host", "rank")
        values = [
            {"namespace": namespace, "at": self._clock.now(), **dict(zip(names, row, strict=True))} for row in rows
        ]
        if not values:
            return
        statement = upsert(self._dialect, misses).values(values)
        await db.execute(
            statement.on_conflict_do_update(index_elements=["namespace", *names], set_={"at": statement.excluded.at})
        )

    async def keys_from(self, db: ReadConnection, namespace: str, prefix: str) -> list[str]:
        """At most two known keys that begin with `prefix`."""
        found: set[str] = set()
        for table in (entries, graphs):
            # A range and not LIKE: the primary key's index serves it in every collation. `g` follows `f`.
            inside = (table.c.key >= prefix) & (table.c.key < prefix + "g")
            statement = select(table.c.key).where(table.c.namespace == namespace, inside).order_by(table.c.key)
            found.update((await db.execute(statement.limit(2))).scalars())
        return sorted(found)[:2]

    async def describe(self, db: ReadConnection, namespace: str, keys: Collection[str]) -> dict[str, Described]:
        """What is known of those keys."""
        statement = (
            select(entries, graphs.c.seen_at, graphs.c.ir_shape, graphs.c.counts)
            .select_from(entries)
            .outerjoin(graphs, (graphs.c.namespace == entries.c.namespace) & (graphs.c.key == entries.c.key))
            .where(entries.c.namespace == namespace, entries.c.key.in_(keys))
        )
        return {row.key: _described(row) for row in await db.execute(statement)} if keys else {}

    async def neighbours(self, db: ReadConnection, namespace: str, key: str) -> set[str]:
        """Keys that may be the nearest to `key`: those with its graph, its op counts, about its number of ops, its
        settings. At most five times `_PER_INDEX`, each found along an index."""
        own = (
            await db.execute(select(graphs).where(graphs.c.namespace == namespace, graphs.c.key == key))
        ).one_or_none()
        if own is None:
            return set()
        newest = graphs.c.seen_at.desc()
        found = await self._along(db, namespace, graphs.c.settings == own.settings, newest)
        if own.ir_digest is not None:
            found |= await self._along(db, namespace, graphs.c.ir_digest == own.ir_digest, newest)
        if own.ir_shape is not None:
            found |= await self._along(db, namespace, graphs.c.ir_shape == own.ir_shape, newest)
            found |= await self._along(db, namespace, graphs.c.ir_ops >= own.ir_ops, graphs.c.ir_ops.asc())
            found |= await self._along(db, namespace, graphs.c.ir_ops < own.ir_ops, graphs.c.ir_ops.desc())
        return found - {key}

    async def _along(
        self, db: ReadConnection, namespace: str, where: ColumnElement[bool], order: ColumnElement[Any]
    ) -> set[str]:
        statement = select(graphs.c.key).where(graphs.c.namespace == namespace, where)
        return set((await db.execute(statement.order_by(order).limit(_PER_INDEX))).scalars())

    async def summaries(self, db: ReadConnection, namespace: str, keys: Collection[str]) -> dict[str, str]:
        """The encoded summaries of those keys that have one."""
        statement = select(graphs.c.key, graphs.c.summary).where(
            graphs.c.namespace == namespace, graphs.c.key.in_(keys), graphs.c.summary.is_not(None)
        )
        return {row.key: row.summary for row in await db.execute(statement)} if keys else {}

    async def misses_of_key(self, db: ReadConnection, namespace: str, key: str, limit: int) -> list[Miss]:
        """Who missed a key, the last one first."""
        statement = (
            select(misses)
            .where(misses.c.namespace == namespace, misses.c.key == key)
            .order_by(misses.c.at.desc())
            .limit(limit)
        )
        return [_miss(row) for row in await db.execute(statement)]

    async def misses_of_job(self, db: ReadConnection, namespace: str, job: str, limit: int) -> list[MissRow]:
        """What a job missed, in the order of keys; at most `limit` rows."""
        statement = (
            select(misses)
            .where(misses.c.namespace == namespace, misses.c.job == job)
            .order_by(misses.c.key, misses.c.host, misses.c.rank)
            .limit(limit)
        )
        return [MissRow(row.key, _miss(row)) for row in await db.execute(statement)]

    async def askers_of_job(self, db: ReadConnection, namespace: str, job: str, limit: int) -> list[MissRow]:
        """Who of a job asked for what, hits too, the last ones first, as far as that is recorded."""
        # Not grouped and not filtered by key: SQLite would then go along the index on keys, past all jobs' events.
        statement = (
            select(events.c.key, events.c.host, events.c.rank, events.c.at)
            .where(events.c.namespace == namespace, events.c.job == job)
            .order_by(events.c.at.desc())
            .limit(limit)
        )
        found = [row for row in await db.execute(statement) if row.key is not None]
        return [MissRow(row.key, Miss(host=row.host, rank=row.rank, job=job, at=row.at)) for row in found]

    async def purge(self, db: WriteConnection, older_than: float) -> None:
        """Forget misses and summaries older than that many seconds."""
        horizon = self._clock.now() - older_than
        await db.execute(delete(misses).where(misses.c.at < horizon))
        await db.execute(
            update(graphs).where(graphs.c.described_at < horizon).values(summary=None, described_at=None)
        )


def shape_of(counts: dict[str, int]) -> str:
    """Equal for graphs with the same operations equally often."""
    return hashlib.sha256(json.dumps(counts, sort_keys=True).encode()).hexdigest()[:16]


def _described(row: Any) -> Described:
    factors = json.loads(row.factors) if row.factors is not None else {}
    known = KnownKey(
        key=row.key,
        state=row.state,
        first_seen_at=row.seen_at or row.created_at or 0.0,
        created_at=row.created_at,
        compiler_version=row.compiler_version,
        compile_seconds=row.compile_seconds,
        holder=holder_of(row) if row.host is not None else None,
        factors=factors,
    )
    return Described(known, factors, row.ir_shape, json.loads(row.counts) if row.counts else {})


def _miss(row: Any) -> Miss:
    return Miss(host=row.host, rank=None if row.rank == _NO_RANK else row.rank, job=row.job or None, at=row.at)
