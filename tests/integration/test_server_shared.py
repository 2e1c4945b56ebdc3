"""Two replicas in this process on one PostgreSQL and one bucket: wakes, races, outages of the whole service."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from neffcache_client.wire import FailRequest, HeartbeatRequest, PublishRequest
from neffcache_server.app import open_state
from neffcache_server.problems import DatabaseUnavailable, InvalidRequest, ServerProblem
from neffcache_server.state import State
from support import backends
from support.backends import Production
from support.cache_state import StoppedClock, acquire, lease_id, neff, present, request, rows, server_settings, upload
from support.postgres import Postgres
from support.s3 import S3

KEY = "a" * 64
NEVER = 1e6


@pytest.fixture
def backend(postgres: Postgres, s3: S3) -> Iterator[Production]:
    production = Production(postgres, s3)
    with backends.using(production):
        yield production


@asynccontextmanager
async def replica(folder: Path, clock: StoppedClock | None = None, **given: Any) -> AsyncIterator[State]:
    """One server's parts with what runs in its background, on the state of that folder."""
    settings = server_settings(folder, poll_seconds=NEVER, **given)
    state = open_state(settings, clock)
    await state.leases.start()
    hub = asyncio.create_task(state.hub.run())
    try:
        yield state
    finally:
        state.leases.stop()
        hub.cancel()
        await asyncio.gather(hub, return_exceptions=True)
        await state.database.close()


async def held(state: State, number: int) -> None:
    """A lease that does not run out while a test waits: else its end would wake the waiters."""
    assert (await acquire(state, KEY, number)).state == "leased"
    await state.leases.heartbeat("default", lease_id(number), HeartbeatRequest())


async def flush(state: State) -> None:
    """What every replica writes once a second."""
    await state.counter.flush()
    await state.misses.flush()
    await state.recorder.flush()


async def publish(state: State, number: int, data: bytes) -> None:
    digest = await upload(state, number, data)
    body = PublishRequest(sha256=digest, size=len(data), compile_seconds=1.0)
    await state.publishing.publish("default", lease_id(number), body)


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def parked(state: State, count: int) -> list[asyncio.Task[Any]]:
    """Waiters inside `state`, all of them past their first look."""
    tasks = [asyncio.create_task(acquire(state, KEY, n, wait_seconds=25)) for n in range(100, 100 + count)]
    await until(lambda: state.leases.gates.waiting == count)
    gate = state.leases.gates._gates["default", KEY]
    await until(lambda: gate._follower is not None)
    await gate.read()
    return tasks


async def woken(waiters: list[asyncio.Task[Any]]) -> list[Any]:
    """Their answers, well before the end of their wait would have made them look."""
    return await asyncio.wait_for(asyncio.gather(*waiters), 15)


def listeners(postgres: Postgres, database: str) -> list[int]:
    query = f"SELECT pid FROM pg_stat_activity WHERE datname = '{database}' AND query LIKE 'LISTEN%'"
    return [pid for (pid,) in postgres.fetch("postgres", query)]


def test_publish_on_one_replica_wakes_the_waiters_of_another(backend: Production, tmp_path: Path) -> None:
    """UC-18: there is no poll that could have done it."""

    async def run() -> None:
        async with replica(tmp_path) as first, replica(tmp_path) as second:
            await held(first, 1)
            waiters = await parked(second, 50)
            await publish(first, 1, neff("x"))
            assert {answer.state for answer in await woken(waiters)} == {"hit"}

    asyncio.run(run())


def test_publish_during_a_break_of_the_listener_wakes_waiters_when_it_is_back(
    backend: Production, tmp_path: Path
) -> None:
    async def run() -> None:
        async with replica(tmp_path) as first, replica(tmp_path) as second:
            await held(first, 1)
            waiters = await parked(second, 5)
            mended = asyncio.Event()
            connect = second.hub._connect  # type: ignore[attr-defined]

            async def held_up() -> Any:
                await mended.wait()
                return await connect()

            second.hub._connect = held_up  # type: ignore[attr-defined]
            name = backend._databases[tmp_path]
            for pid in await asyncio.to_thread(listeners, backend.postgres, name):
                backend.postgres.execute("postgres", f"SELECT pg_terminate_backend({pid})")
            await publish(first, 1, neff("x"))
            assert not any(task.done() for task in waiters)
            mended.set()
            assert {answer.state for answer in await woken(waiters)} == {"hit"}

    asyncio.run(run())


def test_waiters_hold_no_connection(backend: Production, tmp_path: Path) -> None:
    async def run() -> None:
        async with replica(tmp_path, database_pool_size=2) as first:
            await held(first, 1)
            waiters = await parked(first, 100)
            query = f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{backend._databases[tmp_path]}'"
            assert backend.postgres.fetch("postgres", query)[0][0] <= 3
            await first.leases.release("default", lease_id(1))
            granted = await asyncio.wait_for(_first(waiters), 30)
            assert granted.state == "leased"
            for task in waiters:
                task.cancel()
            await asyncio.gather(*waiters, return_exceptions=True)

    asyncio.run(run())


async def _first(tasks: list[asyncio.Task[Any]]) -> Any:
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    return done.pop().result()


def test_one_of_a_hundred_on_two_replicas_is_granted(backend: Production, tmp_path: Path) -> None:
    async def run() -> None:
        async with replica(tmp_path) as first, replica(tmp_path) as second:
            for key in ("1" * 64, "2" * 64, "3" * 64):
                number = int(key[0]) * 1000
                asked = [acquire((first, second)[n % 2], key, number + n, host=f"h{n}") for n in range(100)]
                states = [answer.state for answer in await asyncio.gather(*asked)]
                assert states.count("leased") == 1
                assert states.count("busy") == 99

    asyncio.run(run())


def test_everything_at_once_neither_deadlocks_nor_doubles(backend: Production, tmp_path: Path) -> None:
    """Grants, beats, publishes, failures, removals, counts and lost blobs of few keys on two replicas."""
    keys = [c * 64 for c in "0123"]
    data = [neff("same"), neff("other")]

    async def work(state: State, worker: int) -> None:
        for turn in range(12):
            number = worker * 1000 + turn + 1
            key = keys[(worker + turn) % len(keys)]
            with suppress(ServerProblem):
                answer = await state.leases.acquire("default", key, request(number, host=f"h{worker}"), present)
                if answer.state == "hit":
                    async with state.database.write() as db:
                        await state.entries.remove(db, "default", key)
                    continue
                if answer.state != "leased":
                    await state.blobs._lost("default", sha256(data[0]).hexdigest())
                    await flush(state)
                    continue
                await state.leases.heartbeat("default", lease_id(number), HeartbeatRequest())
                if turn % 3 == 0:
                    report = FailRequest(kind="transient", exit_code=1)
                    await state.leases.fail("default", lease_id(number), report)
                else:
                    await publish(state, number, data[turn % 2])
                await flush(state)

    async def run() -> None:
        given = {"yield_seconds": 0, "transient_attempts": 1000, "database_pool_size": 20}
        async with replica(tmp_path, **given) as first, replica(tmp_path, **given) as second:
            before = len(backend.postgres.log)
            beats = [asyncio.create_task(s.leases.outage.watch()) for s in (first, second)]
            await asyncio.gather(*(work((first, second)[w % 2], w) for w in range(12)))
            for beat in beats:
                beat.cancel()
            assert "deadlock" not in backend.postgres.log[before:]
            published = rows(tmp_path, "SELECT count(*) FROM leases WHERE status = 'published'")[0][0]
            assert published > 5
            live = rows(tmp_path, "SELECT key, count(*) FROM leases WHERE status = 'live' GROUP BY key")
            assert all(count == 1 for _, count in live)

    asyncio.run(run())


def test_database_that_restarts_is_503_and_then_used_again(backend: Production, tmp_path: Path) -> None:
    async def run() -> None:
        async with replica(tmp_path) as state:
            assert (await acquire(state, KEY, 1)).state == "leased"
            await asyncio.to_thread(backend.postgres.stop, signal.SIGQUIT)
            for _ in range(3):
                with pytest.raises(DatabaseUnavailable):
                    await acquire(state, KEY, 2)
            await asyncio.to_thread(backend.postgres.start)
            assert (await acquire(state, KEY, 2)).state == "busy"
            await state.leases.heartbeat("default", lease_id(1), HeartbeatRequest())

    asyncio.run(run())


def test_no_lease_is_taken_over_before_an_outage_is_accounted_for(backend: Production, tmp_path: Path) -> None:
    """Every replica was away past the TTL. Whoever asks first must not rob the holder."""

    async def run() -> None:
        clock = StoppedClock()
        async with replica(tmp_path, clock) as state:
            await acquire(state, KEY, 1)
            await state.leases.heartbeat("default", lease_id(1), HeartbeatRequest())
            clock.value += 60
            assert (await acquire(state, KEY, 2)).state == "busy"
            await state.leases.heartbeat("default", lease_id(1), HeartbeatRequest())

    asyncio.run(run())


def test_a_replica_that_starts_or_stalls_forgives_nothing_while_another_served(
    backend: Production, tmp_path: Path
) -> None:
    """Otherwise a replica in a crash loop would keep the lease of a dead holder alive for ever."""

    async def run() -> None:
        clock = StoppedClock()
        async with replica(tmp_path, clock) as first:
            await acquire(first, KEY, 1)
            await first.leases.heartbeat("default", lease_id(1), HeartbeatRequest())
            for _ in range(16):
                clock.value += 2
                await first.leases.outage.resume()
            async with replica(tmp_path, clock) as newcomer:
                assert (await acquire(newcomer, KEY, 2)).state == "leased"

    asyncio.run(run())


def test_a_restart_of_the_service_gives_running_holders_another_ttl(backend: Production, tmp_path: Path) -> None:
    async def run() -> None:
        clock = StoppedClock()
        async with replica(tmp_path, clock) as state:
            await acquire(state, KEY, 1)
            await state.leases.heartbeat("default", lease_id(1), HeartbeatRequest())
        clock.value += 1200
        async with replica(tmp_path, clock) as first, replica(tmp_path, clock) as second:
            for state in (second, first):
                assert (await acquire(state, KEY, 2)).state == "busy"
            for _ in range(16):
                clock.value += 2
                await first.leases.outage.resume()
            # Forgiven once.
            assert (await acquire(second, KEY, 2)).state == "leased"

    asyncio.run(run())


def test_log_with_bytes_that_no_text_may_hold_still_says_why(backend: Production, tmp_path: Path) -> None:
    """PostgreSQL stores neither NUL nor half a surrogate pair; compilers print both."""

    async def run() -> None:
        async with replica(tmp_path) as state:
            await acquire(state, KEY, 1)
            report = FailRequest(kind="deterministic", exit_code=70, log_tail="a\0b\ud800c")
            await state.leases.fail("default", lease_id(1), report)
            answer = await acquire(state, KEY, 2)
            assert answer.failure is not None
            assert answer.failure.log_tail == "a\ufffdb?c"

    asyncio.run(run())


def test_value_out_of_range_is_the_askers_fault(backend: Production, tmp_path: Path) -> None:
    async def run() -> None:
        async with replica(tmp_path) as state:
            ask = request(1)
            ask.holder.pid = 1 << 70
            with pytest.raises(InvalidRequest):
                await state.leases.acquire("default", KEY, ask, present)
            ask.holder.pid, ask.holder.host = 1, "a\0b"
            with pytest.raises(InvalidRequest):
                await state.leases.acquire("default", KEY, ask, present)

    asyncio.run(run())
