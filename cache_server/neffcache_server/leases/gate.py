"""Where requests for one key meet: shared reads, one attempt at a time, one wake for all.

Ten thousand waiters on a key cost one reading task and ten thousand parked coroutines. Waiting holds no database
connection: the task reads when something is announced, when the holder's time runs out, and every few seconds as a
net; it wakes the waiters only when there is something for them to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from neffcache_server.kit.hub import EventHub, Topic
from neffcache_server.kit.shared_read import SharedRead
from neffcache_server.leases.machine import Snapshot
from neffcache_server.problems import ServerProblem

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Gate:
    """One key, as long as somebody asks for it."""

    def __init__(self, read: Callable[[], Awaitable[Snapshot]], hub: EventHub, topic: Topic, poll: float) -> None:
        self.read = SharedRead(read)
        self.generation = 0
        """Grows with every wake; a waiter that has seen it can tell whether it missed one."""
        self.latest: Snapshot | None = None
        """What the last wake was about, None when that has to be read."""
        self.users = 0
        self._hub = hub
        self._topic = topic
        self._poll = poll
        self._poked = asyncio.Event()
        self._wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._attempt: asyncio.Future[None] | None = None
        self._follower: asyncio.Task[None] | None = None
        self._unsubscribe: Callable[[], None] | None = None

    async def attempt(self, run: Callable[[], Awaitable[T]]) -> T | None:
        """Run `run`, or, when another attempt is under way, wait for its end and return None.

        When a holder is lost, every waiter wants its lease. One transaction decides; the others look again.
        """
        if self._attempt is not None:
            await asyncio.shield(self._attempt)
            return None
        self._attempt = asyncio.get_running_loop().create_future()
        try:
            return await run()
        finally:
            self._attempt.set_result(None)
            self._attempt = None

    async def wait(self, seen: int, seconds: float) -> None:
        """Until the generation is past `seen`, at most `seconds`."""
        if self._follower is None:
            self._unsubscribe = self._hub.subscribe(self._topic, self._poked.set)
            # A change between the caller's look and the subscription was announced to nobody: look at once.
            self._poked.set()
            self._follower = asyncio.create_task(self._follow())
        if self.generation != seen:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.shield(self._wake)

    def wake(self, state: Snapshot | None = None) -> None:
        """Let every waiter look again, at `state` when it is given."""
        self.latest = state
        self.generation += 1
        self._wake.set_result(None)
        self._wake = asyncio.get_running_loop().create_future()

    def close(self) -> None:
        if self._unsubscribe is not None:
            self._unsubscribe()
        if self._follower is not None:
            self._follower.cancel()

    async def _follow(self) -> None:
        pause = self._poll
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._poked.wait()
            self._poked.clear()
            pause = self._poll
            try:
                state = await self.read()
            except ServerProblem:
                # The waiters are not told: their clients would only ask again at once. The net tries on.
                _log.warning("cannot look at a key that is waited for; trying again in %g s", pause)
                continue
            except Exception:
                # Without this task nobody would wake the waiters any more.
                _log.exception("cannot look at a key that is waited for; trying again in %g s", pause)
                continue
            if state.settled and state.live is not None:
                # A little late rather than early: an early look sees the lease still alive and goes round again.
                pause = min(self._poll, state.live.expires_at - state.now + 0.01)
            else:
                self.wake(state)


class Gates:
    """The gates of all keys that are being asked for."""

    def __init__(self, read: Callable[[str, str], Awaitable[Snapshot]], hub: EventHub, poll_seconds: float) -> None:
        self._read = read
        self._hub = hub
        self._poll = poll_seconds
        self._gates: dict[Topic, Gate] = {}

    @contextmanager
    def enter(self, namespace: str, key: str) -> Iterator[Gate]:
        """The gate of a key for the length of a request."""
        topic = (namespace, key)
        gate = self._gates.get(topic)
        if gate is None:
            gate = self._gates[topic] = Gate(lambda: self._read(namespace, key), self._hub, topic, self._poll)
        gate.users += 1
        try:
            yield gate
        finally:
            gate.users -= 1
            if gate.users == 0:
                gate.close()
                del self._gates[topic]

    def waiting_for(self, namespace: str, key: str) -> int:
        """Requests for this key at this process that have no answer yet."""
        gate = self._gates.get((namespace, key))
        return gate.users if gate is not None else 0

    @property
    def waiting(self) -> int:
        """How many requests are inside."""
        return sum(gate.users for gate in self._gates.values())

    def wake_all(self) -> None:
        """Every waiter of every key looks again (shutdown, a reconnected listener)."""
        for gate in self._gates.values():
            gate.wake()
