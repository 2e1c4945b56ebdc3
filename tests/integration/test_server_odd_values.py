"""Numbers that no database takes, from a client that is broken: they must not cost the others anything."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
from neffcache_client.wire import AcquireRequest, HeartbeatRequest, Holder, PublishRequest, Report, ReportsRequest
from neffcache_server.problems import InvalidRequest
from support.cache_state import acquire, lease_id, neff, opened_state, present, upload

pytestmark = pytest.mark.usefixtures("backend")

KEY = "a" * 64
HUGE = 2**70


def test_figures_go_on_after_a_rank_that_is_none(tmp_path: Path) -> None:
    """One such event would keep all that come after it from being written."""

    async def scenario() -> None:
        async with opened_state(tmp_path) as state:
            await acquire(state, KEY, 1)
            data = neff("x")
            digest = await upload(state, 1, data)
            await state.publishing.publish(
                "default", lease_id(1), PublishRequest(sha256=digest, size=len(data), compile_seconds=1.0)
            )
            holder = Holder(host="h", boot="b", pid=1, rank=HUGE, job="odd")
            asked = AcquireRequest(lease_id=lease_id(2), holder=holder, waited_seconds=math.nan)
            assert (await state.leases.acquire("default", KEY, asked, present)).state == "hit"
            await state.recorder.flush()
            assert (await acquire(state, KEY, 3, job="even")).state == "hit"
            await state.recorder.flush()
            async with state.database.read() as db:
                jobs = {job.job: job for job in await state.history.jobs(db, "default", limit=10)}
            assert {name: job.verdicts["remote"] for name, job in jobs.items()} == {"odd": 1, "even": 1}
            assert jobs["odd"].waited_seconds == 0.0

    asyncio.run(scenario())


def test_reports_with_numbers_that_are_none_are_taken_without_them(tmp_path: Path) -> None:
    """Refused, the same batch would come again every minute, for good."""

    async def scenario() -> None:
        async with opened_state(tmp_path) as state:
            odd = Report(verdict="local", rank=HUGE, job="j" * 400, bytes=HUGE, compile_seconds=math.inf)
            batch = ReportsRequest(batch="b" * 64, reports=[odd, Report(verdict="local", job="k")])
            assert await state.recorder.take("default", batch) == 2
            async with state.database.read() as db:
                assert len(await state.history.jobs(db, "default", limit=10)) == 2

    asyncio.run(scenario())


def test_a_number_that_no_database_takes_is_the_askers_mistake(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened_state(tmp_path) as state:
            await acquire(state, KEY, 1)
            with pytest.raises(InvalidRequest):
                await state.leases.heartbeat("default", lease_id(1), HeartbeatRequest(rss_bytes=HUGE))
            asked = AcquireRequest(lease_id=lease_id(2), holder=Holder(host="h", boot="b", pid=HUGE))
            with pytest.raises(InvalidRequest):
                await state.leases.acquire("default", "b" * 64, asked, present)

    asyncio.run(scenario())


def test_misses_are_explained_after_a_waiter_that_nobody_can_write_down(tmp_path: Path) -> None:
    """Kept in the queue, it would turn every later explanation into an error."""

    async def scenario() -> None:
        async with opened_state(tmp_path) as state:
            await acquire(state, KEY, 1, job="j")
            for number, holder in enumerate(
                (Holder(host="h", boot="b", pid=1, rank=HUGE, job="j"), Holder(host="a\0b", boot="b", pid=1, job="j"))
            ):
                asked = AcquireRequest(lease_id=lease_id(10 + number), holder=holder)
                assert (await state.leases.acquire("default", KEY, asked, present)).state == "busy"
            found = await state.explain.explain_job("default", "j")
            assert found.keys == 1

    asyncio.run(scenario())
