"""Statements on published keys."""

from __future__ import annotations

import json
from typing import Any

from neffcache_client.wire import Artifact, Entry, EntryPage
from sqlalchemy import ARRAY, ColumnElement, String, delete, exists, func, literal, select, tuple_, update

from neffcache_server.database.engine import Database, ReadConnection, WriteConnection
from neffcache_server.database.models import blobs, entries, leases, tickets, uploads
from neffcache_server.leases.repository import ARTIFACT_COLUMNS, artifact_of, holder_of

_CLEARED = dict.fromkeys(
    (
        "sha256",
        "size",
        "compiler_version",
        "target",
        "created_at",
        "host",
        "boot",
        "pid",
        "rank",
        "job",
        "last_hit_at",
    )
)


def emptied(now: ColumnElement[float]) -> dict[str, Any]:
    """What an entry's columns become when its artifact goes. What is left counts as asked for `now`."""
    return {**_CLEARED, "state": "absent", "hits": 0, "asked_at": now}


_ENTRY_COLUMNS = tuple(c for c in entries.c if c.name != "factors")


class EntryRepository:
    """Entries as people see them: keys that have, or had until their blob went, an artifact."""

    def __init__(self, database: Database) -> None:
        self._clock = database.clock
        self._dialect = database.dialect

    async def present(self, db: ReadConnection, namespace: str, keys: list[str]) -> dict[str, Artifact]:
        """Artifacts of those keys that are present."""
        statement = select(*ARTIFACT_COLUMNS).where(
            entries.c.namespace == namespace, self._one_of(keys), entries.c.state == "present"
        )
        return {row.key: artifact_of(row) for row in await db.execute(statement)}

    def _one_of(self, keys: list[str]) -> ColumnElement[bool]:
        if self._dialect == "sqlite":
            return entries.c.key.in_(keys)
        # A join and not IN: one prepared statement for any number of keys, and it goes along the hash index.
        return entries.c.key == func.unnest(literal(keys, ARRAY(String))).column_valued("wanted")

    async def page(
        self, db: ReadConnection, namespace: str, limit: int, after: tuple[float, str] | None
    ) -> EntryPage:
        """`limit` entries older than `after`, newest first."""
        shown = (entries.c.namespace == namespace) & (entries.c.state != "absent")
        total = (await db.execute(select(func.count()).select_from(entries).where(shown))).scalar_one()
        statement = (
            select(*_ENTRY_COLUMNS)
            .where(shown)
            .order_by(entries.c.created_at.desc(), entries.c.key.desc())
            .limit(limit + 1)
        )
        if after is not None:
            statement = statement.where(tuple_(entries.c.created_at, entries.c.key) < tuple_(*after))
        rows = (await db.execute(statement)).all()
        last = rows[limit - 1] if len(rows) > limit else None
        return EntryPage(
            entries=[_entry(row) for row in rows[:limit]],
            total=total,
            next=f"{last.created_at!r}:{last.key}" if last is not None else None,
        )

    async def show(self, db: ReadConnection, namespace: str, key: str) -> Entry | None:
        """One entry with its factors."""
        statement = select(entries).where(
            entries.c.namespace == namespace, entries.c.key == key, entries.c.state != "absent"
        )
        row = (await db.execute(statement)).one_or_none()
        if row is None:
            return None
        entry = _entry(row)
        entry.factors = json.loads(row.factors) if row.factors is not None else None
        return entry

    async def remove(self, db: WriteConnection, namespace: str, key: str) -> str | None:
        """Take a key's artifact away; its digest, or None when there was none.

        The row stays for a long time: its figures are what estimates come from, and it is the lock of the key.
        """
        chosen = (entries.c.namespace == namespace) & (entries.c.key == key) & (entries.c.state != "absent")
        sha256: str | None = (await db.execute(select(entries.c.sha256).where(chosen))).scalar_one_or_none()
        if sha256 is not None:
            await db.execute(update(entries).where(chosen).values(pinned=False, **emptied(self._clock.now())))
        return sha256

    async def pin(self, db: WriteConnection, namespace: str, key: str, pinned: bool) -> bool:
        """Keep an entry from garbage collection, or not any more. False when there is none."""
        chosen = (entries.c.namespace == namespace) & (entries.c.key == key) & (entries.c.state != "absent")
        return (await db.execute(update(entries).where(chosen).values(pinned=pinned))).rowcount > 0

    async def quarantine(self, db: WriteConnection, namespace: str, key: str) -> bool:
        """Serve an entry to nobody any more; the next publish replaces it. False when there is none."""
        chosen = (entries.c.namespace == namespace) & (entries.c.key == key) & (entries.c.state != "absent")
        return (await db.execute(update(entries).where(chosen).values(state="quarantined"))).rowcount > 0

    async def forget_blob(self, db: WriteConnection, namespace: str, sha256: str) -> bool:
        """Remove a blob's row if no entry serves it and no running lease has uploaded it. True: the object may go."""
        served = exists().where(entries.c.namespace == namespace, entries.c.sha256 == sha256)
        pending = exists().where(
            uploads.c.sha256 == sha256, uploads.c.epoch == leases.c.epoch, leases.c.status == "live"
        )
        # Somebody who was told "it is there already" by the store counts on it too.
        announced = exists().where(
            tickets.c.sha256 == sha256, tickets.c.epoch == leases.c.epoch, leases.c.status == "live"
        )
        result = await db.execute(
            delete(blobs).where(
                blobs.c.namespace == namespace, blobs.c.sha256 == sha256, ~served, ~pending, ~announced
            )
        )
        return result.rowcount > 0

    async def blob_lost(self, db: WriteConnection, namespace: str, sha256: str) -> list[str]:
        """Mark entries whose blob has disappeared, so that their keys are compiled again; which keys."""
        return await self.withdraw(db, namespace, sha256, "missing")

    async def withdraw(self, db: WriteConnection, namespace: str, sha256: str, state: str) -> list[str]:
        """Serve a blob to nobody any more, `missing` or `quarantined`; for which keys it was served."""
        await self._lock(db, namespace, sha256)
        statement = (
            update(entries)
            .where(entries.c.namespace == namespace, entries.c.sha256 == sha256, entries.c.state == "present")
            .values(state=state)
            .returning(entries.c.key)
        )
        return [row.key for row in (await db.execute(statement)).all()]

    async def blob_back(self, db: WriteConnection, namespace: str, sha256: str) -> list[str]:
        """The blob was uploaded again: entries that missed it are served again; which keys."""
        await self._lock(db, namespace, sha256)
        statement = (
            update(entries)
            .where(entries.c.namespace == namespace, entries.c.sha256 == sha256, entries.c.state == "missing")
            .values(state="present")
            .returning(entries.c.key)
        )
        return [row.key for row in (await db.execute(statement)).all()]

    async def _lock(self, db: WriteConnection, namespace: str, sha256: str) -> None:
        # In the order of keys, as the writing of hits does: an UPDATE of several rows locks them in any order.
        if self._dialect != "sqlite":
            await db.execute(
                select(entries.c.key)
                .where(entries.c.namespace == namespace, entries.c.sha256 == sha256)
                .order_by(entries.c.key)
                .with_for_update()
            )


def _entry(row: Any) -> Entry:
    return Entry(
        key=row.key,
        state=row.state,
        sha256=row.sha256,
        size=row.size,
        created_at=row.created_at,
        compiler_version=row.compiler_version,
        target=row.target,
        compile_seconds=row.compile_seconds,
        peak_rss_bytes=row.peak_rss_bytes,
        hits=row.hits,
        last_hit_at=row.last_hit_at,
        holder=holder_of(row),
        pinned=bool(row.pinned),
    )
