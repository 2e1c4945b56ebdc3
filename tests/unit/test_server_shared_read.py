"""Joining reads."""

from __future__ import annotations

import asyncio

import pytest
from neffcache_server.kit.shared_read import SharedRead


def test_callers_of_one_moment_share_a_read() -> None:
    async def run() -> None:
        reads = 0

        async def read() -> int:
            nonlocal reads
            reads += 1
            await asyncio.sleep(0)
            return reads

        shared = SharedRead(read)
        assert await asyncio.gather(*(shared() for _ in range(1000))) == [1] * 1000

    asyncio.run(run())


def test_caller_never_joins_a_read_that_began_before_it_came() -> None:
    async def run() -> None:
        value = "old"
        looked, finish = asyncio.Event(), asyncio.Event()

        async def read() -> str:
            seen = value
            looked.set()
            await finish.wait()
            return seen

        shared = SharedRead(read)
        early = asyncio.create_task(shared())
        await looked.wait()
        value = "new"
        late = asyncio.create_task(shared())
        finish.set()
        assert (await early, await late) == ("old", "new")

    asyncio.run(run())


def test_cancelled_caller_leaves_the_read_to_the_others() -> None:
    async def run() -> None:
        started, finish = asyncio.Event(), asyncio.Event()

        async def read() -> str:
            started.set()
            await finish.wait()
            return "value"

        shared = SharedRead(read)
        first, second = asyncio.create_task(shared()), asyncio.create_task(shared())
        await started.wait()
        first.cancel()
        finish.set()
        assert await second == "value"
        with pytest.raises(asyncio.CancelledError):
            await first

    asyncio.run(run())


def test_failed_read_fails_its_callers_and_not_the_next() -> None:
    async def run() -> None:
        answers = iter([OSError("away"), None])

        async def read() -> str:
            if error := next(answers):
                raise error
            return "value"

        shared = SharedRead(read)
        results = await asyncio.gather(shared(), shared(), return_exceptions=True)
        assert [str(r) for r in results] == ["away", "away"]
        assert await shared() == "value"

    asyncio.run(run())
