"""Waiters are woken by the change itself: the net of the slow poll is taken away here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from neffcache_client.wire import FailRequest, PublishRequest
from neffcache_server.state import State
from support.cache_state import acquire, lease_id, neff, opened_state, upload

KEY = "a" * 64


async def _publish(state: State) -> None:
    data = neff("x")
    sha256 = await upload(state, 1, data)
    body = PublishRequest(sha256=sha256, size=len(data), compile_seconds=1.0)
    await state.publishing.publish("default", lease_id(1), body)


async def _fail(state: State) -> None:
    await state.leases.fail("default", lease_id(1), FailRequest(kind="deterministic", exit_code=70))


async def _fail_elsewhere(state: State) -> None:
    await state.leases.fail("default", lease_id(1), FailRequest(kind="transient", exit_code=137))


async def _release(state: State) -> None:
    await state.leases.release("default", lease_id(1))


@pytest.mark.parametrize(
    ("change", "expected"),
    [(_publish, "hit"), (_fail, "failed"), (_fail_elsewhere, "leased"), (_release, "leased")],
)
def test_change_itself_wakes_a_waiter(
    tmp_path: Path, change: Callable[[State], Awaitable[None]], expected: str
) -> None:
    """UC-18."""

    # Nor does the end of the lease come in time.
    slow = dict.fromkeys(("poll_seconds", "ttl_seconds", "provisional_seconds"), 3600.0)

    async def run() -> None:
        async with opened_state(tmp_path, **slow) as state:
            await acquire(state, KEY, 1, host="h1")
            waiter = asyncio.create_task(acquire(state, KEY, 2, host="h2", wait_seconds=25))
            async with asyncio.timeout(15):
                while not state.leases.gates.waiting:
                    await asyncio.sleep(0)
                gate = state.leases.gates._gates["default", KEY]
                # The task that waits on its behalf has begun its first look; reads queue, so ours ends after it.
                while gate._follower is None or gate._poked.is_set():
                    await asyncio.sleep(0)
                await gate.read()
                await change(state)
                assert (await waiter).state == expected

    asyncio.run(run())
