"""Waiting, waking, and outages of the server's own, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from neffcache_client.wire import FailRequest, HeartbeatRequest, PublishRequest
from neffcache_server.app import open_state
from neffcache_server.problems import ClientGone, DatabaseUnavailable, LeaseEnded, LeaseSuperseded, ShuttingDown
from neffcache_server.state import State
from support.cache_state import (
    StoppedClock,
    acquire,
    lease_id,
    migrated,
    neff,
    opened_state,
    present,
    request,
    rows,
    server_settings,
    upload,
)

pytestmark = pytest.mark.usefixtures("backend")

KEY = "a" * 64


async def publish(state: State, number: int, data: bytes) -> str:
    sha256 = await upload(state, number, data)
    body = PublishRequest(sha256=sha256, size=len(data), compile_seconds=40.0)
    await state.publishing.publish("default", lease_id(number), body)
    return sha256


async def until(condition: Callable[[], bool]) -> None:
    """Turn the event loop until `condition` holds."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


async def parked(state: State, calls: list[Coroutine[Any, Any, Any]]) -> list[asyncio.Task[Any]]:
    """Start calls that wait, and return when all are inside and have looked once."""
    tasks = [asyncio.create_task(call) for call in calls]
    await until(lambda: state.leases.gates.waiting == len(calls))
    gate = state.leases.gates._gates["default", KEY]
    await until(lambda: gate._follower is not None)
    await gate.read()
    await asyncio.sleep(0)
    return tasks


def test_publish_wakes_every_waiter_with_one_read(tmp_path: Path) -> None:
    """UC-18: waiters have the answer at once, not at their next poll."""

    async def run() -> None:
        async with opened_state(tmp_path) as state:
            assert (await acquire(state, KEY, 1)).state == "leased"
            tasks = await parked(
                state, [acquire(state, KEY, n, host=f"h{n % 3}", wait_seconds=25) for n in range(100, 400)]
            )
            reads = 0
            plain = state.leases._repo.snapshot

            async def counted(*args: Any) -> Any:
                nonlocal reads
                reads += 1
                return await plain(*args)

            state.leases._repo.snapshot = counted  # type: ignore[method-assign]
            sha256 = await publish(state, 1, neff("x"))
            answers = await asyncio.gather(*tasks)
            assert {a.artifact.sha256 for a in answers} == {sha256}
            assert reads <= 3
            stats = await flushed_stats(state)
            assert (stats.hits, stats.waits, stats.misses, stats.publishes) == (300, 300, 1, 1)
            assert (stats.compile_seconds_spent, stats.compile_seconds_saved) == (40.0, 80.0), (
                "h1 and h2 each save one"
            )

    asyncio.run(run())


async def flushed_stats(state: State) -> Any:
    await state.counter.flush()
    await state.recorder.flush()
    async with state.database.read() as db:
        return await state.stats.read(db, "default")


def test_ranks_that_ask_around_a_publish_all_get_the_same_answer(tmp_path: Path) -> None:
    """UC-17: before, between its steps and after; nobody compiles, and nobody gets another NEFF."""

    async def run() -> None:
        async with opened_state(tmp_path) as state:
            assert (await acquire(state, KEY, 1)).state == "leased"
            await state.leases.heartbeat("default", lease_id(1), HeartbeatRequest())

            def ask(first: int) -> list[asyncio.Task[Any]]:
                calls = (acquire(state, KEY, n, host=f"h{n % 8}", wait_seconds=25) for n in range(first, first + 16))
                return [asyncio.create_task(call) for call in calls]

            data = neff("x")
            tasks = ask(100)
            sha256 = await upload(state, 1, data)
            tasks += ask(200)
            body = PublishRequest(sha256=sha256, size=len(data), compile_seconds=40.0)
            publishing = asyncio.create_task(state.publishing.publish("default", lease_id(1), body))
            tasks += ask(300)
            await publishing
            tasks += ask(400)
            answers = await asyncio.gather(*tasks)
            assert {(a.state, a.artifact.sha256) for a in answers} == {("hit", sha256)}

    asyncio.run(run())


def test_a_result_that_cannot_be_handed_over_is_told_to_those_who_wait(tmp_path: Path) -> None:
    """UC-10: since when the round has one; a publish ends it, and so does time."""

    async def run() -> None:
        clock = StoppedClock()
        async with opened_state(tmp_path, clock) as state:
            assert (await acquire(state, KEY, 1)).state == "leased"
            assert (await acquire(state, KEY, 2)).unshared_seconds is None
            await state.leases.heartbeat("default", lease_id(1), HeartbeatRequest(unshared=True))
            clock.value += 20
            await state.leases.heartbeat("default", lease_id(1), HeartbeatRequest(unshared=True))
            assert (await acquire(state, KEY, 2)).unshared_seconds == 20
            await state.leases.release("default", lease_id(1))
            assert (await acquire(state, KEY, 3)).state == "leased", "somebody tries again"
            assert (await acquire(state, KEY, 4)).unshared_seconds == 20
            with pytest.raises(LeaseEnded):
                await state.leases.heartbeat("default", lease_id(1), HeartbeatRequest(unshared=True))
            await state.leases.heartbeat("default", lease_id(3), HeartbeatRequest())
            clock.value += 1000
            await state.leases.heartbeat("default", lease_id(3), HeartbeatRequest())
            assert (await acquire(state, KEY, 4)).unshared_seconds is None
            await state.leases.heartbeat("default", lease_id(3), HeartbeatRequest(unshared=True))
            assert (await acquire(state, KEY, 4)).unshared_seconds == 0
            await publish(state, 3, neff("x"))
            assert (await acquire(state, KEY, 4)).state == "hit"
            assert rows(tmp_path, "SELECT * FROM failures") == []

    asyncio.run(run())


def test_one_waiter_of_many_gets_the_lease_of_a_lost_holder(tmp_path: Path) -> None:
    """UC-01: exactly one is granted, with a later epoch; the lost holder may change nothing any more."""

    async def run() -> None:
        clock = StoppedClock()
        async with opened_state(tmp_path, clock, poll_seconds=0.02) as state:
            first = await acquire(state, KEY, 1)
            await state.leases.heartbeat("default", lease_id(1), HeartbeatRequest())
            tasks = await parked(state, [acquire(state, KEY, n, host=f"h{n}", wait_seconds=25) for n in range(2, 52)])
            clock.value += 31
            done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            (winner,) = [t.result() for t in done]
            assert winner.state == "leased"
            assert winner.epoch > first.epoch
            assert len(waiting) == 49
            with pytest.raises(LeaseSuperseded):
                await state.leases.heartbeat("default", lease_id(1), HeartbeatRequest())
            new = next(n for n in range(2, 52) if tasks[n - 2] in done)
            await publish(state, new, neff("x"))
            assert {(await t).state for t in waiting} == {"hit"}
            assert len(rows(tmp_path, "SELECT epoch FROM leases")) == 2

    asyncio.run(run())


def test_waiter_that_hung_up_is_granted_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened_state(tmp_path) as state:
            await acquire(state, KEY, 1)

            async def gone() -> bool:
                return True

            waiting = state.leases.acquire("default", KEY, request(2, wait_seconds=25), gone)
            (task,) = await parked(state, [waiting])
            await state.leases.release("default", lease_id(1))
            with pytest.raises(ClientGone):
                await task
            assert rows(tmp_path, "SELECT count(*) FROM leases WHERE status = 'live'") == [(0,)]

    asyncio.run(run())


def test_release_hands_the_lease_on(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened_state(tmp_path) as state:
            await acquire(state, KEY, 1)
            (task,) = await parked(state, [acquire(state, KEY, 2, wait_seconds=25)])
            await state.leases.release("default", lease_id(1))
            assert (await task).state == "leased"

    asyncio.run(run())


def test_compiler_error_is_told_to_all_waiters(tmp_path: Path) -> None:
    """UC-02, UC-04: no rank is left waiting because it alone does not know."""

    async def run() -> None:
        async with opened_state(tmp_path) as state:
            await acquire(state, KEY, 1)
            tasks = await parked(state, [acquire(state, KEY, n, wait_seconds=25) for n in range(2, 65)])
            report = FailRequest(kind="deterministic", exit_code=70, code="NCC_EVRF051", log_tail="why")
            await state.leases.fail("default", lease_id(1), report)
            answers = [await t for t in tasks]
            assert {(a.state, a.failure.code, a.failure.log_tail) for a in answers} == {
                ("failed", "NCC_EVRF051", "why")
            }

    asyncio.run(run())


def test_after_a_transient_failure_another_host_goes_first(tmp_path: Path) -> None:
    """UC-04: the failing host stands back for two seconds."""

    async def run() -> None:
        async with opened_state(tmp_path, StoppedClock()) as state:
            await acquire(state, KEY, 1, host="h0")
            same = await parked(state, [acquire(state, KEY, 2, host="h0", wait_seconds=25)])
            await state.leases.fail("default", lease_id(1), FailRequest(kind="transient", exit_code=137))
            other = await acquire(state, KEY, 3, host="h1")
            assert other.state == "leased"
            await publish(state, 3, neff("x"))
            assert (await same[0]).state == "hit"

    asyncio.run(run())


def test_wait_ends_with_who_holds_the_lease(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened_state(tmp_path) as state:
            await acquire(state, KEY, 1, host="h7")
            answer = await acquire(state, KEY, 2, wait_seconds=0.05)
            assert (answer.state, answer.holder.host if answer.holder else None) == ("busy", "h7")
            assert state.leases.gates.waiting == 0

    asyncio.run(run())


def test_shutdown_sends_waiters_elsewhere(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened_state(tmp_path) as state:
            await acquire(state, KEY, 1)
            tasks = await parked(state, [acquire(state, KEY, n, wait_seconds=25) for n in range(2, 12)])
            state.leases.stop()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(r) for r in results} == {ShuttingDown}

    asyncio.run(run())


@pytest.mark.embedded
def test_live_holder_is_not_robbed_after_the_server_stood_still(tmp_path: Path) -> None:
    """The server was stopped past the TTL; its waiters run before its tick does."""

    async def run() -> None:
        clock = StoppedClock()
        async with opened_state(tmp_path, clock) as state:
            await acquire(state, KEY, 1)
            await state.leases.heartbeat("default", lease_id(1), HeartbeatRequest())
            clock.value += 60
            state.leases.outage._last_tick -= 60
            assert (await acquire(state, KEY, 2)).state == "busy"
            await state.leases.heartbeat("default", lease_id(1), HeartbeatRequest())
            # An outage is forgiven once: a holder that stays silent is lost after all.
            clock.value += 31
            assert (await acquire(state, KEY, 2)).state == "leased"

    asyncio.run(run())


@pytest.mark.embedded
def test_stop_between_the_look_and_the_takeover_is_noticed(tmp_path: Path) -> None:
    async def run() -> None:
        clock = StoppedClock()
        async with opened_state(tmp_path, clock) as state:
            await acquire(state, KEY, 1)
            await state.leases.heartbeat("default", lease_id(1), HeartbeatRequest())
            plain = state.leases._repo.supersede

            async def stopped_before(*args: Any, **given: Any) -> bool:
                state.leases._repo.supersede = plain  # type: ignore[method-assign]
                state.leases.outage._last_tick -= 60
                return await plain(*args, **given)

            state.leases._repo.supersede = stopped_before  # type: ignore[method-assign]
            clock.value += 31
            assert (await acquire(state, KEY, 2)).state == "busy"

    asyncio.run(run())


@pytest.mark.embedded
def test_holder_is_forgiven_only_once_the_database_is_back(tmp_path: Path) -> None:
    async def run() -> None:
        clock = StoppedClock()
        async with opened_state(tmp_path, clock, busy_seconds=0.1) as state:
            await acquire(state, KEY, 1)
            await state.leases.heartbeat("default", lease_id(1), HeartbeatRequest())
            async with state.database.write():
                clock.value += 60
                with pytest.raises(DatabaseUnavailable):
                    await state.leases.heartbeat("default", lease_id(1), HeartbeatRequest())
                with pytest.raises(DatabaseUnavailable):
                    await acquire(state, KEY, 2)
                # The database's clock was moved by hand; so is the guard's.
                state.leases.outage._fault_since -= 60
            assert (await acquire(state, KEY, 2)).state == "busy"
            await state.leases.heartbeat("default", lease_id(1), HeartbeatRequest())

    asyncio.run(run())


@pytest.mark.embedded
def test_restart_gives_running_holders_another_ttl(tmp_path: Path) -> None:
    """The server was down for 20 minutes in the middle of a compile of 100."""

    async def run() -> None:
        clock = StoppedClock()
        async with opened_state(tmp_path, clock) as state:
            await acquire(state, KEY, 1)
            await state.leases.heartbeat("default", lease_id(1), HeartbeatRequest())
        clock.value += 1200
        state = open_state(server_settings(tmp_path), clock)
        await state.leases.start()
        assert (await acquire(state, KEY, 2)).state == "busy"
        clock.value += 31
        assert (await acquire(state, KEY, 2)).state == "leased"
        await state.database.close()

    asyncio.run(run())


def test_third_transient_failure_of_a_round_exhausts_the_key(tmp_path: Path) -> None:
    """UC-04: all ranks get the same structured error."""

    async def run() -> None:
        clock = StoppedClock()
        async with opened_state(tmp_path, clock) as state:
            for number in (1, 2, 3):
                assert (await acquire(state, KEY, number, host=f"h{number}")).state == "leased"
                answer = await state.leases.fail(
                    "default", lease_id(number), FailRequest(kind="transient", exit_code=137)
                )
            assert answer.failure is not None
            assert answer.failure.kind == "exhausted"
            assert (await acquire(state, KEY, 4, host="h4")).state == "failed"
            clock.value += 61
            assert (await acquire(state, KEY, 4, host="h4")).state == "leased"

    asyncio.run(run())


def test_grant_that_nobody_confirmed_is_no_lost_compile(tmp_path: Path) -> None:
    async def run() -> None:
        clock = StoppedClock()
        async with opened_state(tmp_path, clock) as state:
            for number in range(1, 5):
                assert (await acquire(state, KEY, number)).state == "leased"
                clock.value += 6
            assert rows(tmp_path, "SELECT count(*) FROM failures") == [(0,)]
            await state.leases.heartbeat("default", lease_id(4), HeartbeatRequest())
            clock.value += 31
            assert (await acquire(state, KEY, 5)).state == "leased"
            assert rows(tmp_path, "SELECT transient_count FROM failures") == [(1,)]

    asyncio.run(run())


def test_estimate_comes_from_the_keys_earlier_compile(tmp_path: Path) -> None:
    async def run() -> None:
        clock = StoppedClock()
        async with opened_state(tmp_path, clock) as state:
            await acquire(state, KEY, 1)
            await publish(state, 1, neff("x"))
            async with state.database.write() as db:
                assert await state.entries.remove(db, "default", KEY) is not None
            await acquire(state, KEY, 2)
            clock.value += 4
            answer = await acquire(state, KEY, 3)
            assert (answer.state, answer.eta_seconds) == ("busy", 36.0)

    asyncio.run(run())


def test_two_different_results_of_a_key_are_noted_and_the_first_is_kept(tmp_path: Path) -> None:
    """UC-13: NEFFs carry UUIDs, so they are compared by what is in them."""

    async def run() -> None:
        async with opened_state(tmp_path) as state:
            outcomes = {}
            for number, data in enumerate([neff("one", uuid=bytes(range(16))), neff("two")]):
                key, first, second = f"{number:064x}", 10 * number + 1, 10 * number + 2
                await acquire(state, key, first)
                sha256 = await publish(state, first, neff("one"))
                # A lease and an artifact at once: the key lost its blob, was leased, and another key's upload of the
                # same bytes brought the blob back.
                await state.store.delete("default", sha256)
                await state.blobs._lost("default", sha256)
                assert (await acquire(state, key, second)).state == "leased"
                await acquire(state, "f" * 63 + str(number), 500 + number)
                await upload(state, 500 + number, neff("one"))
                assert (await acquire(state, key, 900)).state == "hit"
                offered = await upload(state, second, data)
                body = PublishRequest(sha256=offered, size=len(data), compile_seconds=1.0)
                answer = await state.publishing.publish("default", lease_id(second), body)
                assert answer.artifact.sha256 == sha256
                assert answer == await state.publishing.publish("default", lease_id(second), body)
                outcomes[number] = answer.outcome
            assert outcomes == {0: "already_present", 1: "nondeterministic"}
            assert rows(tmp_path, "SELECT members FROM differences") == [('["sg00/text"]',)]
            assert (await flushed_stats(state)).nondeterministic == 1

    asyncio.run(run())


@pytest.mark.embedded
def test_counts_survive_a_database_fault(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened_state(tmp_path, busy_seconds=0.1) as state:
            await acquire(state, KEY, 1)
            await publish(state, 1, neff("x"))
            await acquire(state, KEY, 2)
            async with state.database.write():
                with pytest.raises(DatabaseUnavailable):
                    await state.counter.flush()
            assert (await flushed_stats(state)).hits == 1

    asyncio.run(run())


def test_old_leases_are_forgotten_and_epochs_go_on(tmp_path: Path) -> None:
    async def run() -> None:
        clock = StoppedClock()
        async with opened_state(tmp_path, clock) as state:
            first = await acquire(state, KEY, 1)
            await publish(state, 1, neff("x"))
            clock.value += 86401
            async with state.database.write() as db:
                assert await state.leases._repo.purge(db, 86400.0) == 1
            second = await acquire(state, "b" * 64, 2)
            assert first.epoch is not None
            assert second.epoch is not None
            assert second.epoch > first.epoch

    asyncio.run(run())


@pytest.mark.embedded
def test_lease_ids_do_not_reach_error_texts(tmp_path: Path) -> None:
    async def run() -> None:
        settings = migrated(server_settings(tmp_path, busy_seconds=0.1))
        state = open_state(settings)
        blocker = open_state(settings)
        async with blocker.database.write():
            with pytest.raises(DatabaseUnavailable) as caught:
                await state.leases.acquire("default", KEY, request(0xABCDEF), present)
        cause: BaseException | None = caught.value
        while cause is not None:
            assert lease_id(0xABCDEF) not in str(cause)
            cause = cause.__cause__
        for each in (state, blocker):
            await each.database.close()

    asyncio.run(run())
