"""One read for everybody who asks at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from neffcache_server.kit.tasks import retrieve

T = TypeVar("T")


class SharedRead(Generic[T]):
    """Joins callers into one read that *begins* after each of them called.

    Joining a read already under way would be cheaper and wrong: it may have looked before the change that the caller
    came to see. So there are at most two per source, one running and one that newcomers join.
    """

    def __init__(self, read: Callable[[], Awaitable[T]]) -> None:
        self._read = read
        self._one_at_a_time = asyncio.Lock()
        self._next: asyncio.Task[T] | None = None

    async def __call__(self) -> T:
        """The value, read after this call began. Raises what the read raises."""
        if self._next is None:
            self._next = asyncio.create_task(self._run())
            self._next.add_done_callback(retrieve)
        # A caller that is cancelled must not take the read away from the others.
        return await asyncio.shield(self._next)

    @property
    def idle(self) -> bool:
        """True when nobody reads or is about to."""
        return self._next is None and not self._one_at_a_time.locked()

    async def _run(self) -> T:
        async with self._one_at_a_time:
            self._next = None
            return await self._read()
