"""Garbage collection, on both back ends: what goes, what stays, and who does not notice."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from neffcache_client.cli.main import main
from neffcache_client.wire import HeartbeatRequest, PublishRequest
from neffcache_server.database.models import blobs, entries
from neffcache_server.gc import collector
from neffcache_server.gc.collector import Collector
from neffcache_server.gc.loop import collect_if_due
from neffcache_server.gc.policy import Policy, Report
from neffcache_server.problems import BlobUnknown, StorageUnavailable
from neffcache_server.settings import ServerSettings
from neffcache_server.state import State
from neffcache_server.storage.base import BlobNotFound
from sqlalchemy import insert, select, update
from support import backends
from support.cache_state import StoppedClock, acquire, lease_id, migrated, neff, opened_state, upload

pytestmark = pytest.mark.usefixtures("backend")

POLICY = Policy(grace_seconds=0.0)
GRACE = 100.0
KEYS = [f"{n:064x}" for n in range(1, 40)]


@asynccontextmanager
async def cache(folder: Path, clock: StoppedClock | None = None, **given: Any) -> AsyncIterator[State]:
    async with opened_state(folder, clock, **given) as state:
        yield state


async def publish(state: State, number: int, *, text: str | None = None) -> str:
    """A published entry under KEYS[number]; its digest."""
    key = KEYS[number]
    assert (await acquire(state, key, number + 1)).state == "leased"
    data = neff(text or key)
    sha256 = await upload(state, number + 1, data)
    request = PublishRequest(sha256=sha256, size=len(data), compile_seconds=1.0)
    await state.publishing.publish("default", lease_id(number + 1), request)
    return sha256


async def collect(state: State, policy: Policy = POLICY, **given: Any) -> Report:
    return await Collector(state.database, state.store, policy, **given).run()


async def left(state: State) -> list[int]:
    """Which of KEYS are served."""
    async with state.database.read() as db:
        present = await state.entries.present(db, "default", KEYS)
    return sorted(KEYS.index(key) for key in present)


async def held(state: State, sha256: str) -> bool:
    """The store has the bytes."""
    try:
        await state.store.size("default", sha256)
    except BlobNotFound:
        return False
    return True


async def hit(state: State, number: int) -> None:
    assert (await acquire(state, KEYS[number], 1000 + number)).state == "hit"
    await state.counter.flush()


def run(test: Any) -> None:
    asyncio.run(test)


def test_nothing_goes_without_a_policy(tmp_path: Path) -> None:
    async def check() -> None:
        async with cache(tmp_path) as state:
            sha256 = await publish(state, 0)
            report = await collect(state)
            assert not report.anything
            assert await left(state) == [0]
            assert await held(state, sha256)

    run(check())


def test_least_recently_used_go_until_the_namespace_fits(tmp_path: Path) -> None:
    """UC-30: by last hit, pinned ones stay, and no more goes than must."""

    async def check() -> None:
        clock = StoppedClock()
        async with cache(tmp_path, clock) as state:
            digests = []
            for number in range(6):
                clock.value += 10
                digests.append(await publish(state, number))
            for number in (0, 2):
                clock.value += 10
                await hit(state, number)
            async with state.database.write() as db:
                assert await state.entries.pin(db, "default", KEYS[1], True)
            clock.value += 10
            size = len(neff(KEYS[0]))
            report = await collect(state, replace(POLICY, max_bytes=3 * size + 10))
            # Used in the order 1 (pinned), 3, 4, 5, 0, 2.
            assert await left(state) == [0, 1, 2]
            assert report.entries["size"].number == 3
            clock.value += 10
            assert (await collect(state)).blobs.number == 3
            assert [await held(state, d) for d in digests] == [True, True, True, False, False, False]

    run(check())


@pytest.mark.parametrize(
    ("policy", "reason", "stay"),
    [
        ({"age_seconds": 45.0}, "age", [2, 3]),
        ({"unused_seconds": 45.0}, "unused", [0, 2, 3]),
        ({"compilers": ("2.26.*",)}, "compiler", []),
        ({"compilers": ("2.25.*",)}, "", [0, 1, 2, 3]),
    ],
)
def test_rules_by_age_use_and_compiler(tmp_path: Path, policy: dict[str, Any], reason: str, stay: list[int]) -> None:
    async def check() -> None:
        clock = StoppedClock()
        async with cache(tmp_path, clock) as state:
            for number in range(4):
                clock.value += 20
                await publish(state, number)
            clock.value += 5
            await hit(state, 0)
            clock.value += 1
            planned = await collect(state, replace(POLICY, **policy), dry_run=True)
            assert await left(state) == [0, 1, 2, 3]
            report = await collect(state, replace(POLICY, **policy))
            assert await left(state) == stay
            gone = {reason: 4 - len(stay)} if reason else {}
            assert {r: n.number for r, n in report.entries.items()} == gone
            assert {r: n.number for r, n in planned.entries.items()} == gone

    run(check())


def test_bytes_stay_for_the_grace_after_their_last_entry(tmp_path: Path) -> None:
    """A rank that was just told where the bytes are must still get them; the next one is not told any more."""

    async def check() -> None:
        clock = StoppedClock()
        policy = Policy(compilers=("*",), grace_seconds=GRACE)
        async with cache(tmp_path, clock) as state:
            sha256 = await publish(state, 0)
            clock.value += GRACE - 1
            assert not (await collect(state, policy)).entries
            clock.value += 2
            report = await collect(state, policy)
            assert report.entries["compiler"].number == 1
            assert (report.blobs.number, report.waiting.number) == (0, 1)
            reader = await state.blobs.open("default", sha256)
            await reader.close()
            assert (await acquire(state, KEYS[0], 50)).state == "leased"
            clock.value += GRACE - 1
            assert not (await collect(state, policy)).blobs.number
            clock.value += 2
            assert (await collect(state, policy)).blobs.number == 1
            assert not await held(state, sha256)
            with pytest.raises(BlobUnknown):
                await state.blobs.open("default", sha256)

    run(check())


@pytest.mark.parametrize("published", [False, True])
def test_marked_bytes_that_are_uploaded_again_stay(tmp_path: Path, published: bool) -> None:
    async def check() -> None:
        clock = StoppedClock()
        policy = Policy(compilers=("*",), grace_seconds=GRACE)
        async with cache(tmp_path, clock) as state:
            sha256 = await publish(state, 0)
            clock.value += GRACE + 1
            assert (await collect(state, policy)).waiting.number == 1
            # The same result is uploaded under a lease that runs while the next collection comes.
            assert (await acquire(state, KEYS[1], 2)).state == "leased"
            data = neff(KEYS[0])
            assert await upload(state, 2, data) == sha256
            assert (await collect(state, policy)).waiting.number == 0
            if published:
                request = PublishRequest(sha256=sha256, size=len(data), compile_seconds=1.0)
                await state.publishing.publish("default", lease_id(2), request)
            clock.value += GRACE + 1
            if not published:
                await state.leases.heartbeat("default", lease_id(2), HeartbeatRequest())
            assert not (await collect(state, replace(policy, compilers=()))).blobs.number
            assert await held(state, sha256)

    run(check())


def test_shared_bytes_go_with_their_last_entry(tmp_path: Path) -> None:
    async def check() -> None:
        clock = StoppedClock()
        async with cache(tmp_path, clock) as state:
            sha256 = await publish(state, 0, text="same")
            clock.value += 10
            assert await publish(state, 1, text="same") == sha256
            await collect(state, replace(POLICY, age_seconds=5))
            assert await left(state) == [1]
            clock.value += 10
            await collect(state)
            assert await held(state, sha256)
            await collect(state, replace(POLICY, age_seconds=5))
            clock.value += 1
            await collect(state)
            assert not await held(state, sha256)

    run(check())


def test_bytes_that_were_never_published_go(tmp_path: Path) -> None:
    """`neffcache doctor` and superseded leases leave blobs without an entry."""

    async def check() -> None:
        clock = StoppedClock()
        async with cache(tmp_path, clock) as state:
            assert (await acquire(state, KEYS[0], 1)).state == "leased"
            sha256 = await upload(state, 1, neff("never published"))
            for _ in range(2):
                clock.value += 1
                await collect(state)
            assert await held(state, sha256), "its lease still runs"
            await state.leases.release("default", lease_id(1))
            for _ in range(2):
                clock.value += 1
                await collect(state)
            assert not await held(state, sha256)

    run(check())


def test_orphans_go_when_they_are_old_and_nothing_else_does(tmp_path: Path, backend: backends.Embedded) -> None:
    async def check() -> None:
        async with cache(tmp_path) as state:
            await publish(state, 0)
            await put(state, tmp_path, "orphan")
            foreign = await foreign_object(tmp_path, backend)
            young = await collect(state, replace(POLICY, grace_seconds=3600.0))
            assert young.orphans.number == 0
            planned = await collect(state, replace(POLICY, grace_seconds=-60.0), dry_run=True)
            assert planned.orphans.number == 1
            report = await collect(state, replace(POLICY, grace_seconds=-60.0))
            assert report.orphans.number == 1
            assert await left(state) == [0]
            assert await foreign() is True

    run(check())


async def put(state: State, folder: Path, text: str) -> str:
    """Bytes in the store that no row knows."""
    data = neff(text)
    sha256 = hashlib.sha256(data).hexdigest()
    file = state.store.staging / "to-be-put"
    file.write_bytes(data)
    await state.store.put("default", sha256, file)
    return sha256


async def foreign_object(folder: Path, backend: backends.Embedded) -> Any:
    """Something of somebody else's beside our blobs; returns whether it is still there."""
    if not isinstance(backend, backends.Production):
        file = folder / "blobs" / "default" / "aa" / "README"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")

        async def there() -> bool:
            return file.exists()

        return there
    client = backend.s3.client()
    name = {"Bucket": backends.BUCKET, "Key": f"{backend.prefix(folder)}/default/README"}
    client.put_object(**name, Body=b"mine")

    async def in_bucket() -> bool:
        return int(client.head_object(**name)["ContentLength"]) == 4

    return in_bucket


def test_a_wrong_database_does_not_empty_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "_BELIEVABLE_ORPHANS", 2)

    async def check() -> None:
        async with cache(tmp_path) as state:
            digests = [await put(state, tmp_path, f"orphan {n}") for n in range(3)]
            report = await collect(state, replace(POLICY, grace_seconds=-60.0))
            assert (report.spared_orphans, report.orphans.number) == (3, 0)
            assert all([await held(state, d) for d in digests])
            report = await collect(state, replace(POLICY, grace_seconds=-60.0), all_orphans=True)
            assert (report.spared_orphans, report.orphans.number) == (0, 3)

    run(check())


def test_abandoned_uploads_go_after_a_day(tmp_path: Path) -> None:
    async def check() -> None:
        async with cache(tmp_path) as state:
            old, new = state.store.staging / "old", state.store.staging / "new"
            old.write_bytes(b"x" * 10)
            new.write_bytes(b"y")
            os.utime(old, (time.time() - 90000,) * 2)
            assert (await collect(state, dry_run=True)).abandoned.bytes == 10
            assert old.exists()
            assert (await collect(state)).abandoned.number == 1
            assert (old.exists(), new.exists()) == (False, True)

    run(check())


def test_killed_between_object_and_row_is_made_good_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        clock = StoppedClock()
        async with cache(tmp_path, clock) as state:
            sha256 = await publish(state, 0)
            clock.value += 1
            await collect(state, replace(POLICY, compilers=("*",)))
            clock.value += 1
            delete = state.store.delete

            async def killed(namespace: str, digest: str) -> None:
                await delete(namespace, digest)
                raise StorageUnavailable("gone")

            monkeypatch.setattr(type(state.store), "delete", lambda _self, *a: killed(*a))
            with pytest.raises(StorageUnavailable):
                await collect(state)
            monkeypatch.undo()
            async with state.database.read() as db:
                assert len((await db.execute(select(blobs.c.sha256))).all()) == 1
            assert (await collect(state)).blobs.number == 1
            assert await publish(state, 1, text=KEYS[0]) == sha256
            assert await left(state) == [1]

    run(check())


def test_a_store_that_hangs_does_not_keep_rows_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "_DELETE_SECONDS", 0.05)

    async def check() -> None:
        clock = StoppedClock()
        async with cache(tmp_path, clock) as state:
            sha256 = await publish(state, 0)
            clock.value += 1
            await collect(state, replace(POLICY, compilers=("*",)))
            clock.value += 1
            gate = asyncio.Event()

            async def hangs(*_: Any) -> None:
                await gate.wait()

            monkeypatch.setattr(type(state.store), "delete", hangs)
            with pytest.raises(StorageUnavailable):
                await collect(state)
            gate.set()
            monkeypatch.undo()
            assert (await acquire(state, KEYS[1], 30)).state == "leased"
            assert await held(state, sha256)
            assert (await collect(state)).blobs.number == 1

    run(check())


def test_one_replica_collects_at_a_time(tmp_path: Path) -> None:
    async def check() -> None:
        clock = StoppedClock()
        async with cache(tmp_path, clock, gc_interval_seconds=100) as state:
            both = await asyncio.gather(
                *(collect_if_due(state.database, state.store, state.settings) for _ in range(3))
            )
            assert sum(report is not None for report in both) == 1
            clock.value += 99
            assert await collect_if_due(state.database, state.store, state.settings) is None
            clock.value += 2
            assert await collect_if_due(state.database, state.store, state.settings) is not None

    run(check())


def test_a_replica_that_died_while_collecting_holds_nobody_up_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        clock = StoppedClock()
        async with cache(tmp_path, clock) as state:

            async def dies(*_: Any) -> None:
                raise KeyboardInterrupt

            monkeypatch.setattr(collector.Collector, "run", dies)
            with pytest.raises(KeyboardInterrupt):
                await collect_if_due(state.database, state.store, state.settings)
            monkeypatch.undo()
            clock.value += 7200
            assert await collect_if_due(state.database, state.store, state.settings) is not None

    run(check())


def test_collecting_many_entries_holds_up_no_hit(tmp_path: Path) -> None:
    """Every transaction is small: a hit that comes in the middle waits for one of them at most."""

    async def check() -> None:
        number = 1_000 if backends.current().shared else 3_000
        async with cache(tmp_path) as state:
            await publish(state, 0)
            await many(state, number)
            collecting = asyncio.create_task(collect(state, replace(POLICY, compilers=("9.*",))))
            hits = 0
            slowest = 0.0
            while not collecting.done():
                began = time.monotonic()
                answer = await acquire(state, KEYS[0], 5000 + hits)
                slowest = max(slowest, time.monotonic() - began)
                assert answer.state == "hit"
                hits += 1
                await asyncio.sleep(0)
            report = await collecting
            assert report.entries["compiler"].number == number
            assert await left(state) == [0]
            # Removals take 200 at a time: had one transaction held everybody up, few hits would have got through.
            assert hits > number // 200
            assert slowest < 2.0

    run(check())


async def many(state: State, number: int) -> None:
    """Entries of a compiler 9.0 by the shortest way."""
    row = {"namespace": "default", "state": "present", "size": 1000, "compiler_version": "9.0", "created_at": 1.0}
    digests = [hashlib.sha256(str(n).encode()).hexdigest() for n in range(number)]
    for start in range(0, number, 1000):
        part = digests[start : start + 1000]
        async with state.database.write() as db:
            await db.execute(insert(entries), [{**row, "key": d, "sha256": d} for d in part])
            blob = {"namespace": "default", "size": 1000, "stored_at": 1.0}
            await db.execute(insert(blobs), [{**blob, "sha256": d} for d in part])


def test_quarantined_entry_is_not_served_and_its_next_compile_replaces_it(tmp_path: Path) -> None:
    async def check() -> None:
        async with cache(tmp_path) as state:
            await publish(state, 0, text="poisoned")
            async with state.database.write() as db:
                assert await state.entries.quarantine(db, "default", KEYS[0])
                assert not await state.entries.quarantine(db, "default", KEYS[1])
            assert await left(state) == []
            assert (await acquire(state, KEYS[0], 77)).state == "leased"
            data = neff("good")
            sha256 = await upload(state, 77, data)
            request = PublishRequest(sha256=sha256, size=len(data), compile_seconds=1.0)
            answer = await state.publishing.publish("default", lease_id(77), request)
            assert (answer.outcome, answer.artifact.sha256) == ("published", sha256)

    run(check())


def test_gc_command(
    tmp_path: Path, backend: backends.Embedded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = migrated(ServerSettings(data_dir=tmp_path, **backend.settings(tmp_path)))
    monkeypatch.setenv("NEFFCACHE_SERVER_DATA_DIR", str(tmp_path))
    for name, value in backends.environment(tmp_path).items():
        monkeypatch.setenv(name, value)

    async def fill() -> None:
        async with opened(settings) as state:
            for number in range(3):
                await publish(state, number)
            async with state.database.write() as db:
                await db.execute(update(entries).where(entries.c.key == KEYS[0]).values(created_at=1.0))

    run(fill())
    assert main(["gc", "--older", "1d", "--dry-run"]) == 0
    assert "would remove 1 entries" in capsys.readouterr().out
    assert main(["gc", "--older", "1d", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["entries"]["age"]["number"] == 1
    assert report["waiting"]["number"] == 1
    assert main(["gc"]) == 0
    assert "nothing to remove\n1 blobs" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["gc", "--older", "yesterday"])
    backend.release(tmp_path)


@asynccontextmanager
async def opened(settings: ServerSettings) -> AsyncIterator[State]:
    from neffcache_server.app import open_state

    state = open_state(settings)
    try:
        yield state
    finally:
        state.leases.stop()
        await state.database.close()
