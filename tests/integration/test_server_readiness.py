"""What `/readyz` makes of a store that is away: for a while nothing, then a replica that takes no requests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import httpx
import pytest
from neffcache_client.api import CacheClient
from neffcache_server.health import store_health
from neffcache_server.health.store_health import StoreHealth
from neffcache_server.problems import StorageUnavailable
from neffcache_server.storage.base import BlobStore
from support.node import Node
from support.server import running_server


class Store:
    """A store that works, fails or hangs, as `state` says."""

    def __init__(self, state: str = "works") -> None:
        self.state = state
        self.checks = 0
        self.answer = asyncio.Event()

    async def check(self) -> None:
        self.checks += 1
        if self.state == "hangs":
            await self.answer.wait()
        if self.state == "fails":
            raise StorageUnavailable("the store failed, said the test")


def health_of(store: Store, tolerated: float = 60.0) -> StoreHealth:
    return StoreHealth(cast(BlobStore, store), tolerated)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of the module under test; a test sets its only element."""
    shown = [1000.0]
    monkeypatch.setattr(store_health, "monotonic", lambda: shown[0])
    return shown


def test_store_is_tolerated_away_for_a_while_and_no_longer(now: list[float]) -> None:
    async def run() -> None:
        store = Store()
        health = health_of(store)
        assert await health.trouble() is None
        # Measured from the first probe that failed: nobody may have asked for long.
        now[0] += 500
        store.state = "fails"
        assert await health.trouble() == "the store failed, said the test"
        now[0] += 59
        assert await health.trouble() is not None
        now[0] += 1
        with pytest.raises(StorageUnavailable, match="said the test"):
            await health.trouble()
        store.state = "works"
        assert await health.trouble() is None
        store.state = "fails"
        assert await health.trouble() is not None

    asyncio.run(run())


def test_replica_whose_store_never_worked_is_not_ready(now: list[float]) -> None:
    async def run() -> None:
        with pytest.raises(StorageUnavailable):
            await health_of(Store("fails")).trouble()

    asyncio.run(run())


def test_hung_store_holds_up_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each probe would keep one of the few connections to the store, and proxies give up after a second."""
    monkeypatch.setattr(store_health, "_PROBE_SECONDS", 0.05)

    async def run() -> None:
        store = Store()
        health = health_of(store)
        await health.trouble()
        store.state = "hangs"
        answers = await asyncio.gather(*(health.trouble() for _ in range(20)))
        assert {"does not answer" in (answer or "") for answer in answers} == {True}
        for _ in range(3):
            await health.trouble()
        # One before, and at most one that runs and one that is joined.
        assert store.checks <= 3
        store.state = "works"
        store.answer.set()
        assert await health.trouble() is None

    asyncio.run(run())


def test_not_tolerated_at_all(tmp_path: Path) -> None:
    """Over HTTP: `NEFFCACHE_SERVER_STORE_OUTAGE_SECONDS=0` gives the 503 at once, and /livez is not touched by it."""
    with running_server(tmp_path, env={"NEFFCACHE_SERVER_STORE_OUTAGE_SECONDS": "0"}) as server:
        assert httpx.get(f"{server.url}/readyz").json() == {"status": "ready"}
        staging = server.data_dir / "blobs" / ".staging"
        staging.rename(tmp_path / "elsewhere")
        answer = httpx.get(f"{server.url}/readyz")
        assert (answer.status_code, answer.json()["code"]) == (503, "storage_unavailable")
        assert httpx.get(f"{server.url}/livez").status_code == 200


def test_client_is_told_what_ails_a_ready_server(tmp_path: Path) -> None:
    """Which is what `neffcache doctor` reports."""
    with (
        running_server(tmp_path / "server") as server,
        CacheClient(Node(tmp_path / "x", server.url).settings) as client,
    ):
        assert client.ready() is None
        (server.data_dir / "blobs" / ".staging").rename(tmp_path / "elsewhere")
        assert "is gone" in (client.ready() or "")
