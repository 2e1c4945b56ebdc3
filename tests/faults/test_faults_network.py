"""Faults between a rank and its server, injected by a proxy in front of a real one. Rows of docs/failure-modes.md.

With S3 a rank's NEFFs go past the server: a second proxy stands in front of the bucket, and presigned URLs name it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from neffcache_client import api, transfer
from neffcache_client.api import CacheClient
from neffcache_client.node_cache import Obtained
from neffcache_client.uploader import drain
from support.backends import Embedded, Production
from support.neffs import neff_of_size
from support.node import NEFF, QUICK, VERSION, Node
from support.proxy import Fault, Proxy
from support.server import ServerProcess, running_server
from support.waiting import wait_until

OTHER = "cd" * 32
LARGE = neff_of_size(300_000, version=VERSION)
Make = Callable[..., Node]


@pytest.fixture(scope="module")
def store_door(backend: Embedded) -> Iterator[Proxy | None]:
    """What ranks know the bucket by, where there is one."""
    if not isinstance(backend, Production):
        yield None
        return
    with Proxy(backend.s3.endpoint) as door:
        yield door


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, store_door: Proxy | None) -> Iterator[ServerProcess]:
    env = {"NEFFCACHE_SERVER_S3_PUBLIC_ENDPOINT_URL": store_door.url} if store_door else {}
    with running_server(tmp_path_factory.mktemp("server"), env=env) as server:
        yield server


@pytest.fixture
def proxy(server: ServerProcess) -> Iterator[Proxy]:
    with Proxy(server.url) as proxy:
        yield proxy


@pytest.fixture
def way(proxy: Proxy, store_door: Proxy | None) -> Iterator[Proxy]:
    """The way of the bytes: the calls `put` and `get` that carry a NEFF pass here."""
    one = store_door or proxy
    one.calls.clear()
    yield one
    one.faults = []


no_server = pytest.mark.one_backend("the server is not reached, or answers nothing of its own")


@pytest.fixture
def make(tmp_path: Path, request: pytest.FixtureRequest) -> Make:
    """Nodes, each on a host of its own, in a namespace of this test's own."""
    name = f"ns-{abs(hash(request.node.nodeid)):x}"

    def node(url: str, folder: str = "host", **more: object) -> Node:
        made = Node(tmp_path / folder, url, NEFFCACHE_NAMESPACE=name, **more)  # type: ignore[arg-type]
        made.neff = LARGE
        return made

    return node


def answer(status: str, body: bytes, *headers: str) -> bytes:
    """A raw answer."""
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", "connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def compiles_alone(node: Node, reason: str) -> None:
    """What every fault of a server comes to: the NEFF, one warning, a spooled copy, and nothing more is asked."""
    got = node.obtain()
    assert (got.verdict, got.reason, got.exit_code) == ("fallback", reason, 0)
    assert node.output().read_bytes() == node.neff
    assert (node.compiles, node.spooled()) == (1, 1)
    assert len(node.warnings()) == 1
    assert node.obtain(OTHER, output="other.neff").reason == "breaker_open"
    assert len(node.warnings()) == 1


def publish(make: Make, server: ServerProcess) -> None:
    """Another host has compiled it."""
    assert make(server.url, "publisher").obtain().reason is None


# The server cannot be used at all


@no_server
def test_connection_refused(make: Make) -> None:
    """UC-10"""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    compiles_alone(make(f"http://127.0.0.1:{port}"), "unreachable")


@no_server
def test_name_unknown(make: Make) -> None:
    """UC-10"""
    compiles_alone(make("http://no-such-host.invalid:8765"), "unreachable")


@no_server
def test_tls_error(make: Make, server: ServerProcess) -> None:
    """UC-10: a server without TLS behind an https address."""
    compiles_alone(make(server.url.replace("http:", "https:")), "unreachable")


@no_server
def test_server_takes_the_question_and_hangs(make: Make, server: ServerProcess) -> None:
    """UC-10: a stopped server; the kernel takes connections for it. It costs the host the first answer's patience."""
    server.pause()
    try:
        compiles_alone(make(server.url, patience=replace(QUICK, first_answer=0.5)), "unreachable")
    finally:
        server.resume()


@no_server
def test_server_without_a_free_place_for_a_connection(make: Make) -> None:
    """UC-10: packets vanish. A full backlog stands for a firewall that drops."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        others = [socket.socket() for _ in range(3)]
        for other in others:
            other.setblocking(False)
            other.connect_ex(full.getsockname())
        compiles_alone(make(f"http://127.0.0.1:{full.getsockname()[1]}", patience=QUICK), "unreachable")
        for other in others:
            other.close()


@no_server
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        pytest.param(answer("401 Unauthorized", b""), "not_allowed", id="401"),
        pytest.param(answer("403 Forbidden", b"<html>", "content-type: text/html"), "not_allowed", id="403"),
        pytest.param(answer("404 Not Found", b"<Error><Code>NoSuchBucket</Code>"), "unreachable", id="404"),
        pytest.param(answer("429 Too Many Requests", b"{}"), "unreachable", id="429"),
        pytest.param(answer("500 Internal Server Error", b"{}"), "unreachable", id="500"),
        pytest.param(answer("502 Bad Gateway", b"<html>"), "unreachable", id="502"),
        pytest.param(answer("503 Service Unavailable", b'{"code": "shutting_down"}'), "unreachable", id="503"),
        pytest.param(answer("302 Found", b"", "location: http://login.invalid/"), "unreachable", id="login-page"),
        pytest.param(answer("200 OK", b"<html>welcome</html>"), "unreachable", id="html"),
        pytest.param(answer("200 OK", b'{"state": "hit"}'), "unreachable", id="half-a-hit"),
        pytest.param(answer("200 OK", b'{"state": "lea')[:-4], "unreachable", id="half-a-body"),
        pytest.param(b"SSH-2.0-OpenSSH_9.2\r\n", "unreachable", id="another-protocol"),
    ],
)
def test_useless_answer(make: Make, proxy: Proxy, data: bytes, reason: str) -> None:
    """UC-10"""
    proxy.faults = [Fault("acquire", "answer", data=data)]
    compiles_alone(make(proxy.url), reason)


@no_server
def test_strict_makes_a_fault_an_error(make: Make, proxy: Proxy) -> None:
    """UC-10"""
    proxy.faults = [Fault("acquire", "answer", data=answer("500 Internal Server Error", b"{}"))]
    got = make(proxy.url, NEFFCACHE_STRICT="1").obtain()
    assert (got.verdict, got.exit_code) == ("failed", 75)
    assert "NEFFCACHE_STRICT=1" in (got.message or "")


def test_server_comes_back(make: Make, proxy: Proxy, server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """UC-10: after the breaker's time one rank asks, and what was compiled meanwhile goes up in the background."""
    monkeypatch.setattr("neffcache_client.breaker.OPEN_SECONDS", 0.2)
    proxy.faults = [Fault("acquire", "answer", times=1, data=answer("500 Internal Server Error", b"{}"))]
    node = make(proxy.url)
    assert node.obtain().reason == "unreachable"
    keys = (f"{n:064x}" for n in range(1000))
    wait_until(lambda: node.obtain(next(keys), output="other.neff").verdict != "fallback")
    wait_until(lambda: node.spooled() == 0, what="the spool is emptied by whoever runs next")
    assert make(server.url, "late").obtain().verdict == "remote"


# The network is bad


def test_slow_network(make: Make, proxy: Proxy, way: Proxy) -> None:
    """Half a second on every answer: slower, and nothing else."""
    proxy.faults = way.faults = [Fault("any", "delay", seconds=0.5)]
    node = make(proxy.url, patience=replace(QUICK, publish=30.0))
    assert (node.obtain().reason, node.warnings()) == (None, [])


@pytest.mark.parametrize("call", ["acquire", "heartbeat", "upload", "put", "publish"])
def test_lost_answer(make: Make, proxy: Proxy, way: Proxy, server: ServerProcess, call: str) -> None:
    """The server acted and nobody heard of it: the same question again is the same question."""
    proxy.faults = way.faults = [Fault(call, "drop", times=1)]
    node = make(proxy.url, patience=replace(QUICK, publish=30.0))
    node.on_compile = lambda view: wait_until(lambda: "heartbeat" in proxy.calls)
    assert (node.obtain().reason, node.compiles, node.warnings()) == (None, 1, [])
    assert proxy.happened() == 1
    late = make(server.url, "late")
    assert (late.obtain().verdict, late.compiles) == ("remote", 0)


def test_every_answer_lost_once(make: Make, proxy: Proxy, way: Proxy) -> None:
    calls = ("acquire", "heartbeat", "upload", "put", "publish", "get", "summary", "release")
    # Of a download by presigned URL the redirect is lost, or the bytes: a fetch is tried twice.
    proxy.faults = way.faults = [Fault(call, "drop", times=1) for call in calls]
    node = make(proxy.url, patience=replace(QUICK, publish=30.0))
    assert (node.obtain().reason, node.compiles) == (None, 1)
    late = make(proxy.url, "late")
    assert (late.obtain().verdict, late.compiles) == ("remote", 0)
    with CacheClient(node.settings) as client:
        assert client.stats().publishes == 1


def test_lost_answer_to_a_failure(make: Make, proxy: Proxy, server: ServerProcess) -> None:
    """A failure that could not be reported is still this rank's failure, and the lease runs out."""
    proxy.faults = [Fault("fail", "drop")]
    node = make(proxy.url)
    node.result = "deterministic"
    assert (node.obtain().exit_code, node.compiles) == (70, 1)


def test_heartbeats_lost(make: Make, proxy: Proxy, server: ServerProcess) -> None:
    """An expired lease that nobody took still publishes."""
    proxy.faults = [Fault("heartbeat", "drop")]
    node = make(proxy.url)
    node.on_compile = lambda view: wait_until(lambda: proxy.calls.count("heartbeat") >= 3)
    assert (node.obtain().reason, node.warnings()) == (None, [])
    assert make(server.url, "late").obtain().verdict == "remote"


def test_connections_break_under_waiters(make: Make, proxy: Proxy, server: ServerProcess) -> None:
    """UC-18: a waiter asks on; nobody else starts to compile."""
    finish = threading.Event()
    holder, waiter = make(server.url, "holder"), make(proxy.url, "waiter", patience=replace(QUICK, outage=60.0))
    holder.on_compile = lambda view: (finish.wait(60), None)[1]
    results: list[Obtained] = []
    first = threading.Thread(target=holder.obtain)
    first.start()
    wait_until(lambda: holder.compiles == 1)
    second = threading.Thread(target=lambda: results.append(waiter.obtain()))
    second.start()
    for n in range(2, 5):
        wait_until(lambda n=n: proxy.calls.count("acquire") >= n)
        proxy.break_connections()
    wait_until(lambda: proxy.calls.count("acquire") >= 5)
    finish.set()
    first.join(60)
    second.join(60)
    assert [r.verdict for r in results] == ["waited"]
    assert (holder.compiles, waiter.compiles) == (1, 0)


@pytest.mark.one_backend("what the client learns of a connection that was cut between it and the server")
def test_load_balancer_cuts_silent_connections(make: Make, proxy: Proxy, server: ServerProcess) -> None:
    """UC-18: a waiter that is cut off every three seconds learns to ask for less, and does not compile."""
    finish = threading.Event()
    holder, waiter = make(server.url, "holder"), make(proxy.url, "waiter", patience=replace(QUICK, outage=5.0))
    holder.on_compile = lambda view: (finish.wait(60), None)[1]
    results: list[Obtained] = []
    threads = [threading.Thread(target=holder.obtain)]
    threads[0].start()
    wait_until(lambda: holder.compiles == 1)
    proxy.idle_seconds = 2.5
    threads.append(threading.Thread(target=lambda: results.append(waiter.obtain())))
    threads[1].start()
    wait_until(lambda: proxy.cut >= 1 and proxy.calls.count("acquire") >= 7, seconds=60)
    finish.set()
    for thread in threads:
        thread.join(60)
    assert ([r.verdict for r in results], waiter.compiles) == (["waited"], 0)
    assert proxy.cut == 1


def test_server_lost_for_long_under_a_waiter(make: Make, proxy: Proxy, server: ServerProcess) -> None:
    """After the patience for outages the waiter compiles, and goes on asking meanwhile."""
    finish = threading.Event()
    holder = make(server.url, "holder")
    holder.on_compile = lambda view: (finish.wait(60), None)[1]
    first = threading.Thread(target=holder.obtain)
    first.start()
    wait_until(lambda: holder.compiles == 1)
    waiter = make(proxy.url, "waiter", patience=replace(QUICK, outage=0.5))
    proxy.faults = [Fault("acquire", "answer", times=0, data=answer("503 Service Unavailable", b"{}"))]
    waits = len(proxy.calls)

    def cut() -> None:
        wait_until(lambda: len(proxy.calls) > waits and any("compiled by pid" in line for line in waiter.log))
        proxy.faults[0].times = 1_000_000
        proxy.break_connections()

    cutter = threading.Thread(target=cut)
    cutter.start()
    got = waiter.obtain()
    cutter.join(60)
    finish.set()
    first.join(60)
    assert (got.verdict, got.reason, got.exit_code, waiter.compiles) == ("fallback", "server_lost", 0, 1)


# Downloads


@pytest.mark.parametrize("kind", ["truncate", "damage", "drop", "stall"])
def test_download_spoiled_once(
    make: Make, proxy: Proxy, way: Proxy, server: ServerProcess, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UC-11: fetched again, and nothing is compiled."""
    monkeypatch.setattr(api, "STALL_SECONDS", 0.5)
    publish(make, server)
    way.faults = [Fault("get", kind, times=1, at=100_000)]  # type: ignore[arg-type]
    node = make(proxy.url)
    assert (node.obtain().verdict, node.compiles) == ("remote", 0)
    assert node.output().read_bytes() == LARGE
    assert way.calls.count("get") == 2


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("truncate", "download_failed"),
        ("damage", "corrupt"),
        ("stall", "download_failed"),
        ("drop", "download_failed"),
    ],
)
def test_download_spoiled_for_good(
    make: Make,
    proxy: Proxy,
    way: Proxy,
    server: ServerProcess,
    kind: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """UC-11: compiled here; the server's copy is looked at and found sound, so it stays."""
    monkeypatch.setattr(api, "STALL_SECONDS", 0.5)
    publish(make, server)
    way.faults = [Fault("get", kind, at=100_000)]  # type: ignore[arg-type]
    node = make(proxy.url)
    got = node.obtain()
    assert (got.verdict, got.reason, got.exit_code, node.compiles) == ("fallback", reason, 0, 1)
    assert len(node.warnings()) == 1
    assert proxy.calls.count("report") == (kind == "damage")
    way.faults.clear()
    assert make(server.url, "late").obtain().verdict == "remote"


@pytest.mark.parametrize("data", [answer("200 OK", b""), answer("200 OK", NEFF)], ids=["empty", "another-neff"])
def test_download_of_something_else(make: Make, proxy: Proxy, way: Proxy, server: ServerProcess, data: bytes) -> None:
    """UC-11: a cache between us and the server that answers for it."""
    publish(make, server)
    way.faults = [Fault("get", "answer", data=data)]
    node = make(proxy.url)
    got = node.obtain()
    assert (got.verdict, got.reason, node.compiles) == ("fallback", "corrupt", 1)
    assert node.output().read_bytes() == LARGE


def test_download_slower_than_a_compile(
    make: Make, proxy: Proxy, way: Proxy, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UC-21: a link that never stalls and never ends."""
    monkeypatch.setattr(transfer, "MIN_SECONDS", 0.5)
    monkeypatch.setattr(transfer, "UNKNOWN_COMPILE_SECONDS", 5.0)
    publish(make, server)
    way.faults = [Fault("get", "trickle", seconds=0.001)]
    node = make(proxy.url)
    got = node.obtain()
    assert (got.verdict, got.reason, node.compiles) == ("fallback", "download_slow", 1)
    assert way.calls.count("get") == 1


def test_slow_download_that_beats_a_compile(make: Make, proxy: Proxy, way: Proxy, server: ServerProcess) -> None:
    """UC-21: nobody compiles during a fetch that is quicker."""
    publish(make, server)
    way.faults = [Fault("get", "delay", seconds=2.0)]
    node = make(proxy.url)
    assert (node.obtain().verdict, node.compiles) == ("remote", 0)


# Uploads


@pytest.mark.parametrize("kind", ["cut_request", "damage_request"])
def test_upload_spoiled_once(make: Make, proxy: Proxy, way: Proxy, server: ServerProcess, kind: str) -> None:
    """The server takes only what is whole and right; the client knows that its file is, and sends it again."""
    way.faults = [Fault("put", kind, times=1, at=100_000)]  # type: ignore[arg-type]
    node = make(proxy.url, patience=replace(QUICK, publish=30.0))
    assert (node.obtain().reason, node.compiles, node.warnings()) == (None, 1, [])
    assert way.calls.count("put") == 2
    assert make(server.url, "late").obtain().verdict == "remote"


@pytest.mark.parametrize("kind", ["cut_request", "damage_request"])
def test_upload_spoiled_for_good(make: Make, proxy: Proxy, way: Proxy, server: ServerProcess, kind: str) -> None:
    """UC-23: the rank has its NEFF and one warning; the copy waits for a better network."""
    way.faults = [Fault("put", kind, at=100_000)]  # type: ignore[arg-type]
    node = make(proxy.url)
    got = node.obtain()
    assert (got.verdict, got.reason, got.exit_code, len(node.warnings())) == ("compiled", "spooled", 0, 1)
    way.faults.clear()
    with CacheClient(node.settings) as client:
        wait_until(lambda: node.spooled() == 0 or drain(node.settings, client, say=print).published)
    assert make(server.url, "late").obtain().verdict == "remote"


@no_server
def test_write_refused(make: Make, proxy: Proxy, server: ServerProcess) -> None:
    """UC-23: a token that may read only; one warning with the server's reason."""
    data = b'{"title": "Not allowed", "status": 403, "code": "not_allowed", "detail": "the token may only read"}'
    proxy.faults = [Fault("upload", "answer", data=answer("403 Forbidden", data))]
    node = make(proxy.url)
    got = node.obtain()
    assert (got.verdict, got.reason, got.exit_code) == ("compiled", "publish_refused", 0)
    assert [w for w in node.warnings() if "the token may only read" in w]
    assert len(node.warnings()) == 1
