"""Keys without an artifact are forgotten when nobody asks for them, and nobody stumbles over it: both back ends."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable, Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from neffcache_client.cli.main import main
from neffcache_client.graph_summary import GraphSummary, Op, encode
from neffcache_client.wire import FailRequest, HeartbeatRequest, PublishRequest
from neffcache_server.database.models import differences, entries, misses
from neffcache_server.gc import collector
from neffcache_server.gc.collector import Collector
from neffcache_server.gc.policy import Policy, Report
from neffcache_server.gc.repository import GcRepository
from neffcache_server.leases.repository import LeaseRepository
from neffcache_server.problems import KeyUnknown
from neffcache_server.state import State
from sqlalchemy import delete, event, insert, select, update
from support import backends
from support.cache_state import StoppedClock, acquire, lease_id, neff, opened_state, request, rows, upload

pytestmark = pytest.mark.usefixtures("backend")

HISTORY = 1000.0
POLICY = Policy(grace_seconds=0.0, history_seconds=HISTORY)
KEYS = [f"{n:064x}" for n in range(1, 40)]
KEY = KEYS[0]
FACTORS = {"recipe": 1, "ir": {"kind": "mlir", "digest": "a" * 64}, "target": "trn2"}
SUMMARY = encode(
    GraphSummary("mlir", {"stablehlo.add": 1}, [Op("stablehlo.add", "a", "", "train.py", 3, "%0 = add")])
)
TABLES = ("entries", "graphs", "misses", "failures", "differences")

Act = Callable[[State, StoppedClock], Coroutine[Any, Any, None]]


def on_cache(folder: Path, act: Act, **given: Any) -> None:
    """Run `act` on the parts of a server whose clock stands still."""

    async def check() -> None:
        clock = StoppedClock()
        async with opened_state(folder, clock, **given) as state:
            await act(state, clock)

    asyncio.run(check())


async def collect(state: State, policy: Policy = POLICY, **given: Any) -> Report:
    return await Collector(state.database, state.store, policy, **given).run()


async def ask(state: State, number: int = 0, key: str = KEY, **given: Any) -> None:
    """A rank is given the lease of a key and gives it back."""
    assert (await acquire(state, key, number, factors=FACTORS, **given)).state == "leased"
    await state.leases.release("default", lease_id(number))


async def publish(state: State, number: int = 0, key: str = KEY) -> None:
    assert (await acquire(state, key, number)).state == "leased"
    data = neff(key)
    sha256 = await upload(state, number, data)
    wanted = PublishRequest(sha256=sha256, size=len(data), compile_seconds=1.0)
    await state.publishing.publish("default", lease_id(number), wanted)


async def known(state: State) -> set[str]:
    """The keys that have a row."""
    async with state.database.read() as db:
        return set((await db.execute(select(entries.c.key))).scalars())


def kept(folder: Path) -> dict[str, int]:
    """How many rows there are."""
    return {table: rows(folder, f"SELECT count(*) FROM {table}")[0][0] for table in TABLES}


def test_a_key_goes_with_everything_that_hangs_on_it(tmp_path: Path) -> None:
    async def check(state: State, clock: StoppedClock) -> None:
        await ask(state)
        await state.explain.keep_summary("default", KEY, SUMMARY)
        assert (await acquire(state, KEY, 1, retry_failed=True)).state == "leased"
        report = FailRequest(kind="deterministic", exit_code=70, code="NCC_X", log_tail="no")
        await state.leases.fail("default", lease_id(1), report)
        row = {"namespace": "default", "key": KEY, "stored_sha256": "a", "offered_sha256": "b", "members": "[]"}
        async with state.database.write() as db:
            await db.execute(insert(differences).values(**row, seen_at=clock.value))
        assert min(kept(tmp_path).values()) > 0
        clock.value += HISTORY - 1
        assert (await collect(state)).keys == 0
        assert (await state.explain.explain("default", KEY)).key.factors == FACTORS
        assert min(kept(tmp_path).values()) > 0
        clock.value += 2
        planned = await collect(state, dry_run=True)
        assert (planned.keys, planned.anything) == (1, True)
        assert min(kept(tmp_path).values()) > 0
        report_of_it = await collect(state)
        assert (report_of_it.keys, report_of_it.anything) == (1, True)
        assert set(kept(tmp_path).values()) == {0}
        with pytest.raises(KeyUnknown):
            await state.explain.explain("default", KEY)
        await publish(state, 2)
        assert (await acquire(state, KEY, 3)).state == "hit"

    on_cache(tmp_path, check, deterministic_seconds=10.0)


async def _leased(state: State, clock: StoppedClock) -> None:
    """Its lease has run out, and is not superseded: it may still publish."""
    assert (await acquire(state, KEY, 1)).state == "leased"
    await state.leases.heartbeat("default", lease_id(1), HeartbeatRequest())
    data = neff(KEY)
    await upload(state, 1, data)


async def _failing(state: State, clock: StoppedClock) -> None:
    assert (await acquire(state, KEY, 1)).state == "leased"
    await state.leases.fail("default", lease_id(1), FailRequest(kind="deterministic", exit_code=70, log_tail="no"))


async def _asked_again(state: State, clock: StoppedClock) -> None:
    await ask(state)
    clock.value += HISTORY
    await ask(state, 1)


async def _asked_by_a_reader(state: State, clock: StoppedClock) -> None:
    await _read_with(state, clock, FACTORS)


async def _asked_by_a_reader_without_factors(state: State, clock: StoppedClock) -> None:
    await _read_with(state, clock, None)


async def _read_with(state: State, clock: StoppedClock, factors: Any) -> None:
    await ask(state)
    clock.value += HISTORY
    assert (await acquire(state, KEY, 1, can_compile=False, factors=factors)).state == "busy"
    await state.misses.flush()
    # Misses are kept for less time than histories are by default.
    async with state.database.write() as db:
        await db.execute(delete(misses))


async def _missed(state: State, clock: StoppedClock) -> None:
    await ask(state)
    clock.value += HISTORY
    async with state.database.write() as db:
        await db.execute(update(misses).values(at=clock.value))


async def _collected(state: State, clock: StoppedClock) -> None:
    await publish(state)
    clock.value += HISTORY
    assert (await collect(state, Policy(age_seconds=1.0, grace_seconds=0.0))).entries["age"].number == 1


async def _deleted(state: State, clock: StoppedClock) -> None:
    await publish(state)
    clock.value += HISTORY
    async with state.database.write() as db:
        assert await state.entries.remove(db, "default", KEY)


async def _from_before_there_was_the_column(state: State, clock: StoppedClock) -> None:
    await ask(state)
    async with state.database.write() as db:
        await db.execute(update(entries).values(asked_at=None))
        await db.execute(delete(misses))
    clock.value += HISTORY
    assert (await collect(state, dry_run=True)).keys == 0
    assert (await collect(state)).keys == 0


@pytest.mark.parametrize(
    "begin",
    [
        _asked_again,
        _asked_by_a_reader,
        _asked_by_a_reader_without_factors,
        _missed,
        _collected,
        _deleted,
        _from_before_there_was_the_column,
    ],
)
def test_time_counts_from_the_last_who_asked_or_from_the_end_of_the_artifact(tmp_path: Path, begin: Act) -> None:
    async def check(state: State, clock: StoppedClock) -> None:
        await begin(state, clock)
        clock.value += HISTORY - 1
        assert (await collect(state)).keys == 0
        assert await known(state) == {KEY}
        clock.value += 2
        assert (await collect(state)).keys == 1
        assert await known(state) == set()

    on_cache(tmp_path, check)


@pytest.mark.parametrize("begin", [_leased, _failing])
def test_a_key_with_a_lease_or_a_failure_in_force_stays_however_old(tmp_path: Path, begin: Act) -> None:
    async def check(state: State, clock: StoppedClock) -> None:
        await begin(state, clock)
        clock.value += HISTORY + 1
        assert (await collect(state, dry_run=True)).keys == 0
        assert (await collect(state)).keys == 0
        assert await known(state) == {KEY}
        clock.value += 5 * HISTORY
        if begin is _leased:
            data = neff(KEY)
            wanted = PublishRequest(sha256=await upload(state, 1, data), size=len(data), compile_seconds=1.0)
            assert (await state.publishing.publish("default", lease_id(1), wanted)).outcome == "published"
            assert (await collect(state)).keys == 0
        else:
            assert (await collect(state)).keys == 1

    on_cache(tmp_path, check, deterministic_seconds=3 * HISTORY)


@pytest.mark.parametrize("state_of_it", ["present", "missing", "quarantined"])
def test_a_key_with_an_artifact_stays(tmp_path: Path, state_of_it: str) -> None:
    async def check(state: State, clock: StoppedClock) -> None:
        await publish(state)
        async with state.database.write() as db:
            await db.execute(update(entries).values(state=state_of_it, asked_at=1.0))
        clock.value += 10 * HISTORY
        assert (await collect(state)).keys == 0
        assert await known(state) == {KEY}

    on_cache(tmp_path, check)


def test_zero_keeps_histories_for_ever_and_another_namespace_is_left_alone(tmp_path: Path) -> None:
    async def check(state: State, clock: StoppedClock) -> None:
        await ask(state)
        await state.leases.acquire("other", KEY, request(1), _here)
        await state.leases.release("other", lease_id(1))
        clock.value += 10 * HISTORY
        assert (await collect(state, Policy(grace_seconds=0.0))).keys == 0
        assert (await collect(state, namespace="other")).keys == 1
        assert rows(tmp_path, "SELECT namespace FROM entries") == [("default",)]
        assert rows(tmp_path, "SELECT namespace FROM misses") == [("default",)]
        assert (await collect(state)).keys == 1

    on_cache(tmp_path, check)


async def _here() -> bool:
    return False


# While it goes


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come to that")


async def queued(folder: Path, asking: asyncio.Task[Any]) -> None:
    """Return when a request waits for a lock in the database (or, on SQLite, for its turn to write)."""
    if backends.current().shared:
        query = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        await until(lambda: bool(rows(folder, query)))
    else:
        for _ in range(20):
            await asyncio.sleep(0)
    assert not asking.done()


async def compiles(state: State, number: int, key: str = KEY) -> None:
    """The rank that was given the lease finishes its work."""
    data = neff(key)
    wanted = PublishRequest(sha256=await upload(state, number, data), size=len(data), compile_seconds=1.0)
    assert (await state.publishing.publish("default", lease_id(number), wanted)).outcome == "published"
    assert (await acquire(state, key, number + 1000)).state == "hit"


def test_a_rank_that_asks_while_the_key_is_being_forgotten_gets_its_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key's row is deleted, and that not committed yet, when the rank comes."""

    async def check(state: State, clock: StoppedClock) -> None:
        await ask(state)
        clock.value += HISTORY + 1
        deleted, commit = asyncio.Event(), asyncio.Event()
        forget = GcRepository.forget_keys

        async def halfway(self: GcRepository, *arguments: Any) -> int:
            number = await forget(self, *arguments)
            deleted.set()
            await commit.wait()
            return number

        monkeypatch.setattr(GcRepository, "forget_keys", halfway)
        collecting = asyncio.create_task(collect(state))
        await deleted.wait()
        asking = asyncio.create_task(acquire(state, KEY, 1, factors=FACTORS))
        await queued(tmp_path, asking)
        commit.set()
        assert (await collecting).keys == 1
        assert (await asking).state == "leased"
        assert (await state.explain.explain("default", KEY)).key.factors == FACTORS
        await compiles(state, 1)

    on_cache(tmp_path, check)


def test_a_rank_that_finds_the_row_and_loses_it_to_the_collector_makes_it_anew(tmp_path: Path) -> None:
    """The row is locked when the rank comes, and deleted while the rank waits for the lock."""

    async def check(state: State, clock: StoppedClock) -> None:
        await ask(state)
        async with state.database.write() as db:
            await LeaseRepository(state.database).lock_key(db, "default", KEY)
            asking = asyncio.create_task(acquire(state, KEY, 1, factors=FACTORS))
            await queued(tmp_path, asking)
            await db.execute(delete(entries))
        assert (await asking).state == "leased"
        assert await known(state) == {KEY}
        assert rows(tmp_path, "SELECT count(*) FROM entries WHERE factors IS NOT NULL")[0][0] == 1
        await compiles(state, 1)

    on_cache(tmp_path, check)


def test_a_key_whose_lease_is_being_granted_is_passed_over(tmp_path: Path) -> None:
    """A collection neither waits for the rank nor takes the key away from it."""

    async def check(state: State, clock: StoppedClock) -> None:
        await ask(state)
        await ask(state, 1, KEYS[1])
        clock.value += HISTORY + 1
        repository = LeaseRepository(state.database)
        async with state.database.write() as db:
            await repository.lock_key(db, "default", KEY)
            await repository.grant(db, "default", KEY, request(2), 30.0)
            collecting = asyncio.create_task(collect(state))
            if backends.current().shared:
                assert (await asyncio.wait_for(collecting, 30)).keys == 1
        assert (await collecting).keys == 1
        assert await known(state) == {KEY}
        await compiles(state, 2)

    on_cache(tmp_path, check)


def test_a_lease_that_was_granted_after_the_look_is_seen_before_the_key_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of the version before grants leases without stamping the row, so the lock alone tells nothing."""

    async def check(state: State, clock: StoppedClock) -> None:
        await ask(state)
        clock.value += HISTORY + 1
        async with state.database.write() as db:
            await LeaseRepository(state.database).grant(db, "default", KEY, request(1), 30.0)
        stale = select(entries.c.key)
        monkeypatch.setattr(GcRepository, "_locking", lambda *_: stale)
        async with state.database.write() as db:
            assert await GcRepository(state.database).forget_keys(db, "default", [KEY], HISTORY) == 0
        assert await known(state) == {KEY}
        assert kept(tmp_path)["graphs"] == 1

    on_cache(tmp_path, check)


def test_ranks_that_come_back_in_the_middle_of_a_collection_all_get_leases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "_ENTRIES_AT_ONCE", 3)

    async def check(state: State, clock: StoppedClock) -> None:
        for number, key in enumerate(KEYS):
            await ask(state, number, key)
        clock.value += HISTORY + 1
        asking = [acquire(state, key, 100 + n, factors=FACTORS) for n, key in enumerate(KEYS)]
        report, *answers = await asyncio.gather(collect(state), *asking)
        assert {answer.state for answer in answers} == {"leased"}
        assert 0 <= report.keys <= len(KEYS)
        assert await known(state) == set(KEYS)
        query = "SELECT count(*) FROM entries e JOIN leases l ON l.key = e.key AND l.status = 'live' "
        assert rows(tmp_path, query + "WHERE e.factors IS NOT NULL")[0][0] == len(KEYS)

    on_cache(tmp_path, check)


def test_forgetting_many_keys_holds_up_no_hit(tmp_path: Path) -> None:
    async def check(state: State, clock: StoppedClock) -> None:
        number = 2000
        await publish(state)
        row = {"namespace": "default", "state": "absent", "asked_at": clock.value}
        async with state.database.write() as db:
            await db.execute(insert(entries), [{**row, "key": f"{n:064x}"} for n in range(1000, 1000 + number)])
        clock.value += HISTORY + 1
        collecting = asyncio.create_task(collect(state))
        hits, slowest = 0, 0.0
        while not collecting.done():
            began = time.monotonic()
            assert (await acquire(state, KEY, 5000 + hits)).state == "hit"
            slowest = max(slowest, time.monotonic() - began)
            hits += 1
            await asyncio.sleep(0)
        assert (await collecting).keys == number
        assert await known(state) == {KEY}
        # 200 go at a time: had one transaction held everybody up, few hits would have got through.
        assert hits > number // 200
        assert slowest < 2.0

    on_cache(tmp_path, check)


def test_each_few_keys_cost_the_same_however_many_are_due(tmp_path: Path) -> None:
    """Judged by SQLite's plans; PostgreSQL makes its own from statistics, and a table of a test has none."""

    async def check(state: State, clock: StoppedClock) -> None:
        if backends.current().shared:
            return
        await ask(state)
        clock.value += HISTORY + 1
        seen: list[str] = []
        engine = state.database._writer.sync_engine
        event.listen(engine, "before_cursor_execute", lambda c, cur, text, p, ctx, many: seen.append(text))
        assert (await collect(state)).keys == 1
        judging = [text for text in seen if "coalesce(entries.asked_at" in text]
        assert [text.split()[0] for text in judging] == ["SELECT", "DELETE"]
        with closing(sqlite3.connect(tmp_path / "neffcache.sqlite3")) as connection:
            for text in judging:
                plan = connection.execute(f"EXPLAIN QUERY PLAN {text}", [None] * text.count("?")).fetchall()
                steps = [step for *_, step in plan]
                assert "(namespace=? AND key=?)" in steps[0], steps
                assert not [step for step in steps if step.startswith("SCAN")], steps

    on_cache(tmp_path, check)


def test_the_command_reports_what_it_forgot(
    tmp_path: Path, backend: backends.Embedded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NEFFCACHE_SERVER_DATA_DIR", str(tmp_path))

    async def fill() -> None:
        async with opened_state(tmp_path) as state:
            await ask(state)
            await ask(state, 1, KEYS[1])
            async with state.database.write() as db:
                await db.execute(update(entries).where(entries.c.key == KEY).values(asked_at=1.0))
                await db.execute(delete(misses))
            # Not given back: the command is to find it as it is.
            monkeypatch.setattr(backends.Production, "release", lambda *_: None)

    asyncio.run(fill())
    for name, value in backends.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NEFFCACHE_SERVER_GC_HISTORY_SECONDS", "0")
    assert main(["gc"]) == 0
    assert capsys.readouterr().out == "nothing to remove\n"
    monkeypatch.delenv("NEFFCACHE_SERVER_GC_HISTORY_SECONDS")
    assert main(["gc", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("would remove the history of 1 keys: ")
    assert main(["gc", "--history", "200d", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["keys"] == 1
    assert main(["gc"]) == 0
    assert capsys.readouterr().out == "nothing to remove\n"
    assert [key for (key,) in rows(tmp_path, "SELECT key FROM entries")] == [KEYS[1]]
    monkeypatch.undo()
    backend.release(tmp_path)
