"""Statements of garbage collection. Every transaction is small: ranks want the same locks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Select, Table, and_, delete, exists, func, or_, select, text, tuple_, update

from neffcache_server.database.dialect import upsert
from neffcache_server.database.engine import Database, ReadConnection, WriteConnection
from neffcache_server.database.models import (
    blobs,
    chores,
    differences,
    entries,
    failures,
    graphs,
    leases,
    misses,
    tickets,
    uploads,
)
from neffcache_server.entries.repository import emptied

_GC = "gc"
# Literals: the planner knows then that the partial indexes will do.
_ABSENT = text("entries.state = 'absent'")
_LIVE = (
    select(leases.c.epoch)
    .where(leases.c.namespace == entries.c.namespace, leases.c.key == entries.c.key, text("leases.status = 'live'"))
    .correlate(entries)
)


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
                .values(**emptied(self._now()))
            )
            await self.doom(db, namespace, sorted({row.sha256 for row in rows}))
        return rows

    # Keys without an artifact

    def forgettable(self, namespace: str, seconds: float) -> ColumnElement[bool]:
        """Keys without an artifact that nobody asked for within `seconds`, has a lease of or is told a failure of."""
        return and_(entries.c.asked_at < self._now() - seconds, self._idle(namespace, seconds))

    def _forgettable_of(self, namespace: str, seconds: float, keys: Sequence[str]) -> ColumnElement[bool]:
        horizon = self._now() - seconds
        # Written so that no index on the time serves it: SQLite would go through all old keys for every few.
        old = func.coalesce(entries.c.asked_at, horizon) < horizon
        return and_(entries.c.key.in_(keys), old, self._idle(namespace, seconds))

    def _idle(self, namespace: str, seconds: float) -> ColumnElement[bool]:
        horizon = self._now() - seconds
        failing = or_(failures.c.until > self._now(), failures.c.last_failure_at >= horizon)
        return and_(
            entries.c.namespace == namespace,
            _ABSENT,
            ~exists(_LIVE),
            ~exists().where(_same_key(failures), failing),
            ~exists().where(_same_key(misses), misses.c.at >= horizon),
        )

    async def count(self, db: ReadConnection, where: ColumnElement[bool]) -> int:
        """How many keys fit `where`."""
        return int((await db.execute(select(func.count()).select_from(entries).where(where))).scalar_one())

    async def stamp(self, db: WriteConnection, namespace: str, limit: int) -> int:
        """Let `limit` keys of which it is not known when they were asked for count as asked for now; how many."""
        unknown = select(entries.c.key).where(entries.c.namespace == namespace, _ABSENT, entries.c.asked_at.is_(None))
        keys = list((await db.execute(self._locking(unknown.order_by(entries.c.key).limit(limit)))).scalars())
        # Looked at again: on SQLite nothing can have come between, elsewhere the rows are locked.
        chosen = and_(entries.c.namespace == namespace, entries.c.key.in_(keys))
        return (await db.execute(update(entries).where(chosen).values(asked_at=self._now()))).rowcount if keys else 0

    async def least_asked(
        self, db: ReadConnection, where: ColumnElement[bool], after: tuple[float, str], limit: int
    ) -> list[Any]:
        """Keys that fit `where` and when they were last asked for, those from longest ago first, past `after`."""
        place = tuple_(entries.c.asked_at, entries.c.key)
        statement = select(entries.c.asked_at, entries.c.key).where(where, place > tuple_(*after))
        return list((await db.execute(statement.order_by(entries.c.asked_at, entries.c.key).limit(limit))).all())

    async def forget_keys(self, db: WriteConnection, namespace: str, keys: Sequence[str], seconds: float) -> int:
        """Delete those of `keys` that may be forgotten and that nobody is changing, with all that hangs on them."""
        free = select(entries.c.key).where(self._forgettable_of(namespace, seconds, keys)).order_by(entries.c.key)
        locked = list((await db.execute(self._locking(free))).scalars())
        if not locked:
            return 0
        # Judged again, in a statement that begins after the lock: a lease that was granted between the look and the
        # lock is in sight now, and from here on whoever wants one waits for our commit and makes the row anew.
        gone = delete(entries).where(self._forgettable_of(namespace, seconds, locked)).returning(entries.c.key)
        forgotten = list((await db.execute(gone)).scalars())
        for table in (graphs, failures, differences):
            await db.execute(delete(table).where(table.c.namespace == namespace, table.c.key.in_(forgotten)))
        await self._forget_misses(db, namespace, forgotten, seconds)
        return len(forgotten)

    async def _forget_misses(self, db: WriteConnection, namespace: str, keys: Sequence[str], seconds: float) -> None:
        # A miss that was noted just now is of somebody who asks again.
        old = and_(misses.c.namespace == namespace, misses.c.key.in_(keys), misses.c.at < self._now() - seconds)
        # In the order in which they are written, see MissLog.
        rows = select(misses.c.key).where(old).order_by(misses.c.job, misses.c.key, misses.c.host, misses.c.rank)
        if self._dialect != "sqlite":
            await db.execute(rows.with_for_update())
        await db.execute(delete(misses).where(old))

    def _locking(self, statement: Select[Any]) -> Select[Any]:
        # Rows of keys that somebody is changing are passed over.
        return statement if self._dialect == "sqlite" else statement.with_for_update(of=entries, skip_locked=True)

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


def _same_key(table: Table) -> ColumnElement[bool]:
    return and_(table.c.namespace == entries.c.namespace, table.c.key == entries.c.key)


def _promised(table: Table) -> Select[Any]:
    """Digests that running leases have uploaded, or were given a ticket for."""
    # There are few of those leases and the literal lets the planner begin with them.
    return select(table.c.sha256).join(leases, (leases.c.epoch == table.c.epoch) & text("leases.status = 'live'"))
