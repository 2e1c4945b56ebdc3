"""The node cache and a server that is away, for a moment or for long."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from neffcache_client import asker, errand
from neffcache_client.api import CacheClient
from neffcache_client.asker import Asker
from neffcache_client.breaker import Breaker
from neffcache_client.contact import Contact
from neffcache_client.errors import Aborted, ServerDown
from neffcache_client.heartbeat import LeaseView
from neffcache_client.wire import AcquireAnswer
from support.node import KEY, NEFF, QUICK, Node
from support.scripted_server import Reply, ScriptedServer, busy, hit, leased, problem

HIT = hit(hashlib.sha256(NEFF).hexdigest(), len(NEFF), compile_seconds=9.0)
DOWN = problem(503, "down")


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def node(tmp_path: Path, server: ScriptedServer) -> Node:
    return Node(tmp_path / "host", server.url)


@pytest.fixture(autouse=True)
def no_background(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Uploaders in the background have their own tests."""
    started: list[object] = []
    monkeypatch.setattr(errand, "start_in_background", started.append)
    return started


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who compiles alone asks again soon, and may."""
    monkeypatch.setattr(asker, "ASK_SECONDS", 0.05)
    monkeypatch.setattr("neffcache_client.breaker.FIRST_SECONDS", 0.01)


def closed_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{s.getsockname()[1]}"


# While another host compiles


def test_a_waiter_asks_on_through_errors(node: Node, server: ScriptedServer) -> None:
    server.script("acquire", busy(), problem(503, "starting"), Reply(drop=True), HIT)
    server.script("get", Reply(body=NEFF))
    assert node.obtain().verdict == "waited"
    assert node.compiles == 0


def test_a_long_outage_ends_in_a_compile_that_goes_on_asking(node: Node, server: ScriptedServer) -> None:
    server.script("acquire", busy(), *[problem(503, "down") for _ in range(20)])
    got = node.obtain()
    assert (got.verdict, got.reason, got.exit_code) == ("fallback", "server_lost", 0)
    assert node.spooled() == 1


def test_a_neff_that_arrives_during_such_a_compile_is_used(
    node: Node, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neffcache_client.asker.ASK_SECONDS", 0.05)
    server.script("acquire", busy(), *[problem(503, "down") for _ in range(3)], *[HIT for _ in range(9)])
    monkeypatch.setattr("neffcache_client.contact._RETRY_SECONDS", (0.2,))
    server.script("get", Reply(body=NEFF))

    def killed_when_not_needed(view: LeaseView) -> None:
        assert view.not_needed.wait(20)

    node.on_compile = killed_when_not_needed
    node.result = "transient"
    got = node.obtain()
    assert got.verdict == "waited"
    assert node.output().read_bytes() == NEFF


def test_a_waiter_goes_on_saying_what_it_waits_for(
    node: Node, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UC-17: whoever looks at a rank that is late for a collective finds a fresh reason in its log."""
    monkeypatch.setattr("neffcache_client.contact._TELL_SECONDS", 0.0)
    server.script("acquire", *[busy()] * 4, HIT)
    server.script("get", Reply(body=NEFF))
    assert node.obtain().verdict == "waited"
    assert sum("compiled by pid 7 on other-host" in line for line in node.log) == 4


def test_a_waiter_counts_on_no_result_where_one_could_not_be_handed_over(node: Node, server: ScriptedServer) -> None:
    """UC-10: not at once, since the store may be back; then all hosts compile at the same time."""
    server.script("acquire", busy(unshared_seconds=0.1), busy(unshared_seconds=0.6))
    got = node.obtain()
    assert (got.verdict, got.reason, len(server.calls("acquire"))) == ("fallback", "not_shared", 2)
    assert (node.spooled(), len(node.warnings())) == (1, 1)


@pytest.mark.parametrize("why", ["refused", "store", "no-neff"])
def test_a_result_that_cannot_be_handed_over_is_said_before_the_lease_ends(
    node: Node, server: ScriptedServer, why: str
) -> None:
    server.script("acquire", leased())
    if why == "refused":
        server.script("publish", problem(413, "quota"))
    elif why == "store":
        server.script("put", *[problem(507, "full")] * 9)
    else:
        node.neff = b"no container"
    assert node.obtain().exit_code == 0
    ends = [s for s in server.seen if s.call in ("heartbeat", "release")]
    unshared = [i for i, s in enumerate(ends) if s.call == "heartbeat" and s.json["unshared"]]
    assert len(unshared) == 1
    assert [s.call for s in ends[unshared[0] + 1 :] if s.call == "release"] == ["release"] * (why != "store")


def test_a_waiter_whose_lease_was_granted_and_taken_unheard_asks_as_any_other(
    node: Node, server: ScriptedServer
) -> None:
    server.script("acquire", busy(), problem(409, "superseded"), leased())
    assert (node.obtain().verdict, len(server.calls("publish"))) == ("compiled", 1)
    first, second, third = (seen.json["lease_id"] for seen in server.calls("acquire"))
    assert first == second != third


def test_a_server_that_says_so_for_ever_ends_in_a_compile(node: Node, server: ScriptedServer) -> None:
    server.script("acquire", *[busy(), problem(409, "superseded")] * 9)
    assert (node.obtain().reason, node.compiles) == ("refused", 1)


# A server that comes back while this host compiles alone


@pytest.fixture
def hasty(tmp_path: Path, server: ScriptedServer) -> Node:
    """Gives the first contact less than 2 s."""
    return Node(tmp_path / "host", server.url, patience=replace(QUICK, first_contact=0.6))


def away_then(server: ScriptedServer, *replies: Reply) -> None:
    """The first contact finds nobody, what asks during the compile gets `replies`."""
    server.script("acquire", *[DOWN] * 3, *replies)


def until(ready: Callable[[LeaseView], bool]) -> Callable[[LeaseView], None]:
    """A compile that lasts until then."""

    def compiling(view: LeaseView) -> None:
        deadline = time.monotonic() + 30
        while not ready(view):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    return compiling


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("breaker", ["closed", "open"])
def test_a_compile_that_began_alone_is_shared_when_the_server_is_back(
    hasty: Node, server: ScriptedServer, breaker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UC-10, UC-11: whoever asks from then on waits for this host instead of compiling the same graph again."""
    if breaker == "open":
        monkeypatch.setattr("neffcache_client.breaker.FIRST_SECONDS", 1.0)
        server.script("acquire", *[problem(500, "broken")])
        assert hasty.obtain("cd" * 32).verdict == "fallback"
        server.script("acquire", leased())
    else:
        away_then(server, DOWN, leased())
    hasty.on_compile = until(lambda view: bool(server.calls("heartbeat")))
    got = hasty.obtain()
    assert (got.verdict, got.reason, got.exit_code) == ("compiled", None, 0)
    assert [seen.json["factors"] for seen in server.calls("acquire")][-1] == {"recipe": 1}
    assert len(server.calls("publish")) == 1
    assert not [f for f in (hasty.tier / "spool").glob("*.json") if KEY in f.read_text()]


@pytest.mark.usefixtures("soon")
def test_a_compile_that_began_alone_ends_when_another_hosts_neff_is_there(
    hasty: Node, server: ScriptedServer
) -> None:
    away_then(server, busy(), HIT)
    server.script("get", Reply(body=NEFF))
    hasty.on_compile = until(lambda view: view.not_needed.is_set())
    hasty.result = "transient"
    assert (hasty.obtain().exit_code, hasty.output().read_bytes()) == (0, NEFF)


@pytest.mark.usefixtures("soon")
def test_a_failure_of_a_compile_that_began_alone_is_told_to_all(hasty: Node, server: ScriptedServer) -> None:
    away_then(server, leased())
    hasty.on_compile = until(lambda view: bool(server.calls("heartbeat")))
    hasty.result = "deterministic"
    assert (hasty.obtain().exit_code, hasty.compiles) == (70, 1)
    assert server.calls("fail")[0].json["code"] == "NCC_EOOM001"


@pytest.mark.usefixtures("soon")
def test_a_compile_that_began_alone_and_died_is_tried_again_under_a_lease(
    hasty: Node, server: ScriptedServer
) -> None:
    away_then(server, leased(), leased())

    def dies_once(view: LeaseView) -> None:
        until(lambda view: bool(server.calls("heartbeat")))(view)
        hasty.result = "transient" if hasty.compiles == 1 else "ok"

    hasty.on_compile = dies_once
    got = hasty.obtain()
    assert (got.verdict, got.reason, hasty.compiles) == ("compiled", None, 2)
    assert (len(server.calls("fail")), len(server.calls("publish"))) == (1, 1)


@pytest.mark.usefixtures("soon")
def test_an_abort_of_a_compile_that_began_alone_gives_its_lease_back(hasty: Node, server: ScriptedServer) -> None:
    away_then(server, leased())

    def cancelled(view: LeaseView) -> None:
        until(lambda view: bool(server.calls("heartbeat")))(view)
        hasty.abort.set()

    hasty.on_compile = cancelled
    with pytest.raises(Aborted):
        hasty.obtain()
    assert server.calls("release")[-1].path.endswith(server.calls("acquire")[-1].json["lease_id"])


@pytest.mark.usefixtures("soon")
def test_a_lease_that_comes_after_the_compile_is_given_back(
    tmp_path: Path, node: Node, server: ScriptedServer
) -> None:
    """The result is on its way to the spool by then, and nobody would beat for the lease."""
    gate = threading.Event()
    grant = leased()
    grant.gate = gate
    server.script("acquire", grant)
    with CacheClient(node.settings) as client:
        contact = Contact(client, node.settings, KEY, None, abort=node.abort, patience=QUICK, log=node.log.append)
        breaker = Breaker(str(tmp_path / "breaker"), "server")
        asking = Asker(lambda: contact, breaker, LeaseView(), node.log.append)
        server.wait_for("acquire")
        asking.stop()
        assert (asking.leased, asking.may_be_leased) == (False, True)
        gate.set()
        server.wait_for("release")
    assert not server.calls("heartbeat")


def test_a_server_that_restarts_within_the_first_contact_is_no_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UC-10: a refused connection is asked again within the 2 s that a dead server may cost."""
    url = closed_port()
    node = Node(tmp_path / "host", url, patience=replace(QUICK, first_contact=30.0))
    refused = threading.Event()
    acquire = CacheClient.acquire

    def noticed(*args: Any, **kwargs: Any) -> AcquireAnswer:
        try:
            return acquire(*args, **kwargs)
        except ServerDown:
            refused.set()
            raise

    monkeypatch.setattr(CacheClient, "acquire", noticed)
    with ThreadPoolExecutor(1) as threads:
        obtained = threads.submit(node.obtain)
        assert refused.wait(30)
        with ScriptedServer(int(url.rpartition(":")[2])) as server:
            server.script("acquire", HIT)
            server.script("get", Reply(body=NEFF))
            assert obtained.result().verdict == "remote"
    assert not node.warnings()


# A server that stays away


@pytest.mark.parametrize(
    "reply",
    [
        problem(500, "broken"),
        problem(503, "starting"),
        problem(401, "no_token"),
        problem(403, "forbidden"),
        Reply(status=404, body=b"<html>not here</html>"),
        Reply(body=b"<html>login</html>"),
        Reply(body=b'{"state": "hi'),
        Reply({"state": "leased"}),
        Reply({"state": "surprise"}),
        Reply([]),
        Reply(body=b"{}", announce=900),
    ],
    ids=["500", "503", "401", "403", "404", "html", "half", "odd", "unknown", "list", "short"],
)
def test_every_useless_answer_ends_in_a_local_compile_with_one_warning(
    node: Node, server: ScriptedServer, reply: Reply
) -> None:
    """UC-10."""
    server.script("acquire", *[reply] * 12)
    got = node.obtain()
    assert (got.verdict, got.exit_code) == ("fallback", 0)
    assert node.output().read_bytes() == NEFF
    assert len(node.warnings()) == 1
    asked = len(server.calls("acquire"))
    again = node.obtain("cd" * 32)
    assert again.reason == "breaker_open"
    assert len(server.calls("acquire")) == asked, "the breaker is open: nobody asks"
    assert len(node.warnings()) == 1
    assert node.spooled() == 2


def test_a_replica_that_stops_sends_a_newcomer_to_the_next(node: Node, server: ScriptedServer) -> None:
    """A rolling upgrade is no outage: the same question again, within the 2 s of the first contact."""
    server.script("acquire", problem(503, "shutting_down"), Reply(status=503, body=b"<html>no server"), HIT)
    server.script("get", Reply(body=NEFF))
    assert node.obtain().verdict == "remote"
    assert len({seen.json["lease_id"] for seen in server.calls("acquire")}) == 1
    assert node.warnings() == []


def test_a_refused_connection_ends_in_a_local_compile(tmp_path: Path) -> None:
    """UC-10."""
    node = Node(tmp_path / "host", closed_port())
    got = node.obtain()
    assert (got.verdict, got.reason, got.exit_code) == ("fallback", "unreachable", 0)
    assert node.spooled() == 1
    assert node.obtain(output="again").verdict == "local"


def test_a_dns_look_up_that_hangs_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """UC-10."""
    gate = threading.Event()

    def hang(*args: object, **kwargs: object) -> list[object]:
        gate.wait(30)
        raise socket.gaierror("no")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    node = Node(tmp_path / "host", "http://cache.invalid:8765", patience=replace(QUICK, first_contact=0.3))
    began = time.monotonic()
    assert node.obtain().reason == "unreachable"
    assert time.monotonic() - began < 15, "the look-up itself takes 30 s"
    gate.set()


def test_a_server_that_accepts_and_says_nothing_is_bounded(tmp_path: Path) -> None:
    """UC-10: a stopped server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        node = Node(tmp_path / "host", url, patience=replace(QUICK, first_contact=0.3))
        assert node.obtain().reason == "unreachable"


def test_a_lost_answer_is_asked_for_again_under_the_same_lease_id(node: Node, server: ScriptedServer) -> None:
    server.script("acquire", Reply(drop=True), leased())
    assert node.obtain().verdict == "compiled"
    first, second = (s.json["lease_id"] for s in server.calls("acquire"))
    assert first == second


def test_a_lost_publish_answer_is_repeated(node: Node, server: ScriptedServer) -> None:
    server.script("acquire", leased())
    server.script("publish", Reply(drop=True))
    got = node.obtain()
    assert (got.verdict, got.reason) == ("compiled", None)
    assert len(server.calls("publish")) == 2
    assert node.spooled() == 0


def test_a_server_lost_at_publish_costs_no_result(
    node: Node, server: ScriptedServer, no_background: list[object]
) -> None:
    server.script("acquire", leased())
    server.script("publish", *[problem(503, "down") for _ in range(9)])
    got = node.obtain()
    assert (got.verdict, got.reason, got.exit_code) == ("compiled", "spooled", 0)
    assert node.spooled() == 1
    assert len(no_background) == 2, "one look after the first contact, one for the interrupted publish"
    assert server.calls("release") == []


def test_a_refused_publish_is_said_once_and_costs_no_result(node: Node, server: ScriptedServer) -> None:
    """UC-23."""
    server.script("acquire", leased(), leased())
    server.script("upload", problem(403, "read_only"), problem(403, "read_only"))
    assert node.obtain().reason == "publish_refused"
    assert node.obtain("cd" * 32).exit_code == 0
    (warning,) = node.warnings()
    assert "403" in warning


def test_a_failure_that_cannot_be_reported_is_still_a_failure(node: Node, server: ScriptedServer) -> None:
    server.script("acquire", leased())
    server.script("fail", problem(500, "broken"))
    node.result = "transient"
    got = node.obtain()
    assert (got.verdict, got.exit_code, node.compiles) == ("failed", 70, 1)
