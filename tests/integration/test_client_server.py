"""Node caches against the real server: how often something is compiled, and what a fault costs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from neffcache_client.api import CacheClient
from neffcache_client.cli.main import main
from neffcache_client.errors import Aborted
from neffcache_client.heartbeat import LeaseView
from neffcache_client.results import Patience
from support.neffs import REAL_VERSION, real_neff
from support.node import KEY, NEFF, Node
from support.rank_process import compiles, finish, start
from support.server import ServerProcess, running_server
from support.waiting import wait_until


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all tests that do it no harm; each uses a namespace of its own."""
    with running_server(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server that may be killed."""
    with running_server(tmp_path / "server") as server:
        yield server


def run_ranks(nodes: list[Node]) -> list[str]:
    """All at once; their verdicts."""
    verdicts: list[str] = []

    def rank(n: int, node: Node) -> None:
        node.private_stem = f"private-{n}"
        verdicts.append(node.obtain(output=f"out{n}.neff").verdict)

    threads = [threading.Thread(target=rank, args=(n, node)) for n, node in enumerate(nodes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    return verdicts


def test_sixty_four_ranks_on_eight_hosts_compile_once(tmp_path: Path, shared_server: ServerProcess) -> None:
    """UC-18."""
    hosts = [start(tmp_path / f"host{n}", shared_server.url, ranks=8, seconds=1.0) for n in range(8)]
    ranks = [rank for host in hosts for rank in finish(host)["ranks"]]
    assert len(ranks) == 64
    assert compiles(tmp_path) == 1
    assert {r["exit_code"] for r in ranks} == {0}
    assert len({r["sha256"] for r in ranks}) == 1
    verdicts = [r["verdict"] for r in ranks]
    assert verdicts.count("compiled") == 1
    assert set(verdicts) <= {"compiled", "waited", "local", "remote"}


def test_a_warm_server_means_no_compile_on_a_fresh_host(tmp_path: Path, shared_server: ServerProcess) -> None:
    """UC-20."""
    first = Node(tmp_path / "a", shared_server.url, NEFFCACHE_NAMESPACE="warm")
    second = Node(tmp_path / "b", shared_server.url, NEFFCACHE_NAMESPACE="warm")
    assert first.obtain().verdict == "compiled"
    got = second.obtain()
    assert (got.verdict, got.saved_seconds, second.compiles) == ("remote", 2.5, 0)
    assert second.output().read_bytes() == NEFF


def test_a_deterministic_failure_answers_every_rank(tmp_path: Path, shared_server: ServerProcess) -> None:
    """UC-02."""
    nodes = [Node(tmp_path / f"h{n}", shared_server.url, NEFFCACHE_NAMESPACE="failing") for n in range(6)]
    for node in nodes:
        node.result = "deterministic"
    assert run_ranks(nodes) == ["failed"] * 6
    assert sum(node.compiles for node in nodes) == 1
    got = Node(tmp_path / "late", shared_server.url, NEFFCACHE_NAMESPACE="failing").obtain()
    assert (got.verdict, got.exit_code) == ("failed", 70)
    assert got.message is not None
    assert "NCC_EOOM001" in got.message
    assert "it went wrong" in got.message
    retried = Node(tmp_path / "retry", shared_server.url, NEFFCACHE_NAMESPACE="failing").obtain(retry_failed=True)
    assert retried.verdict == "compiled"


def test_failures_are_listed_and_cleared_by_the_command_line(
    tmp_path: Path,
    shared_server: ServerProcess,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """UC-02."""
    node = Node(tmp_path / "h", shared_server.url, NEFFCACHE_NAMESPACE="cleared")
    node.result = "deterministic"
    node.obtain()
    monkeypatch.setenv("NEFFCACHE_URL", shared_server.url)
    monkeypatch.setenv("NEFFCACHE_NAMESPACE", "cleared")
    assert main(["failures", "ls"]) == 0
    assert "NCC_EOOM001" in capsys.readouterr().out
    assert main(["failures", "clear", KEY]) == 0
    capsys.readouterr()
    node.result = "ok"
    assert node.obtain().verdict == "compiled"


def test_a_transient_failure_ends_in_the_compilers_own_exit_code_when_all_tries_fail(
    tmp_path: Path, shared_server: ServerProcess
) -> None:
    """UC-04: nobody is left waiting."""
    nodes = [Node(tmp_path / f"h{n}", shared_server.url, NEFFCACHE_NAMESPACE="transient") for n in range(3)]
    for node in nodes:
        node.result = "transient"
    assert run_ranks(nodes) == ["failed"] * 3
    assert sum(node.compiles for node in nodes) <= 3


def test_an_aborted_rank_frees_its_key_for_others(tmp_path: Path, shared_server: ServerProcess) -> None:
    """UC-01: released at once, no TTL passes."""
    first = Node(tmp_path / "a", shared_server.url, NEFFCACHE_NAMESPACE="aborted")
    second = Node(tmp_path / "b", shared_server.url, NEFFCACHE_NAMESPACE="aborted")
    first.on_compile = lambda view: first.abort.set()
    with pytest.raises(Aborted):
        first.obtain()
    assert second.obtain().verdict == "compiled"


def test_a_real_neff_goes_up_and_comes_down_identical(
    tmp_path: Path,
    shared_server: ServerProcess,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = real_neff("matmul_small.neff").read_bytes()
    first = Node(tmp_path / "a", shared_server.url, NEFFCACHE_NAMESPACE="real")
    first.neff = data
    second = Node(tmp_path / "b", shared_server.url, NEFFCACHE_NAMESPACE="real")
    got = first.obtain(expect_version=REAL_VERSION)
    assert (got.verdict, got.reason) == ("compiled", None)
    assert second.obtain().verdict == "remote"
    assert second.output().read_bytes() == data
    monkeypatch.setenv("NEFFCACHE_URL", shared_server.url)
    monkeypatch.setenv("NEFFCACHE_NAMESPACE", "real")
    assert main(["entries", "show", KEY]) == 0
    shown = capsys.readouterr().out
    for text in (REAL_VERSION, "trn2", f"{len(data)} bytes", "recipe"):
        assert text in shown


def test_a_killed_holder_frees_its_key_at_once_on_its_host(tmp_path: Path, shared_server: ServerProcess) -> None:
    """UC-01: five holders in a row are killed, the sixth compile is published."""
    for _ in range(5):
        with start(tmp_path / "host", shared_server.url, seconds=600, key="cd" * 32) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "compiling\n"
            holder.send_signal(signal.SIGKILL)
    with start(tmp_path / "host", shared_server.url, key="cd" * 32) as last:
        assert finish(last)["ranks"][0]["verdict"] == "compiled"
    assert compiles(tmp_path) == 6


def test_without_the_server_every_host_compiles_once_and_push_empties_the_spools(
    tmp_path: Path, server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """UC-10."""
    server.stop()
    hosts = [start(tmp_path / f"host{n}", server.url, ranks=2) for n in range(8)]
    ranks = [rank for host in hosts for rank in finish(host)["ranks"]]
    assert {r["exit_code"] for r in ranks} == {0}
    assert compiles(tmp_path) == 8
    spools = [tmp_path / f"host{n}" / "cache" / "neffcache" / "spool" for n in range(8)]
    assert [len(list(s.glob("*.json"))) for s in spools] == [1] * 8
    server.start()
    monkeypatch.setenv("NEFFCACHE_URL", server.url)
    for n in range(8):
        monkeypatch.setenv("TORCH_NEURONX_NEFF_CACHE_DIR", str(tmp_path / f"host{n}" / "cache"))
        assert main(["push"]) == 0
    told = capsys.readouterr().out
    assert told.count("1 published, 0 already on the server, 0 left") == 1
    assert told.count("0 published, 1 already on the server, 0 left") == 7
    assert [len(list(s.iterdir())) for s in spools] == [0] * 8
    fresh = Node(tmp_path / "fresh", server.url)
    assert fresh.obtain().verdict == "remote"


def test_a_server_killed_during_a_compile_loses_no_result(tmp_path: Path, server: ServerProcess) -> None:
    """The lease survives the restart, and the uploader publishes under it."""
    node = Node(tmp_path / "host", server.url)
    node.on_compile = lambda view: server.kill()
    got = node.obtain()
    assert (got.verdict, got.reason, got.exit_code) == ("compiled", "spooled", 0)
    server.start()
    wait_until(lambda: node.spooled() == 0)
    assert Node(tmp_path / "other", server.url).obtain().verdict == "remote"


def test_waiters_live_through_a_restart_of_the_server(tmp_path: Path, server: ServerProcess) -> None:
    """Nobody compiles a second time because the server was away for a moment."""
    holder, waiter = Node(tmp_path / "a", server.url), Node(tmp_path / "b", server.url, patience=Patience())
    verdicts: list[str] = []
    threads: list[threading.Thread] = []

    def restart(view: LeaseView) -> None:
        other = threading.Thread(target=lambda: verdicts.append(waiter.obtain().verdict))
        other.start()
        threads.append(other)
        wait_until(lambda: any("waiting for" in line for line in waiter.log))
        server.stop()
        server.start()

    holder.on_compile = restart
    assert holder.obtain().verdict == "compiled"
    for thread in threads:
        thread.join(90)
    assert verdicts == ["waited"]
    assert waiter.compiles == 0


def test_a_paused_server_robs_nobody(tmp_path: Path, server: ServerProcess) -> None:
    """SIGSTOP under a live holder: the job goes on without it, the result arrives later, nobody compiles again."""
    node = Node(tmp_path / "host", server.url)
    node.on_compile = lambda view: server.pause()
    got = node.obtain()
    assert (got.verdict, got.reason) == ("compiled", "spooled")
    server.resume()
    wait_until(lambda: node.spooled() == 0)
    other = Node(tmp_path / "other", server.url)
    assert other.obtain().verdict == "remote"
    assert other.compiles == 0


def test_one_publish_that_is_repeated_counts_once(tmp_path: Path, shared_server: ServerProcess) -> None:
    node = Node(tmp_path / "h", shared_server.url, NEFFCACHE_NAMESPACE="repeated")
    real = CacheClient.publish
    calls = []

    def twice(self: CacheClient, lease_id: str, request: object) -> object:
        calls.append(real(self, lease_id, request))  # type: ignore[arg-type]
        return real(self, lease_id, request)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CacheClient, "publish", twice)
        assert node.obtain().reason is None
    with CacheClient(node.settings) as client:
        assert client.stats().publishes == 1
