"""What goes on right now, from SQL, so that every replica says the same; and the feed of its changes.

One read a second and process while somebody looks, however many look; none while nobody does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from time import monotonic
from typing import Any

from neffcache_client.wire import HEARTBEAT_SECONDS, Live, LiveLease
from sqlalchemy import func, select

from neffcache_server.database.engine import Database
from neffcache_server.database.models import entries, events, failures, leases
from neffcache_server.kit.shared_read import SharedRead
from neffcache_server.leases.gate import Gates
from neffcache_server.leases.repository import holder_of
from neffcache_server.problems import ServerProblem

_MAX_LEASES = 500
_LOOK_SECONDS = 1.0
_KEEP_ALIVE_SECONDS = 15.0


class LiveView:
    """Live leases, waiters, failures in force, the last minute."""

    def __init__(self, database: Database, gates: Gates, stopping: Callable[[], bool]) -> None:
        self._stopping = stopping
        self._db = database
        self._gates = gates
        self._shared: dict[str | None, SharedRead[Live]] = {}
        self._latest: dict[str | None, tuple[float, Live]] = {}

    async def read(self, namespace: str | None) -> Live:
        """The state now. Raises DatabaseUnavailable."""
        clock = self._db.clock
        running = (
            select(leases, entries.c.compile_seconds, clock.now().label("now"))
            .outerjoin(entries, (entries.c.namespace == leases.c.namespace) & (entries.c.key == leases.c.key))
            # Silent ones stay to be seen: nobody has taken them over yet.
            .where(leases.c.status == "live", leases.c.expires_at > clock.now() - 600.0)
            .order_by(leases.c.granted_at)
            .limit(_MAX_LEASES)
        )
        failed = select(func.count()).select_from(failures).where(failures.c.until > clock.now())
        minute = (
            select(events.c.verdict, func.count().label("number"))
            .where(events.c.at > clock.now() - 60.0)
            .group_by(events.c.verdict)
        )
        if namespace is not None:
            running = running.where(leases.c.namespace == namespace)
            failed = failed.where(failures.c.namespace == namespace)
            minute = minute.where(events.c.namespace == namespace)
        async with self._db.read() as db:
            now = float((await db.execute(select(clock.now()))).scalar_one())
            return Live(
                now=now,
                leases=[self._lease(row, now) for row in await db.execute(running)],
                waiters=self._gates.waiting,
                failures=(await db.execute(failed)).scalar_one(),
                last_minute={row.verdict: row.number for row in await db.execute(minute)},
            )

    def _lease(self, r: Any, now: float) -> LiveLease:
        heard = r.heartbeat_at or r.granted_at
        silent = max(0.0, now - heard)
        return LiveLease(
            namespace=r.namespace,
            key=r.key,
            holder=holder_of(r),
            age_seconds=max(0.0, now - r.granted_at),
            heartbeat_age_seconds=silent,
            usual_seconds=r.compile_seconds,
            phase=r.phase,
            rss_bytes=r.rss_bytes,
            waiters=self._gates.waiting_for(r.namespace, r.key),
            stuck=silent > 2 * HEARTBEAT_SECONDS,
        )

    async def _fresh(self, namespace: str | None) -> Live:
        latest = self._latest.get(namespace)
        if latest is None or monotonic() - latest[0] > _LOOK_SECONDS / 2:
            latest = self._latest[namespace] = monotonic(), await self.read(namespace)
        return latest[1]

    async def feed(self, namespace: str | None) -> AsyncIterator[str]:
        """Server-sent events: `live` when something changed, a comment now and then. Ends when the server stops."""
        before, told = "", monotonic()
        shared = self._shared.setdefault(namespace, SharedRead(lambda: self._fresh(namespace)))
        yield "retry: 2000\n\n"
        while not self._stopping():
            try:
                live = await shared()
            except ServerProblem:
                yield "event: trouble\ndata: {}\n\n"
                await asyncio.sleep(_LOOK_SECONDS)
                continue
            if (shape := _shape(live)) != before:
                before, told = shape, monotonic()
                yield f"event: live\ndata: {json.dumps(asdict(live), separators=(',', ':'))}\n\n"
            elif monotonic() - told > _KEEP_ALIVE_SECONDS:
                told = monotonic()
                yield ": still here\n\n"
            await asyncio.sleep(_LOOK_SECONDS)


def _shape(live: Live) -> str:
    """Equal for two states between which nobody would want to look again."""
    running = sorted((e.namespace, e.key, e.holder.pid, e.stuck, e.phase or "", e.waiters) for e in live.leases)
    return repr((running, live.failures, live.waiters, sorted(live.last_minute.items())))
