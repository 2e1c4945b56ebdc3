"""Who missed what, written down as it happens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from itertools import islice

from neffcache_client.wire import Holder

from neffcache_server.database.engine import Database, WriteConnection
from neffcache_server.explain.factors import Factors
from neffcache_server.explain.repository import ExplainRepository, MissKey, miss_key
from neffcache_server.problems import InvalidRequest, ServerProblem

_log = logging.getLogger(__name__)
_FLUSH_ROWS = 1000
_MAX_PENDING = 20_000


class MissLog:
    """A granted lease's miss is part of the grant. Those who wait are collected and written once a second: ten
    thousand waiters must not queue for the database, and a kill loses a second of them."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._repo = ExplainRepository(database)
        self._pending: dict[tuple[str, MissKey], None] = {}
        self._unclaimed: dict[tuple[str, str], tuple[Factors | None, str | None]] = {}

    async def granted(
        self, db: WriteConnection, namespace: str, key: str, holder: Holder, factors: Factors | None
    ) -> None:
        """A lease was granted, so the key was missed; part of the grant's transaction."""
        await self._repo.note_misses(db, namespace, [miss_key(key, holder)])
        if factors is not None:
            await self._repo.keep_factors(db, namespace, key, factors)

    def waits(self, namespace: str, key: str, holder: Holder) -> None:
        """Somebody asked and is told to wait."""
        if len(self._pending) < _MAX_PENDING:
            self._pending[(namespace, miss_key(key, holder))] = None

    def nobody_compiles(self, namespace: str, key: str, factors: Factors | None, text: str | None) -> None:
        """Somebody who may not compile asked for a key that nobody compiles: no grant will keep its factors, or
        that it was asked for."""
        at = (namespace, key)
        if len(self._unclaimed) < _FLUSH_ROWS and (factors is not None or at not in self._unclaimed):
            self._unclaimed[at] = (factors, text)

    async def flush(self) -> None:
        """Write what was collected. Raises DatabaseUnavailable; it is kept then."""
        while self._pending or self._unclaimed:
            namespace = next(iter(self._pending or self._unclaimed))[0]
            rows = list(islice((row for row in self._pending if row[0] == namespace), _FLUSH_ROWS))
            factors = {at: kept for at, kept in self._unclaimed.items() if at[0] == namespace}
            try:
                async with self._db.write() as db:
                    # In one order everywhere: two replicas that lock the same rows must not wait for each other.
                    for (_, key), (parsed, text) in sorted(factors.items(), key=lambda item: item[0]):
                        await self._repo.keep_unclaimed(db, namespace, key, parsed, text)
                    await self._repo.note_misses(db, namespace, sorted(row for _, row in rows))
            except InvalidRequest:
                # Kept, they would keep all that come after them from being written, for good.
                _log.exception("misses of namespace %s cannot be stored and are given up", namespace)
            for row in rows:
                self._pending.pop(row, None)
            for at in factors:
                self._unclaimed.pop(at, None)

    async def flush_every(self, seconds: float) -> None:
        """Flush for ever; while the database is away what was collected waits."""
        while True:
            await asyncio.sleep(seconds)
            with contextlib.suppress(ServerProblem):
                await self.flush()
