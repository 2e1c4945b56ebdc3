"""A server that restarts under ranks which ask, compile and wait. Rows of docs/failure-modes.md."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from neffcache_client.api import CacheClient
from neffcache_client.heartbeat import LeaseView
from support.node import KEY, NEFF, QUICK, Node
from support.server import ServerProcess, running_server
from support.waiting import wait_until

HASTY = replace(QUICK, first_contact=0.3)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with running_server(tmp_path / "server") as server:
        yield server


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who compiles alone asks often, so that no test has to wait for it."""
    monkeypatch.setattr("neffcache_client.asker.ASK_SECONDS", 0.1)
    monkeypatch.setattr("neffcache_client.breaker.OPEN_SECONDS", 0.2)


def holders(server: ServerProcess, node: Node) -> list[str]:
    """Hosts that hold a lease."""
    with CacheClient(node.settings) as client:
        return [lease.holder.host for lease in client.live().leases]


def test_server_restarts_before_a_question(tmp_path: Path, server: ServerProcess) -> None:
    """UC-10"""
    node = Node(tmp_path / "host", server.url, patience=replace(QUICK, first_contact=60.0))
    server.kill()
    with ThreadPoolExecutor(1) as threads:
        obtained = threads.submit(node.obtain)
        server.start()
        assert (obtained.result().verdict, obtained.result().reason) == ("compiled", None)
    assert (node.compiles, node.warnings(), node.spooled()) == (1, [], 0)


def test_server_back_while_a_host_compiles_alone(tmp_path: Path, server: ServerProcess) -> None:
    """UC-10, UC-11: others wait for the compile that began without the server, and it is published."""
    alone = Node(tmp_path / "alone", server.url, patience=HASTY)
    late = Node(tmp_path / "late", server.url)
    finish = threading.Event()
    alone.on_compile = lambda view: wait_until(finish.is_set)
    server.kill()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(alone.obtain)
        wait_until(lambda: alone.compiles == 1)
        server.start()
        wait_until(lambda: bool(holders(server, late)), what="the compile under way gets a lease")
        second = threads.submit(late.obtain)
        wait_until(lambda: any("waiting for" in line for line in late.log) or second.done())
        finish.set()
        assert (first.result().verdict, first.result().reason) == ("compiled", None)
        assert (second.result().verdict, late.compiles) == ("waited", 0)
    assert (alone.spooled(), len(alone.warnings())) == (0, 1)


def test_server_back_while_two_hosts_compile_alone(tmp_path: Path, server: ServerProcess) -> None:
    """UC-10: the first result ends the other compile."""
    hosts = [Node(tmp_path / name, server.url, patience=HASTY) for name in ("one", "two")]
    finish = threading.Event()

    def shares(node: Node) -> bool:
        return any("server is back" in line for line in node.log)

    def compiling(node: Node) -> None:
        def until_done(view: LeaseView) -> None:
            wait_until(lambda: view.not_needed.is_set() or (finish.is_set() and shares(node)))
            node.result = "transient" if view.not_needed.is_set() else "ok"

        node.on_compile = until_done

    for node in hosts:
        compiling(node)
    server.kill()
    with ThreadPoolExecutor(2) as threads:
        obtained = [threads.submit(node.obtain) for node in hosts]
        wait_until(lambda: all(node.compiles == 1 for node in hosts))
        server.start()
        wait_until(lambda: any(shares(node) for node in hosts))
        finish.set()
        verdicts = sorted(one.result().verdict for one in obtained)
    assert verdicts == ["compiled", "remote"]
    assert [node.output().read_bytes() for node in hosts] == [NEFF, NEFF]
    with CacheClient(hosts[0].settings) as client:
        assert client.stats().publishes == 1
        assert client.entry(KEY).state == "present"
