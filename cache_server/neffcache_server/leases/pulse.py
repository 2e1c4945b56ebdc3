"""Outages of the whole service, where several replicas share one database.

One replica that stood still says nothing: the others took heartbeats meanwhile, and their takeovers were right. So
the replicas keep one common pulse in the database. Time in which nobody beat it (all replicas down, the database
away) is time in which no holder could renew its lease; whoever beats first after it lets the leases go on that ran
out meanwhile, in the same transaction.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from sqlalchemy import select, update

from neffcache_server.database.dialect import upsert
from neffcache_server.database.engine import Database, ReadConnection, WriteConnection
from neffcache_server.database.models import pulse
from neffcache_server.problems import ServerProblem

_log = logging.getLogger(__name__)
_BEAT_SECONDS = 1.0
# How long the service may have been away and still find its holders at work: compiles of 100 minutes exist.
_LONGEST_OUTAGE = 7200.0


class SharedOutageGuard:
    """The outage guard of one replica among several."""

    def __init__(
        self, database: Database, threshold: float, extend: Callable[[WriteConnection, float], Awaitable[None]]
    ) -> None:
        """`extend(db, seconds)` renews leases that ran out within the last `seconds`."""
        self._db = database
        self._threshold = threshold
        self._extend = extend

    def fault(self) -> None:
        """Nothing to note: an outage of the database shows in the pulse."""

    async def start(self) -> None:
        """Find out how long no replica was there. Raises DatabaseUnavailable."""
        await self._beat()

    async def settle(self) -> None:
        """Nothing to do before a grant; `interrupted` looks during it."""

    async def interrupted(self, db: WriteConnection) -> bool:
        """True when leases that ran out must not be taken over yet: `resume` has to run first.

        To be asked after the lease was marked, in the same transaction: a beat that extends that lease then waits
        for us and has not been committed, or was committed before and kept us from marking it.
        """
        return await self._silence(db) > self._threshold

    async def resume(self) -> None:
        """Extend leases after an outage. Raises DatabaseUnavailable while it lasts."""
        await self._beat()

    async def watch(self) -> None:
        """Beat for ever."""
        while True:
            await asyncio.sleep(_BEAT_SECONDS)
            try:
                await self._beat()
            except ServerProblem:
                continue

    async def _beat(self) -> None:
        now = self._db.clock.now()
        async with self._db.write() as db:
            await db.execute(upsert(self._db.dialect, pulse).values(id=1, beaten_at=now).on_conflict_do_nothing())
            # Locked: of two replicas that come back together only the first finds a silence.
            await db.execute(select(pulse.c.id).with_for_update())
            silence = await self._silence(db)
            if silence > self._threshold:
                _log.warning("no heartbeat could be taken for %.1f s: leases that ran out meanwhile go on", silence)
                await self._extend(db, min(silence, _LONGEST_OUTAGE) + _BEAT_SECONDS)
            await db.execute(update(pulse).values(beaten_at=now))

    async def _silence(self, db: ReadConnection) -> float:
        return float((await db.execute(select(self._db.clock.now() - pulse.c.beaten_at))).scalar_one_or_none() or 0.0)
