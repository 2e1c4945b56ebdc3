"""Two replicas on one PostgreSQL and one bucket behind HAProxy, 64 launchers on one graph, and what may go wrong."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.compilers import FakeCompiler
from support.deployment import Deployment, running_deployment
from support.launchers import Done, Host, Started
from support.postgres import Postgres
from support.s3 import S3
from support.waiting import wait_until

pytestmark = pytest.mark.slow

HOSTS = 8
RANKS = 64
OUTAGE_SECONDS = 20.0


@pytest.fixture
def deployment(tmp_path: Path, postgres: Postgres, s3: S3) -> Iterator[Deployment]:
    with running_deployment(tmp_path / "deployment", postgres, s3) as running:
        yield running


class Fleet:
    """64 launchers on 8 hosts that want the same graph; one of them compiles until `release`."""

    def __init__(self, folder: Path, url: str) -> None:
        self._gate = folder / "gate"
        self.compiler = FakeCompiler(folder / "compilers", gate=self._gate, neff_bytes=200_000)
        self.hosts = [Host(folder / f"host{n}", self.compiler, url) for n in range(HOSTS)]
        self._started: list[Started] = []

    def start(self) -> None:
        """Start all, and return when one compiles and the leaders of the other hosts are waiting for it."""
        self._started = [self.hosts[n % HOSTS].start() for n in range(RANKS)]
        wait_until(lambda: self.compiler.started == 1, what="somebody compiles")
        waits = "compiled by pid"
        wait_until(lambda: sum(waits in host.log() for host in self.hosts) == HOSTS - 1, seconds=60)

    def release(self) -> None:
        """Let the compiler end."""
        self._gate.touch()

    def finish(self) -> list[Done]:
        return [started.finish() for started in self._started]


def _all_well(fleet: Fleet, results: list[Done]) -> None:
    assert [r.exit_code for r in results] == [0] * RANKS
    assert [r.stderr for r in results] == [b""] * RANKS
    assert fleet.compiler.runs == 1
    assert len({r.output for r in results}) == 1
    assert results[0].output


def test_sixty_four_launchers_compile_once(tmp_path: Path, deployment: Deployment, s3: S3) -> None:
    """UC-18. The bytes come from the store, and nothing of ours goes there."""
    before = len(s3.seen())
    fleet = Fleet(tmp_path, deployment.url)
    fleet.start()
    fleet.release()
    _all_well(fleet, fleet.finish())
    by_ranks = [seen for seen in s3.seen()[before:] if seen.agent == "neffcache"]
    assert [seen.method for seen in by_ranks].count("PUT") == 1
    assert [seen.method for seen in by_ranks].count("GET") == HOSTS - 1
    assert {(seen.authorization, seen.ours) for seen in by_ranks} == {("", "")}
    assert deployment.rows("SELECT count(*) FROM leases WHERE status = 'live'") == [(0,)]


def test_replica_killed_under_its_waiters(tmp_path: Path, deployment: Deployment) -> None:
    """Its waiters, and maybe the holder's heartbeats, go on with the other."""
    fleet = Fleet(tmp_path, deployment.url)
    fleet.start()
    deployment.replicas[0].kill()
    fleet.release()
    _all_well(fleet, fleet.finish())


def test_replica_stopped_under_its_waiters(tmp_path: Path, deployment: Deployment) -> None:
    """As in a rolling upgrade: it sends them away and ends at once."""
    fleet = Fleet(tmp_path, deployment.url)
    fleet.start()
    assert deployment.replicas[0].stop() == 0
    fleet.release()
    _all_well(fleet, fleet.finish())


def test_postgres_restarted_under_a_compile(tmp_path: Path, deployment: Deployment, postgres: Postgres) -> None:
    fleet = Fleet(tmp_path, deployment.url)
    fleet.start()
    postgres.stop(signal.SIGQUIT)
    postgres.start()
    fleet.release()
    _all_well(fleet, fleet.finish())


def test_store_gone_around_the_publish(tmp_path: Path, deployment: Deployment, s3: S3) -> None:
    """UC-15. For 20 s: the result is spooled and sent under its lease later, the waiters wait on, none compiles."""
    fleet = Fleet(tmp_path, deployment.url)
    fleet.start()
    with s3.refusing():
        fleet.release()
        ends = time.monotonic() + OUTAGE_SECONDS
        wait_until(lambda: [seen.status for seen in s3.seen()].count(503) >= 3, what="somebody wanted the store")
        while time.monotonic() < ends:
            # The proxy asks this every second, and would send all waiters away.
            assert [httpx.get(f"{r.url}/readyz", timeout=5).status_code for r in deployment.replicas] == [200, 200]
            time.sleep(1.0)
    results = fleet.finish()
    assert [r.exit_code for r in results] == [0] * RANKS
    assert all(r.output for r in results)
    # A busy machine may be slow enough for the lease to run out: then one more host compiles, and nobody fails.
    assert fleet.compiler.runs <= 2
    wait_until(lambda: deployment.rows("SELECT state FROM entries") == [("present",)], what="published in the end")
