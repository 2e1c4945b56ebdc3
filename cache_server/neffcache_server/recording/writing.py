"""Statements that write events and keep their sums."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Table, and_, case, delete, func, insert, select, update

from neffcache_server.database.dialect import larger, upsert
from neffcache_server.database.engine import Database, WriteConnection
from neffcache_server.database.models import (
    COUNT_COLUMNS,
    events,
    host_keys,
    job_ranks,
    jobs,
    report_batches,
    rollups,
)
from neffcache_server.kit.storable import storable, storable_amount, storable_rank
from neffcache_server.recording.events import Event, RankSums, by_job, by_period, by_rank
from neffcache_server.settings import ServerSettings
from neffcache_server.stats.counters import Counts, add_counts

_DAY = 86400.0
_HITS = ("remote", "waited")
_AMOUNTS = ("waited_seconds", "spent_seconds", "saved_seconds", "bytes")
_ROLLUP_KEY = ("period", "starts_at", "namespace", "verdict", "reason")


async def write_events(db: WriteConnection, dialect: str, batch: Sequence[Event]) -> None:
    """Write events whose `at` is known, and add them to every sum, in one transaction."""
    for event in batch:
        event.host = storable(event.host)[:255]
        event.job = storable(event.job)[:255] if event.job else None
        event.rank = storable_rank(event.rank)
        for name in _AMOUNTS:
            setattr(event, name, storable_amount(getattr(event, name)))
    await _keep_first_hits(db, dialect, batch)
    await db.execute(insert(events), [_row(e) for e in batch])
    await _add_rollups(db, dialect, batch)
    await _add_jobs(db, dialect, batch)
    saved: dict[str, float] = {}
    for event in batch:
        saved[event.namespace] = saved.get(event.namespace, 0.0) + event.saved_seconds
    for namespace, seconds in sorted(saved.items()):
        await add_counts(db, dialect, namespace, Counts(compile_seconds_saved=seconds))


async def _keep_first_hits(db: WriteConnection, dialect: str, batch: Sequence[Event]) -> None:
    """Take the saving off every event that is not its host's first with that key."""
    firsts: dict[tuple[str, str, str], Event] = {}
    for event in batch:
        if event.key is not None and event.verdict != "failed":
            firsts.setdefault((event.namespace, event.key, event.host), event)
    new: set[tuple[str, str, str]] = set()
    if firsts:
        statement = upsert(dialect, host_keys).on_conflict_do_nothing()
        statement = statement.returning(host_keys.c.namespace, host_keys.c.key, host_keys.c.host)
        # Sorted: two replicas that insert the same rows in different orders would lock each other out.
        rows = [
            {"namespace": n, "key": k, "host": h, "first_at": e.at}
            for (n, k, h), e in sorted(firsts.items(), key=_key)
        ]
        new = {(row.namespace, row.key, row.host) for row in await db.execute(statement, rows)}
    for event in batch:
        place = (event.namespace, event.key or "", event.host)
        if event.verdict not in _HITS or place not in new or firsts[place] is not event:
            event.saved_seconds = 0.0


async def _add_rollups(db: WriteConnection, dialect: str, batch: Sequence[Event]) -> None:
    rows = [
        {
            **dict(zip(_ROLLUP_KEY, key, strict=True)),
            "number": sums.number,
            **{name: getattr(sums, name) for name in _AMOUNTS},
        }
        for key, sums in sorted(by_period(batch).items(), key=_key)
    ]
    await db.execute(_growing(dialect, rollups, _ROLLUP_KEY, ("number", *_AMOUNTS)), rows)


async def _add_jobs(db: WriteConnection, dialect: str, batch: Sequence[Event]) -> None:
    grow = (*COUNT_COLUMNS.values(), *_AMOUNTS)
    ranks = sorted(by_rank(batch).items(), key=_key)
    if not ranks:
        return
    of_job = sorted(by_job(batch).items(), key=_key)
    rows = [{"namespace": n, "job": j, **s.row()} for (n, j), s in of_job]
    await db.execute(_growing(dialect, jobs, ("namespace", "job"), grow), rows)
    rows = [{"namespace": n, "job": j, "host": h, "rank": r, **s.row()} for (n, j, h, r), s in ranks]
    await db.execute(_growing(dialect, job_ranks, ("namespace", "job", "host", "rank"), grow), rows)
    await count_ranks(db, [key for key, _ in of_job])


async def count_ranks(db: WriteConnection, touched: Iterable[tuple[str, str]]) -> None:
    """Bring the numbers of ranks and hosts of these jobs up to date."""
    for namespace, job in touched:
        this = and_(job_ranks.c.namespace == namespace, job_ranks.c.job == job)
        await db.execute(
            update(jobs)
            .where(jobs.c.namespace == namespace, jobs.c.job == job)
            .values(
                ranks=larger(jobs.c.ranks, select(func.count()).where(this).scalar_subquery()),
                hosts=larger(
                    jobs.c.hosts, select(func.count(job_ranks.c.host.distinct())).where(this).scalar_subquery()
                ),
            )
        )


def _growing(dialect: str, table: Table, key: Sequence[str], grow: Sequence[str]) -> Any:
    """An INSERT that adds to the row that is there."""
    statement = upsert(dialect, table)
    values = {name: table.c[name] + statement.excluded[name] for name in grow}
    if "first_at" in table.c:
        values["first_at"] = case(
            (statement.excluded.first_at < table.c.first_at, statement.excluded.first_at), else_=table.c.first_at
        )
        values["last_at"] = larger(table.c.last_at, statement.excluded.last_at)
    return statement.on_conflict_do_update(index_elements=list(key), set_=values)


def _row(event: Event) -> dict[str, Any]:
    names = ("at", "namespace", "key", "job", "host", "rank", "verdict", "reason", "source", *_AMOUNTS)
    return {name: getattr(event, name) for name in names}


def _key(item: tuple[Any, Any]) -> Any:
    return item[0]


async def take_batch(db: WriteConnection, dialect: str, namespace: str, batch: str, now: float) -> bool:
    """Note that a batch of reports was taken; False when it was taken before."""
    statement = (
        upsert(dialect, report_batches)
        .values(namespace=namespace, batch=batch, taken_at=now)
        .on_conflict_do_nothing()
        .returning(report_batches.c.batch)
    )
    return (await db.execute(statement)).one_or_none() is not None


async def add_run(
    db: WriteConnection, dialect: str, namespace: str, job: str, host: str, rank: int, values: dict[str, Any]
) -> None:
    """Keep what a rank said at its end: it may be the first that is heard of it."""
    at = values["at"]
    own = {"ready_seconds": values["ready_seconds"], "fetch_seconds": values["fetch_seconds"]}
    statement = upsert(dialect, job_ranks).values(
        namespace=namespace, job=job, host=host, rank=rank, first_at=at, last_at=at, **own
    )
    await db.execute(statement.on_conflict_do_update(index_elements=["namespace", "job", "host", "rank"], set_=own))
    statement = upsert(dialect, jobs).values(namespace=namespace, job=job, first_at=at, last_at=at)
    await db.execute(statement.on_conflict_do_nothing())
    await count_ranks(db, [(namespace, job)])


async def forget(database: Database, settings: ServerSettings) -> None:
    """Remove what is older than the settings say, in transactions of their own. Raises DatabaseUnavailable."""
    now = database.clock.now()
    old = [
        delete(events).where(events.c.at < now - settings.keep_events_days * _DAY),
        delete(events).where(
            events.c.id <= select(func.max(events.c.id) - settings.keep_events_rows).scalar_subquery()
        ),
        delete(rollups).where(
            rollups.c.period == "hour", rollups.c.starts_at < now - settings.keep_hours_days * _DAY
        ),
        delete(job_ranks).where(job_ranks.c.last_at < now - settings.keep_ranks_days * _DAY),
        delete(host_keys).where(host_keys.c.first_at < now - settings.keep_ranks_days * _DAY),
        delete(jobs).where(jobs.c.last_at < now - settings.keep_jobs_days * _DAY),
        delete(report_batches).where(report_batches.c.taken_at < now - settings.keep_ranks_days * _DAY),
    ]
    for statement in old:
        async with database.write() as db:
            await db.execute(statement)


__all__ = ["RankSums", "add_run", "count_ranks", "forget", "take_batch", "write_events"]
