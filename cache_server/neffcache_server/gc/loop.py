"""Collections that the servers make by themselves, one replica at a time."""

from __future__ import annotations

import asyncio
import logging
import random

from neffcache_server.database.engine import Database
from neffcache_server.gc.collector import Collector
from neffcache_server.gc.policy import Report, policy_of
from neffcache_server.gc.repository import GcRepository
from neffcache_server.problems import ServerProblem
from neffcache_server.settings import ServerSettings
from neffcache_server.storage.base import BlobStore

_log = logging.getLogger(__name__)
# A replica that dies in the middle of a collection holds up the next one for this long.
_LONGEST_SECONDS = 3600.0
_LOOK_SECONDS = 60.0


async def collect_every(database: Database, store: BlobStore, settings: ServerSettings) -> None:
    """Collect for ever, when a collection is due and no other replica makes it. Ends at once when switched off."""
    interval = settings.gc_interval_seconds
    if not interval:
        return
    while True:
        await asyncio.sleep(min(interval, _LOOK_SECONDS) * random.uniform(0.5, 1.0))
        try:
            await collect_if_due(database, store, settings)
        except ServerProblem as exc:
            _log.warning("garbage could not be collected: %s", exc.detail)
        except Exception:
            # The cache goes on without it, and the next turn may do better.
            _log.exception("garbage could not be collected")


async def collect_if_due(database: Database, store: BlobStore, settings: ServerSettings) -> Report | None:
    """One collection, or None when none is due or another replica has it."""
    repository = GcRepository(database)
    async with database.write() as db:
        if not await repository.claim(db, _LONGEST_SECONDS):
            return None
    try:
        report = await Collector(database, store, policy_of(settings)).run()
    finally:
        async with database.write() as db:
            await repository.next_in(db, settings.gc_interval_seconds)
    if report.anything:
        _log.info("garbage collected: %s", report)
    if report.spared_orphans:
        _log.warning(
            "%d objects in the store are unknown to the database, most of what there is: is it the right database? "
            "They stay; `neffcache gc --all-orphans` deletes them",
            report.spared_orphans,
        )
    return report
