"""Outages of our own: time in which no holder could renew its lease.

The machine was suspended, the process stopped, the event loop stuck, the database away: whatever it was, heartbeats
did not count, so leases that ran out meanwhile say nothing about their holders. They go on for one TTL before
anybody may take them over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Protocol

from neffcache_server.database.engine import WriteConnection
from neffcache_server.problems import ServerProblem

_log = logging.getLogger(__name__)
_TICK = 0.5


# How long a server may have been down and still find its holders at work: compiles of 100 minutes exist.
_LONGEST_OUTAGE = 7200.0


class Guard(Protocol):
    """Keeps leases from being taken over that ran out because nobody could renew them."""

    def fault(self) -> None:
        """The database failed."""

    async def start(self) -> None:
        """Leases that ran out while no server was there go on. Raises DatabaseUnavailable."""

    async def settle(self) -> None:
        """Extend leases if an outage is known. Raises DatabaseUnavailable while it lasts."""

    async def interrupted(self, db: WriteConnection) -> bool:
        """True when a lease just marked in that transaction ran out because of an outage: roll back, `resume`."""

    async def resume(self) -> None:
        """Extend leases after an outage that `interrupted` found. Raises DatabaseUnavailable."""

    async def watch(self) -> None:
        """Look out for outages for ever."""


class OutageGuard:
    """The guard of the only server: notices that it stood still, by a late tick or a database that failed."""

    def __init__(self, threshold: float, extend: Callable[[float], Awaitable[None]]) -> None:
        """`extend(seconds)` renews leases that ran out within the last `seconds`."""
        self._threshold = threshold
        self._extend = extend
        self._last_tick = monotonic()
        self._fault_since: float | None = None
        self._lock = asyncio.Lock()

    @property
    def suspected(self) -> bool:
        """True when expired leases must not be taken over before `settle` has run."""
        return self._fault_since is not None or monotonic() - self._last_tick > self._threshold

    def fault(self) -> None:
        """The database failed."""
        if self._fault_since is None:
            self._fault_since = monotonic()

    async def start(self) -> None:
        await self._extend(_LONGEST_OUTAGE)

    async def interrupted(self, db: WriteConnection) -> bool:
        # Were we stopped between the look at the clock and now, the lease ran out because of us.
        return self.suspected

    async def resume(self) -> None:
        await self.settle()

    async def settle(self) -> None:
        """Extend leases if there was an outage. Raises DatabaseUnavailable while it lasts."""
        async with self._lock:
            if not self.suspected:
                return
            began = min(self._last_tick, self._fault_since or self._last_tick)
            length = monotonic() - began
            _log.warning("no heartbeat could be taken for %.1f s: leases that ran out meanwhile go on", length)
            await self._extend(length + _TICK)
            self._fault_since = None
            self._last_tick = monotonic()

    async def watch(self) -> None:
        """Tick for ever."""
        while True:
            await asyncio.sleep(_TICK)
            if self.suspected:
                try:
                    await self.settle()
                except ServerProblem:
                    # Still away. The next tick tries again, and so does whoever wants an expired lease.
                    continue
            self._last_tick = monotonic()
