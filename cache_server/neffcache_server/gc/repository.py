"""Statements of garbage collection. Every transaction is small: ranks want the same locks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Select, Table, and_, delete, exists, func, or_, select, text, tuple_, update

from neffcache_server.database.dialect import upsert
from neffcache_server.database.engine import Database, ReadConnection, WriteConnection
from neffcache_server.database.models import blobs, chores, entries, failures, leases, tickets, uploads
from neffcache_server.entries.repository import CLEARED

_GC = "gc"


class GcRepository:
    """Bound to a database only for its clock and dialect."""

    def __init__(self, database: Database) -> None:
        self._dialect = database.dialect
        self._now = database.clock.now

    # Entries

    @property
    def used_at(self) -> ColumnElement[float]:
        """When an entry was last of use."""
        return func.coalesce(entries.c.last_hit_at, entries.c.created_at)

    def removable(self, namespace: str, grace: float) -> ColumnElement[bool]:
        """Entries that a policy may remove at all."""
        return and_(
            entries.c.namespace == namespace,
            entries.c.state != "absent",
            entries.c.pinned.is_(False),
            self.used_at < self._now() - grace,
        )

    def older(self, column: ColumnElement[float], seconds: float) -> ColumnElement[bool]:
        return column < self._now() - seconds

    async def namespaces(self, db: ReadConnection) -> list[str]:
        """Namespaces that have entries."""
        # One probe of the index per namespace; DISTINCT would read a million entries.
        found: list[str] = []
        while True:
            after = entries.c.namespace > found[-1] if found else entries.c.namespace.is_not(None)
            name = (await db.execute(select(func.min(entries.c.namespace)).where(after))).scalar_one_or_none()
            if name is None:
                return found
            found.append(name)

    async def versions(self, db: ReadConnection, namespace: str) -> list[str | None]:
        """Compiler versions of a namespace's entries."""
        statement = (
            select(entries.c.compiler_version)
            .distinct()
            .where(entries.c.namespace == namespace, entries.c.state != "absent")
        )
        return list((await db.execute(statement)).scalars())

    async def sums(self, db: ReadConnection, where: ColumnElement[bool]) -> tuple[int, int]:
        """(number, bytes) of entries."""
        row = (await db.execute(select(func.count(), func.coalesce(func.sum(entries.c.size), 0)).where(where))).one()
        return int(row[0]), int(row[1])

    async def candidates(self, db: ReadConnection, where: ColumnElement[bool], after: str, limit: int) -> list[Any]:
        """Keys, digests and sizes of entries, in the order of keys and past `after`."""
        # A cursor: looking from the start each time would pass over all that was removed since the last vacuum.
        statement = select(entries.c.key, entries.c.sha256, entries.c.size).where(where, entries.c.key > after)
        return list((await db.execute(statement.order_by(entries.c.key).limit(limit))).all())

    async def least_used(self, db: ReadConnection, where: ColumnElement[bool], limit: int) -> list[Any]:
        """The same, those unused for longest first."""
        statement = select(entries.c.key, entries.c.sha256, entries.c.size).where(where)
        return list((await db.execute(statement.order_by(self.used_at, entries.c.key).limit(limit))).all())

    async def stored_bytes(self, db: ReadConnection, namespace: str) -> int:
        """Bytes of a namespace that are not on their way out."""
        statement = select(func.coalesce(func.sum(blobs.c.size), 0)).where(
            blobs.c.namespace == namespace, blobs.c.doomed_at.is_(None)
        )
        return int((await db.execute(statement)).scalar_one())

    async def remove_entries(
        self, db: WriteConnection, namespace: str, keys: Sequence[str], where: ColumnElement[bool]
    ) -> list[Any]:
        """Make those of `keys` absent that still fit `where` and that nobody is changing; their digests and sizes."""
        locked = (
            select(entries.c.key, entries.c.sha256, entries.c.size)
            .where(where, entries.c.key.in_(keys))
            # In the order in which everybody locks keys.
            .order_by(entries.c.key)
        )
        if self._dialect != "sqlite":
            locked = locked.with_for_update(skip_locked=True)
        rows = list((await db.execute(locked)).all())
        if rows:
            await db.execute(
                update(entries)
                .where(entries.c.namespace == namespace, entries.c.key.in_([row.key for row in rows]))
                .values(state="absent", hits=0, **CLEARED)
            )
            await self.doom(db, namespace, sorted({row.sha256 for row in rows}))
        return rows

    # Blobs

    def _unused(self) -> ColumnElement[bool]:
        """No entry refers to the blob, and no running lease may publish it."""
        served = exists().where(entries.c.namespace == blobs.c.namespace, entries.c.sha256 == blobs.c.sha256)
        return and_(~served, *(blobs.c.sha256.not_in(_promised(table)) for table in (uploads, tickets)))

    async def doom(self, db: WriteConnection, namespace: str, digests: Sequence[str]) -> int:
        """Mark blobs that nothing refers to; they stay readable for their grace."""
        result = await db.execute(
            update(blobs)
            .where(
                blobs.c.namespace == namespace,
                blobs.c.sha256.in_(digests),
                blobs.c.doomed_at.is_(None),
                self._unused(),
            )
            .values(doomed_at=self._now())
        )
        return result.rowcount

    async def unused_page(
        self, db: ReadConnection, after: tuple[str, str], limit: int, grace: float
    ) -> tuple[list[Any], tuple[str, str] | None]:
        """Of the next `limit` blobs those that nothing refers to, and where to go on."""
        page = (
            select(blobs)
            .where(tuple_(blobs.c.namespace, blobs.c.sha256) > tuple_(*after))
            .order_by(blobs.c.namespace, blobs.c.sha256)
            .limit(limit)
        )
        last = (await db.execute(select(page.subquery()).offset(limit - 1))).one_or_none()
        inside = tuple_(blobs.c.namespace, blobs.c.sha256) > tuple_(*after)
        if last is not None:
            inside &= tuple_(blobs.c.namespace, blobs.c.sha256) <= tuple_(last.namespace, last.sha256)
        old = blobs.c.stored_at < self._now() - grace
        statement = select(blobs.c.namespace, blobs.c.sha256, blobs.c.size).where(
            inside, blobs.c.doomed_at.is_(None), old, self._unused()
        )
        rows = list((await db.execute(statement)).all())
        return rows, (last.namespace, last.sha256) if last is not None else None

    async def doomed(self, db: ReadConnection) -> tuple[int, int]:
        """(number, bytes) of blobs on their way out."""
        statement = select(func.count(), func.coalesce(func.sum(blobs.c.size), 0)).where(
            blobs.c.doomed_at.is_not(None)
        )
        row = (await db.execute(statement)).one()
        return int(row[0]), int(row[1])

    async def due(self, db: ReadConnection, grace: float, limit: int) -> list[tuple[str, str]]:
        """Marked blobs whose grace has passed."""
        statement = select(blobs.c.namespace, blobs.c.sha256).where(blobs.c.doomed_at < self._now() - grace)
        rows = await db.execute(statement.order_by(blobs.c.doomed_at).limit(limit))
        return sorted((row.namespace, row.sha256) for row in rows)

    async def take(self, db: WriteConnection, objects: Sequence[tuple[str, str]], grace: float) -> list[Any]:
        """Those of `objects` that may go, locked until the end of the transaction; others that are used again stay.

        An upload of the same bytes waits for that end and then finds neither row nor object, so it stores both.
        """
        chosen = tuple_(blobs.c.namespace, blobs.c.sha256).in_(objects)
        due = (
            select(blobs.c.namespace, blobs.c.sha256, blobs.c.size)
            .where(chosen, blobs.c.doomed_at < self._now() - grace)
            .order_by(blobs.c.namespace, blobs.c.sha256)
        )
        if self._dialect != "sqlite":
            due = due.with_for_update(skip_locked=True)
        rows = list((await db.execute(due)).all())
        if not rows:
            return []
        # Looked at again, after the lock: somebody may have published it meanwhile.
        locked = tuple_(blobs.c.namespace, blobs.c.sha256).in_([(row.namespace, row.sha256) for row in rows])
        used = await db.execute(
            update(blobs)
            .where(locked, ~self._unused())
            .values(doomed_at=None)
            .returning(blobs.c.namespace, blobs.c.sha256)
        )
        reprieved = {(row.namespace, row.sha256) for row in used.all()}
        return [row for row in rows if (row.namespace, row.sha256) not in reprieved]

    async def forget(self, db: WriteConnection, rows: Sequence[Any]) -> None:
        """Delete rows of blobs whose objects are gone."""
        chosen = tuple_(blobs.c.namespace, blobs.c.sha256).in_([(row.namespace, row.sha256) for row in rows])
        await db.execute(delete(blobs).where(chosen))

    async def known(self, db: ReadConnection, objects: Sequence[tuple[str, str]]) -> set[tuple[str, str]]:
        """Those objects that a row or a running lease knows."""
        chosen = tuple_(blobs.c.namespace, blobs.c.sha256).in_(objects)
        rows = await db.execute(select(blobs.c.namespace, blobs.c.sha256).where(chosen))
        found = {(row.namespace, row.sha256) for row in rows}
        digests = [sha256 for _, sha256 in objects]
        promised: set[str] = set()
        for table in (uploads, tickets):
            promised |= set((await db.execute(_promised(table).where(table.c.sha256.in_(digests)))).scalars())
        return found | {(namespace, sha256) for namespace, sha256 in objects if sha256 in promised}

    async def purge_failures(self, db: WriteConnection, seconds: float) -> int:
        """Forget rounds of failures that ended long ago."""
        over = or_(failures.c.until.is_(None), failures.c.until < self._now())
        old = failures.c.last_failure_at < self._now() - seconds
        return (await db.execute(delete(failures).where(over, old))).rowcount

    # One replica at a time

    async def claim(self, db: WriteConnection, seconds: float) -> bool:
        """True when a collection is due and this replica is to make it; nobody else is for `seconds`."""
        row = upsert(self._dialect, chores).values(name=_GC, next_at=0.0).on_conflict_do_nothing()
        await db.execute(row)
        due = update(chores).where(chores.c.name == _GC, chores.c.next_at <= self._now())
        return (await db.execute(due.values(next_at=self._now() + seconds))).rowcount == 1

    async def next_in(self, db: WriteConnection, seconds: float) -> None:
        """The next collection is due then."""
        await db.execute(update(chores).where(chores.c.name == _GC).values(next_at=self._now() + seconds))


def _promised(table: Table) -> Select[Any]:
    """Digests that running leases have uploaded, or were given a ticket for."""
    # There are few of those leases and the literal lets the planner begin with them.
    return select(table.c.sha256).join(leases, (leases.c.epoch == table.c.epoch) & text("leases.status = 'live'"))
