"""Gathers events in memory and writes them behind the answers, a few hundred in a transaction.

A kill loses at most the last second of figures, never an artifact or a lease. When the database cannot keep up, the
oldest events are dropped and counted: statistics may not eat the server.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from time import monotonic

from neffcache_client.wire import Report, ReportsRequest
from sqlalchemy import select

from neffcache_server.database.engine import Database, ReadConnection
from neffcache_server.kit.storable import storable, storable_amount, storable_rank
from neffcache_server.problems import InvalidRequest, ServerProblem
from neffcache_server.recording.events import MAX_AGE_SECONDS, Event, known_reason
from neffcache_server.recording.writing import add_run, forget, take_batch, write_events
from neffcache_server.settings import ServerSettings

_log = logging.getLogger(__name__)
_CHUNK = 500
"""Events a transaction: on SQLite a lease waits for its end, and this many take about 15 ms."""
_MAX_WAITING = 200_000


class Recorder:
    """One per process. `note` costs an append; `flush` writes."""

    def __init__(self, database: Database, settings: ServerSettings) -> None:
        self.dropped = 0
        """Events lost since the start because the database could not keep up."""
        self._database = database
        self._settings = settings
        self._waiting: deque[Event] = deque()
        self._flushing = asyncio.Lock()

    @property
    def waiting(self) -> int:
        """Events that are not written yet."""
        return len(self._waiting)

    def note(self, event: Event) -> None:
        """Keep an event for the next flush."""
        if not self._settings.recording:
            return
        if len(self._waiting) >= _MAX_WAITING:
            self._waiting.popleft()
            self.dropped += 1
        self._waiting.append(event)

    async def flush(self) -> None:
        """Write what was gathered until now. Raises DatabaseUnavailable and keeps the rest then."""
        async with self._flushing:
            left = len(self._waiting)
            while left > 0 and self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(_CHUNK, left, len(self._waiting)))]
                left -= len(batch)
                try:
                    async with self._database.write() as db:
                        stamp(batch, await self._now(db))
                        await write_events(db, self._database.dialect, batch)
                except InvalidRequest:
                    # Kept, they would keep all that come after them from being written, for good.
                    _log.exception("figures of %d requests cannot be stored and are given up", len(batch))
                    self.dropped += len(batch)
                except BaseException:
                    self._waiting.extendleft(reversed(batch))
                    raise

    async def take(self, namespace: str, request: ReportsRequest) -> int:
        """Count what a client reports; how many. A batch counts once. Raises DatabaseUnavailable."""
        if not self._settings.recording:
            return 0
        # A host's local hits follow its fetch, which may still wait to be written; were they first, the fetch would
        # not be the host's first request and would save nothing.
        await self.flush()
        batch = [_reported(namespace, report) for report in request.reports]
        async with self._database.write() as db:
            now = await self._now(db)
            if not await take_batch(db, self._database.dialect, namespace, request.batch, now):
                return 0
            if batch:
                stamp(batch, now)
                await write_events(db, self._database.dialect, batch)
            for run in request.runs:
                values = {
                    "at": now - min(run.age_seconds, MAX_AGE_SECONDS),
                    "ready_seconds": _amount(run.ready_seconds),
                    "fetch_seconds": _amount(run.fetch_seconds),
                }
                rank = storable_rank(run.rank)
                rank = -1 if rank is None else rank
                names = storable(run.job)[:255], storable(run.host)[:255]
                await add_run(db, self._database.dialect, namespace, *names, rank, values)
        return len(batch) + len(request.runs)

    async def _now(self, db: ReadConnection) -> float:
        return float((await db.execute(select(self._database.clock.now()))).scalar_one())

    async def flush_every(self, seconds: float) -> None:
        """Flush for ever; faults are retried at the next turn."""
        while True:
            await asyncio.sleep(seconds)
            try:
                await self.flush()
            except ServerProblem as exc:
                _log.warning("statistics could not be written yet: %s", exc.detail)

    async def forget_every(self, seconds: float) -> None:
        """Remove old figures, for ever."""
        while True:
            await asyncio.sleep(seconds)
            try:
                await forget(self._database, self._settings)
            except ServerProblem as exc:
                _log.warning("old statistics could not be removed yet: %s", exc.detail)


def stamp(batch: list[Event], now: float) -> None:
    """Put events on the database's clock."""
    here = monotonic()
    for event in batch:
        event.at = now - min(max(0.0, here - event.happened), MAX_AGE_SECONDS)


def _amount(value: float | None) -> float | None:
    return None if value is None else storable_amount(value)


def _reported(namespace: str, report: Report) -> Event:
    return Event(
        namespace,
        report.verdict,
        report.host or "unknown",
        key=report.key,
        job=report.job,
        rank=report.rank,
        reason=known_reason(report.reason),
        source="client",
        waited_seconds=report.waited_seconds,
        spent_seconds=report.compile_seconds,
        bytes=report.bytes,
        happened=monotonic() - report.age_seconds,
    )
