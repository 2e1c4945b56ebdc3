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

from neffcache_server.problems import ServerProblem

_log = logging.getLogger(__name__)
_TICK = 0.5


class OutageGuard:
    """Notices that this server stood still, by a tick that came late or a database that failed."""

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
