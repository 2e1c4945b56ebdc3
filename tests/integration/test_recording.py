"""What is recorded of requests: each once, in every sum, for as long as was said."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
from neffcache_client.wire import Report, ReportsRequest, RunReport
from neffcache_server.database.engine import Database
from neffcache_server.database.models import events, host_keys, job_ranks, jobs, rollups
from neffcache_server.problems import DatabaseUnavailable
from neffcache_server.recording.events import Event
from neffcache_server.recording.writing import forget
from neffcache_server.state import State
from neffcache_server.stats.counters import Counts
from sqlalchemy import func, select
from support.cache_state import StoppedClock, opened_state

pytestmark = pytest.mark.usefixtures("backend")

KEY, OTHER = "a" * 64, "b" * 64
HOUR = 1_000_800  # 14:00 of a day
START = HOUR + 60.0


def hit(host: str, key: str = KEY, **given: Any) -> Event:
    return Event("default", given.pop("verdict", "remote"), host, key=key, saved_seconds=100.0, bytes=7, **given)


def recorded(tmp_path: Path, batches: list[list[Event]], look: Any, **given: Any) -> Any:
    """Note each batch, flush, and return what `look(state, db)` gives."""

    async def run() -> Any:
        async with opened_state(tmp_path, StoppedClock(START), **given) as state:
            for batch in batches:
                for event in batch:
                    state.recorder.note(event)
                await state.recorder.flush()
            async with state.database.read() as db:
                return await look(state, db)

    return asyncio.run(run())


async def figures(state: State, db: Any) -> Any:
    return await state.history.figures(db, "default")


def test_a_hosts_first_hit_is_a_saving_and_its_later_ones_are_not(tmp_path: Path) -> None:
    """The built-in cache would have had the graph in the host's folder from the second request on."""
    batches = [[hit("h1"), hit("h1"), hit("h2")], [hit("h1"), hit("h3", verdict="waited"), hit("h1", OTHER)]]
    found = recorded(tmp_path, batches, figures)
    assert found.saved_seconds == 400.0, "h1, h2, h3 with one graph, h1 with the other"
    assert found.verdicts == {"remote": 5, "waited": 1}


def test_hits_on_the_host_that_compiled_are_no_saving(tmp_path: Path) -> None:
    compiled = Event("default", "compiled", "h1", key=KEY, spent_seconds=100.0)
    found = recorded(tmp_path, [[compiled], [hit("h1"), hit("h2")]], figures)
    assert (found.saved_seconds, found.spent_seconds) == (100.0, 100.0)


def test_a_host_that_has_a_graph_from_its_own_folder_saves_nothing_by_a_later_fetch(tmp_path: Path) -> None:
    local = Event("default", "local", "h1", key=KEY, source="client")
    assert recorded(tmp_path, [[local, hit("h1")]], figures).saved_seconds == 0.0


def test_every_sum_agrees_with_the_events_that_it_was_made_of(tmp_path: Path) -> None:
    async def look(_state: State, db: Any) -> Any:
        raw = (
            await db.execute(select(func.count(), func.sum(events.c.saved_seconds), func.sum(events.c.bytes)))
        ).one()
        sums = [
            (
                await db.execute(
                    select(
                        func.sum(rollups.c.number), func.sum(rollups.c.saved_seconds), func.sum(rollups.c.bytes)
                    ).where(rollups.c.period == period)
                )
            ).one()
            for period in ("hour", "day", "total")
        ]
        by_job = (
            await db.execute(
                select(func.sum(jobs.c.remote_hits), func.sum(jobs.c.saved_seconds), func.sum(jobs.c.bytes))
            )
        ).one()
        by_rank = (
            await db.execute(
                select(
                    func.sum(job_ranks.c.remote_hits),
                    func.sum(job_ranks.c.saved_seconds),
                    func.sum(job_ranks.c.bytes),
                )
            )
        ).one()
        return {tuple(row) for row in (raw, *sums, by_job, by_rank)}

    batch = [hit(f"h{n % 4}", KEY if n % 3 else OTHER, job=f"job{n % 2}", rank=n) for n in range(1300)]
    assert len(recorded(tmp_path, [batch], look)) == 1


def test_hours_and_days_begin_where_the_databases_clock_says(tmp_path: Path) -> None:
    async def run() -> None:
        clock = StoppedClock(START)
        async with opened_state(tmp_path, clock) as state:
            for value in (START, START + 3500, START + 3600, START + 86400):
                clock.value = value
                state.recorder.note(hit("h1"))
                await state.recorder.flush()
            async with state.database.read() as db:
                hours = await state.history.series(db, None, "hour", 0, 3600)
                days = await state.history.series(db, None, "day", 0, 86400)
            assert [f.requests for _, f in sorted(hours.items())] == [2, 1, 1]
            assert [f.requests for _, f in sorted(days.items())] == [3, 1]

    asyncio.run(run())


def test_a_job_knows_its_ranks_and_hosts(tmp_path: Path) -> None:
    """UC-31."""

    async def look(state: State, db: Any) -> Any:
        return await state.history.job(db, "default", "train"), await state.history.ranks(db, "default", "train", 10)

    batches = [
        [hit("h0", job="train", rank=0), hit("h0", job="train", rank=1), hit("h1", job="other", rank=0)],
        [hit("h1", OTHER, job="train", rank=2, verdict="waited", waited_seconds=30.0)],
    ]
    job, ranks = recorded(tmp_path, batches, look)
    assert (job.ranks, job.hosts, job.verdicts, job.waited_seconds) == (3, 2, {"remote": 2, "waited": 1}, 30.0)
    assert [(r.host, r.rank) for r in ranks] == [("h1", 2), ("h0", 0), ("h0", 1)]
    assert job.first_at == pytest.approx(START - 30, abs=5)


def report(batch: str, **given: Any) -> ReportsRequest:
    return ReportsRequest(batch=batch * 64, **given)


def test_reports_are_counted_once_however_often_they_are_sent(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened_state(tmp_path, StoppedClock(START)) as state:
            sent = report(
                "c",
                reports=[
                    Report(verdict="local", host="h0", key=KEY, job="j", rank=1, bytes=3),
                    Report(verdict="fallback", host="h0", key=OTHER, reason="unreachable", compile_seconds=9.0),
                    Report(verdict="uncacheable", host="h0", reason="something new", age_seconds=7200.0),
                ],
                runs=[RunReport(host="h0", job="j", rank=1, ready_seconds=12.5, fetch_seconds=0.5)],
            )
            assert [await state.recorder.take("default", sent) for _ in range(3)] == [4, 0, 0]
            async with state.database.read() as db:
                found = await state.history.figures(db, "default")
                (rank,) = await state.history.ranks(db, "default", "j", 9)
                hours = await state.history.series(db, None, "hour", 0, 3600)
            assert found.verdicts == {"local": 1, "fallback": 1, "uncacheable": 1}
            assert found.reasons == {("fallback", "unreachable"): 1, ("uncacheable", "other"): 1}
            assert found.compiles == 2
            assert (rank.ready_seconds, rank.fetch_seconds, rank.verdicts) == (12.5, 0.5, {"local": 1})
            assert sorted(hours) == [HOUR - 7200, HOUR], "an age is taken off, whatever the host's clock says"

    asyncio.run(run())


def test_figures_wait_for_the_database_and_are_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with opened_state(tmp_path, StoppedClock(START)) as state:
            for n in range(3):
                state.recorder.note(hit(f"h{n}"))
            with monkeypatch.context() as broken:

                @contextlib.asynccontextmanager
                async def unavailable(_self: Database) -> Any:
                    raise DatabaseUnavailable
                    yield

                broken.setattr(Database, "write", unavailable)
                with pytest.raises(DatabaseUnavailable):
                    await state.recorder.flush()
            assert state.recorder.waiting == 3
            await state.recorder.flush()
            async with state.database.read() as db:
                assert (await state.history.figures(db, None)).requests == 3

    asyncio.run(run())


def test_the_oldest_figures_are_dropped_and_counted_when_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neffcache_server.recording.recorder._MAX_WAITING", 10)

    async def run() -> None:
        async with opened_state(tmp_path) as state:
            for n in range(14):
                state.recorder.note(hit(f"h{n}"))
            assert (state.recorder.waiting, state.recorder.dropped) == (10, 4)

    asyncio.run(run())


def test_old_rows_go_and_sums_for_good_stay(tmp_path: Path) -> None:
    async def run() -> None:
        clock = StoppedClock(START)
        async with opened_state(tmp_path, clock) as state:
            state.recorder.note(hit("h1", job="old", rank=0))
            await state.recorder.flush()
            clock.value += 86400 * 500
            state.recorder.note(hit("h2", job="new", rank=0))
            await state.recorder.flush()
            await forget(state.database, state.settings)
            async with state.database.read() as db:
                counts = [
                    (await db.execute(select(func.count()).select_from(table))).scalar_one()
                    for table in (events, jobs, job_ranks, host_keys)
                ]
                periods = await db.execute(select(rollups.c.period, func.count()).group_by(rollups.c.period))
                assert counts == [1, 1, 1, 1]
                assert dict(map(tuple, periods)) == {"hour": 1, "day": 2, "total": 1}
                assert (await state.history.figures(db, None)).requests == 2

    asyncio.run(run())


def test_no_more_events_are_kept_than_the_setting_says(tmp_path: Path) -> None:
    async def look(state: State, db: Any) -> Any:
        await forget(state.database, state.settings)
        return (await db.execute(select(func.count()).select_from(events))).scalar_one()

    assert recorded(tmp_path, [[hit(f"h{n}") for n in range(1200)]], look, keep_events_rows=1000) == 1000


def test_nothing_is_recorded_where_it_is_switched_off(tmp_path: Path) -> None:
    assert recorded(tmp_path, [[hit("h1")]], figures, recording=False).requests == 0


def test_the_saving_is_the_same_in_the_counters_that_stats_reads(tmp_path: Path) -> None:
    async def look(state: State, db: Any) -> Any:
        return await state.stats.read(db, "default")

    found = recorded(tmp_path, [[hit("h1"), hit("h1"), hit("h2")]], look)
    assert found.compile_seconds_saved == 200.0
    assert Counts().compile_seconds_saved == 0.0
