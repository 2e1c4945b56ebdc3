"""One collection, from the entries to the bytes.

1. Entries that the policy names become absent, a few at a time; blobs that nothing refers to then are marked.
   Keys that have been absent, and not asked for, for long are forgotten.
2. Blobs that lost their last reference some other way (superseded uploads, `neffcache doctor`) are marked too.
3. Marked blobs whose grace has passed: object deleted, then the row, while the row is locked. Killed in between, the
   next collection deletes an object that is gone already, which is no error.
4. Objects that no row knows, and staging files of uploads that ended nowhere.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

from anyio import to_thread
from sqlalchemy import ColumnElement

from neffcache_server.database.engine import Database
from neffcache_server.database.models import entries
from neffcache_server.gc.policy import Policy, Report
from neffcache_server.gc.repository import GcRepository
from neffcache_server.kit.tasks import retrieve
from neffcache_server.problems import StorageUnavailable
from neffcache_server.storage.base import BlobStore, StoredObject

# On SQLite every rank's lease waits while one of these is written: tens of milliseconds.
_ENTRIES_AT_ONCE = 200
_BLOBS_AT_ONCE = 100
_DELETE_SECONDS = 5.0
_PAGE = 2000
_FETCH = 5000
_LISTED_AT_ONCE = 500
# More orphans than this, and more than there are known objects: look for another explanation.
_BELIEVABLE_ORPHANS = 100
_ABANDONED_SECONDS = 86400.0
_FAILURES_SECONDS = 7 * 86400.0


class Collector:
    """Use once: `run`."""

    def __init__(
        self,
        database: Database,
        store: BlobStore,
        policy: Policy,
        *,
        dry_run: bool = False,
        namespace: str | None = None,
        all_orphans: bool = False,
    ) -> None:
        """`namespace`: leave the entries of the others alone. `all_orphans`: delete them however many there are."""
        self._db = database
        self._store = store
        self._policy = policy
        self._namespace = namespace
        self._all_orphans = all_orphans
        self._repo = GcRepository(database)
        self.report = Report(dry_run=dry_run)

    async def run(self) -> Report:
        """Collect. Raises DatabaseUnavailable or StorageUnavailable; what was done until then is in `report`."""
        async with self._db.read() as db:
            namespaces = await self._repo.namespaces(db)
        for namespace in namespaces:
            if self._namespace in (None, namespace):
                await self._by_rules(namespace)
                await self._by_size(namespace)
                await self._by_history(namespace)
        if not self.report.dry_run:
            await self._mark_unused()
            await self._sweep()
            async with self._db.write() as db:
                await self._repo.purge_failures(db, _FAILURES_SECONDS)
        await self._orphans()
        await self._abandoned()
        async with self._db.read() as db:
            self.report.waiting.add(*reversed(await self._repo.doomed(db)))
        return self.report

    # Entries

    async def _rules(self, namespace: str) -> list[tuple[str, ColumnElement[bool]]]:
        policy = self._policy
        rules: list[tuple[str, ColumnElement[bool]]] = []
        if policy.compilers:
            async with self._db.read() as db:
                versions = [v for v in await self._repo.versions(db, namespace) if policy.names(v)]
            rules.append(("compiler", entries.c.compiler_version.in_(versions)))
        if policy.age_seconds:
            rules.append(("age", self._repo.older(entries.c.created_at, policy.age_seconds)))
        if policy.unused_seconds:
            rules.append(("unused", self._repo.older(self._repo.used_at, policy.unused_seconds)))
        return rules

    async def _by_rules(self, namespace: str) -> None:
        removable = self._repo.removable(namespace, self._policy.grace_seconds)
        for reason, rule in await self._rules(namespace):
            where = removable & rule
            if self.report.dry_run:
                async with self._db.read() as db:
                    number, size = await self._repo.sums(db, where)
                if number:
                    self.report.removed(reason, size, number)
                # What one rule removes is not there for the next.
                removable &= ~rule
                continue
            after = ""
            while True:
                async with self._db.read() as db:
                    rows = await self._repo.candidates(db, where, after, _FETCH)
                if not rows:
                    break
                after = rows[-1].key
                for start in range(0, len(rows), _ENTRIES_AT_ONCE):
                    keys = [row.key for row in rows[start : start + _ENTRIES_AT_ONCE]]
                    await self._remove(namespace, keys, where, reason)

    async def _by_size(self, namespace: str) -> None:
        if not self._policy.max_bytes:
            return
        async with self._db.read() as db:
            excess = await self._repo.stored_bytes(db, namespace) - self._policy.max_bytes
        if self.report.dry_run:
            excess -= sum(r.bytes for reason, r in self.report.entries.items() if reason != "size")
        where = self._repo.removable(namespace, self._policy.grace_seconds)
        while excess > 0:
            async with self._db.read() as db:
                rows = await self._repo.least_used(db, where, _FETCH)
            before = excess
            for start in range(0, len(rows), _ENTRIES_AT_ONCE):
                chosen, excess = _enough(rows[start : start + _ENTRIES_AT_ONCE], excess)
                if self.report.dry_run:
                    self.report.removed("size", sum(row.size for row in chosen), len(chosen))
                else:
                    await self._remove(namespace, [row.key for row in chosen], where, "size")
                if excess <= 0:
                    return
            if self.report.dry_run or before == excess:
                return

    async def _by_history(self, namespace: str) -> None:
        seconds = self._policy.history_seconds
        if not seconds:
            return
        where = self._repo.forgettable(namespace, seconds)
        if self.report.dry_run:
            async with self._db.read() as db:
                self.report.keys += await self._repo.count(db, where)
            return
        await self._stamp(namespace)
        place = (0.0, "")
        while True:
            async with self._db.read() as db:
                rows = await self._repo.least_asked(db, where, place, _FETCH)
            if not rows:
                return
            place = (rows[-1].asked_at, rows[-1].key)
            keys = [row.key for row in rows]
            for start in range(0, len(keys), _ENTRIES_AT_ONCE):
                async with self._db.write() as db:
                    batch = keys[start : start + _ENTRIES_AT_ONCE]
                    self.report.keys += await self._repo.forget_keys(db, namespace, batch, seconds)
                await asyncio.sleep(0)

    async def _stamp(self, namespace: str) -> None:
        while True:
            async with self._db.write() as db:
                if not await self._repo.stamp(db, namespace, _ENTRIES_AT_ONCE):
                    return
            await asyncio.sleep(0)

    async def _remove(self, namespace: str, keys: list[str], where: ColumnElement[bool], reason: str) -> None:
        async with self._db.write() as db:
            rows = await self._repo.remove_entries(db, namespace, keys, where)
        for row in rows:
            self.report.removed(reason, row.size)
        # Let whoever waits for the lock have it.
        await asyncio.sleep(0)

    # Blobs

    async def _mark_unused(self) -> None:
        after: tuple[str, str] | None = ("", "")
        while after is not None:
            async with self._db.read() as db:
                rows, after = await self._repo.unused_page(db, after, _PAGE, self._policy.grace_seconds)
            for namespace in {row.namespace for row in rows}:
                async with self._db.write() as db:
                    await self._repo.doom(db, namespace, [r.sha256 for r in rows if r.namespace == namespace])

    async def _sweep(self) -> None:
        grace = self._policy.grace_seconds
        while True:
            async with self._db.read() as db:
                due = await self._repo.due(db, grace, _FETCH)
            deleted = 0
            for start in range(0, len(due), _BLOBS_AT_ONCE):
                async with self._db.write() as db:
                    rows = await self._repo.take(db, due[start : start + _BLOBS_AT_ONCE], grace)
                    await self._delete((row.namespace, row.sha256) for row in rows)
                    if rows:
                        await self._repo.forget(db, rows)
                for row in rows:
                    self.report.blobs.add(row.size)
                deleted += len(rows)
            # Those that another collection has locked are its own.
            if not deleted:
                return

    async def _delete(self, objects: Iterable[tuple[str, str]]) -> None:
        """Delete objects. Raises StorageUnavailable, soon: rows are locked meanwhile, on SQLite all of them."""
        tasks = [asyncio.ensure_future(self._store.delete(namespace, sha256)) for namespace, sha256 in objects]
        if not tasks:
            return
        # Not cancelled when they take too long: that would wait for the threads they run in. What they still delete
        # belongs to rows that stay marked.
        done, late = await asyncio.wait(tasks, timeout=_DELETE_SECONDS)
        for task in late:
            task.add_done_callback(retrieve)
        if faults := [task.exception() for task in done if task.exception() is not None]:
            raise faults[0]  # type: ignore[misc]  # mypy does not see the condition
        if late:
            raise StorageUnavailable("the store is slow to delete; garbage is collected another time")

    # What the database does not know

    async def _orphans(self) -> None:
        found: list[StoredObject] = []
        listed = 0
        async for page in _pages(self._store.listing()):
            listed += len(page)
            found += await self._unknown(page)
        if len(found) > _BELIEVABLE_ORPHANS and 2 * len(found) > listed and not self._all_orphans:
            # An empty or an old database in front of a full bucket. Deleting would make the mistake final.
            self.report.spared_orphans = len(found)
            return
        for start in range(0, len(found), _BLOBS_AT_ONCE):
            batch = found[start : start + _BLOBS_AT_ONCE]
            if not self.report.dry_run:
                batch = await self._unknown(batch)
                await self._delete((o.namespace, o.sha256) for o in batch)
            for orphan in batch:
                self.report.orphans.add(orphan.size)

    async def _unknown(self, objects: list[StoredObject]) -> list[StoredObject]:
        horizon = time.time() - self._policy.grace_seconds
        old = [o for o in objects if o.modified_at < horizon]
        if not old:
            return []
        async with self._db.read() as db:
            known = await self._repo.known(db, [(o.namespace, o.sha256) for o in old])
        return [o for o in old if (o.namespace, o.sha256) not in known]

    async def _abandoned(self) -> None:
        sizes = await to_thread.run_sync(_sweep_staging, self._store, self.report.dry_run)
        for size in sizes:
            self.report.abandoned.add(size)


def _enough(rows: list[Any], excess: int) -> tuple[list[Any], int]:
    """The first of `rows` that together take away `excess`, and what is left of it."""
    chosen = []
    for row in rows:
        if excess <= 0:
            break
        chosen.append(row)
        excess -= row.size
    return chosen, excess


async def _pages(objects: AsyncIterator[StoredObject]) -> AsyncIterator[list[StoredObject]]:
    page: list[StoredObject] = []
    async for one in objects:
        page.append(one)
        if len(page) >= _LISTED_AT_ONCE:
            yield page
            page = []
    if page:
        yield page


def _sweep_staging(store: BlobStore, dry_run: bool) -> list[int]:
    horizon = time.time() - _ABANDONED_SECONDS
    sizes = []
    for file in store.staging.iterdir():
        try:
            seen = file.stat()
            if seen.st_mtime < horizon:
                if not dry_run:
                    file.unlink()
                sizes.append(seen.st_size)
        except FileNotFoundError:
            continue
    return sizes
