"""The meeting place of the waiters of one key."""

from __future__ import annotations

import asyncio

import pytest
from neffcache_server.kit.hub import LocalHub
from neffcache_server.leases.gate import Gates
from neffcache_server.leases.machine import Snapshot
from neffcache_server.problems import DatabaseUnavailable

TOPIC = ("default", "a" * 64)


@pytest.mark.parametrize("fault", [DatabaseUnavailable(), RuntimeError("a surprise")])
def test_a_look_that_fails_once_does_not_leave_the_waiters_alone(fault: Exception) -> None:
    """Whatever it was, the next announcement wakes them; else each would sleep until its own time is up."""

    async def scenario() -> None:
        looks = 0
        looked = asyncio.Event()

        async def read(namespace: str, key: str) -> Snapshot:
            nonlocal looks
            looks += 1
            looked.set()
            if looks == 1:
                raise fault
            return Snapshot(now=1.0)

        hub = LocalHub()
        with Gates(read, hub, 600.0).enter(*TOPIC) as gate:
            waiter = asyncio.create_task(gate.wait(gate.generation, 600.0))
            await looked.wait()
            await hub.announce(TOPIC)
            async with asyncio.timeout(10):
                await waiter

    asyncio.run(scenario())
