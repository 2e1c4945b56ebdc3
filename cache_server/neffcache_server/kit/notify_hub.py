"""Announcements between replicas through PostgreSQL's LISTEN and NOTIFY.

One connection of its own, outside of the pool, both listens and notifies. It may break at any time: what was to be
announced is kept and sent by the next one, and whoever listens here is told to look again once that one stands,
since announcements of others were missed meanwhile. A replica killed between a commit and its announcement costs the
others no more than their slow poll.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any

from neffcache_server.kit.hub import LocalHub, Topic

_log = logging.getLogger(__name__)
_CHANNEL = "neffcache"
_PING_SECONDS = 10.0
_REPLY_SECONDS = 5.0
_RECONNECT_SECONDS = (0.1, 0.5, 1.0, 2.0)


class NotifyHub:
    """An EventHub over all replicas of one database. `run` has to be running."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        """`connect()` gives an awaitable asyncpg connection."""
        self._connect = connect
        self._local = LocalHub()
        self._outgoing: set[Topic] = set()
        self._something = asyncio.Event()

    def subscribe(self, topic: Topic, listener: Callable[[], None]) -> Callable[[], None]:
        return self._local.subscribe(topic, listener)

    async def announce(self, topic: Topic) -> None:
        """Tell the listeners of this process now, the other replicas' as soon as the connection allows."""
        await self._local.announce(topic)
        self._outgoing.add(topic)
        self._something.set()

    async def run(self) -> None:
        """Keep a connection for ever."""
        tries = 0
        while True:
            try:
                connection = await self._connect()
                try:
                    await self._listen(connection)
                    tries = 0
                    await self._send_while_up(connection)
                finally:
                    connection.terminate()
            except Exception as exc:  # whatever the driver says of a lost connection, the answer is another one
                _log.warning("announcements of other replicas do not arrive for now: %s", _words(exc))
            await asyncio.sleep(_RECONNECT_SECONDS[min(tries, 3)] * random.uniform(0.75, 1.25))
            tries += 1

    async def _listen(self, connection: Any) -> None:
        own = connection.get_server_pid()

        def heard(_connection: Any, pid: int, _channel: str, payload: str) -> None:
            namespace, _, key = payload.partition("/")
            if pid != own:
                self._local.announce_now((namespace, key))

        def lost(_connection: Any) -> None:
            # Break the sender's pause; it finds the connection closed.
            self._something.set()

        connection.add_termination_listener(lost)
        await connection.add_listener(_CHANNEL, heard)
        self._local.announce_everything()

    async def _send_while_up(self, connection: Any) -> None:
        while True:
            try:
                async with asyncio.timeout(_PING_SECONDS):
                    await self._something.wait()
            except TimeoutError:
                pass
            self._something.clear()
            topics, self._outgoing = self._outgoing, set()
            try:
                # An empty list makes this a ping: a peer that vanished without a word is noticed.
                await connection.execute(
                    f"SELECT pg_notify('{_CHANNEL}', topic) FROM unnest($1::text[]) AS topic",
                    [f"{namespace}/{key}" for namespace, key in topics],
                    timeout=_REPLY_SECONDS,
                )
            except BaseException:
                self._outgoing |= topics
                raise


def _words(exc: Exception) -> str:
    return str(exc).strip().partition("\n")[0] or type(exc).__name__
