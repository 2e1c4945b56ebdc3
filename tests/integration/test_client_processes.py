"""Hosts as real processes: what a kill, an outage or a crowd does."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.node import NEFF, Node
from support.rank_process import compiles, finish, start
from support.scripted_server import Reply, ScriptedServer, busy, leased


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


def closed_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{s.getsockname()[1]}"


def test_a_killed_leader_is_superseded_by_its_own_host(tmp_path: Path, server: ScriptedServer) -> None:
    """UC-01: no TTL passes, the server is told whose lease is void."""
    server.script("acquire", leased(), leased())
    with start(tmp_path / "host", server.url, seconds=600) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "compiling\n"
        with start(tmp_path / "host", server.url) as second:
            first.send_signal(signal.SIGKILL)
            report = finish(second)
    assert report["ranks"][0]["verdict"] == "compiled"
    dead, next_one = (s.json for s in server.calls("acquire"))
    assert next_one["supersedes"] == dead["lease_id"]
    assert next_one["lease_id"] != dead["lease_id"]


def test_a_waiter_past_the_lock_hears_of_the_leaders_death_too(tmp_path: Path, server: ScriptedServer) -> None:
    """The lock comes while the server is being asked: the question is asked anew, with the dead lease in it."""
    gate = threading.Event()
    server.script("acquire", leased(), busy(), Reply(busy().json, gate=gate), leased())
    with start(tmp_path / "host", server.url, seconds=600) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "compiling\n"
        node = Node(tmp_path / "host", server.url)

        def kill_when_waiting() -> None:
            server.wait_for("acquire", 3)
            first.send_signal(signal.SIGKILL)

        killer = threading.Thread(target=kill_when_waiting)
        killer.start()
        assert node.obtain().verdict == "compiled"
        killer.join()
    gate.set()
    asked = [s.json for s in server.calls("acquire")]
    assert asked[-1]["supersedes"] == asked[0]["lease_id"]


def test_eight_hosts_without_a_server_compile_eight_times_and_spool(tmp_path: Path) -> None:
    url = closed_port()
    hosts = [start(tmp_path / f"host{n}", url, ranks=4) for n in range(8)]
    reports = [finish(h) for h in hosts]
    ranks = [r for report in reports for r in report["ranks"]]
    assert len(ranks) == 32
    assert {r["exit_code"] for r in ranks} == {0}
    assert len({r["sha256"] for r in ranks}) == 1
    assert compiles(tmp_path) == 8
    assert [r["verdict"] for r in ranks].count("fallback") == 8
    assert len(list(tmp_path.glob("host*/cache/neffcache/spool/*.json"))) == 8
    assert all(p.read_bytes() == NEFF for p in tmp_path.glob("host*/cache/neffcache/spool/*.neff"))
