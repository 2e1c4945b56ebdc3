"""Faults of the server, its store and its database, embedded and in production. Rows of docs/failure-modes.md."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from neffcache_client.api import CacheClient
from neffcache_client.uploader import drain
from support.backends import Embedded, Production
from support.mounts import full_folder, need_mounts
from support.neffs import make_neff
from support.node import QUICK, Node
from support.proxy import Fault, Proxy
from support.server import ServerProcess, running_server
from support.waiting import wait_until

FAULTY = str(Path(__file__).resolve().parents[1] / "support" / "faulty_server.py")
PATIENT = replace(QUICK, first_answer=10.0, publish=60.0, outage=60.0)
OTHER = "cd" * 32
SHORT = {"NEFFCACHE_SERVER_TTL_SECONDS": "2", "NEFFCACHE_SERVER_PROVISIONAL_SECONDS": "2"}


@pytest.fixture(autouse=True)
def state_of_one_test(backend: Embedded) -> Iterator[None]:
    """Each test runs on both backends; the next one may have the database of the last."""
    yield
    backend.release_all()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with running_server(tmp_path / "server") as server:
        yield server


def blob(server: ServerProcess, backend: Embedded) -> str:
    """The digest of the only blob in the store."""
    (sha256,) = backend.blobs(server.data_dir)
    return sha256


def push(node: Node) -> None:
    """As `neffcache push`, until nothing waits."""
    with CacheClient(node.settings) as client:
        wait_until(lambda: node.spooled() == 0 or drain(node.settings, client, say=print).published)


def void(value: object) -> None:
    """For a lambda that is to return nothing."""


FOLDER, S3 = pytest.mark.embedded, pytest.mark.production
STEPS = [
    # Through the server into a folder
    ("blobs.service:BlobService.authorise", "before", "before the upload is allowed", FOLDER),
    ("storage.folder:FolderStore.put", "before", "uploaded, not stored", FOLDER),
    ("storage.folder:FolderStore.put", "after", "stored, no row", FOLDER),
    ("blobs.service:BlobService.receive", "after", "row committed, not answered", FOLDER),
    ("leases.publish:PublishService.publish", "before", "publish asked for", FOLDER),
    ("kit.hub:LocalHub.announce", "before", "committed, nobody told", FOLDER),
    # By presigned URL into a bucket
    ("blobs.presigned:PresignedUploads.issue", "after", "ticket committed, not answered", S3),
    ("blobs.presigned:PresignedUploads.accept", "before", "object stored, not looked at", S3),
    ("blobs.presigned:PresignedUploads.accept", "after", "row committed, lease goes on", S3),
    ("kit.notify_hub:NotifyHub.announce", "before", "committed, no replica told", S3),
    # Both
    ("blobs.repository:BlobRepository.put", "after", "row not committed", ()),
    ("leases.repository:LeaseRepository.end", "after", "lease ended, no artifact", ()),
    ("leases.repository:LeaseRepository.put_artifact", "after", "artifact, not committed", ()),
    ("leases.publish:PublishService.publish", "after", "told, not answered", ()),
]


@pytest.mark.parametrize(
    ("where", "when"), [pytest.param(where, when, id=id, marks=marks) for where, when, id, marks in STEPS]
)
def test_server_killed_between_two_steps_of_a_publish(tmp_path: Path, where: str, when: str) -> None:
    """UC-15: one compile, one artifact, whatever the step; the lease lives through the restart."""
    # The grant of the lease is announced first.
    count = 2 if "announce" in where else 1
    spec = f"neffcache_server.{where}:{when}:kill:{count}"
    with running_server(tmp_path / "server", program=(FAULTY, spec)) as server:
        server.program = ("-m", "neffcache_server")
        node = Node(tmp_path / "host", server.url, patience=PATIENT)
        results = []
        rank = threading.Thread(target=lambda: results.append(node.obtain()))
        rank.start()
        wait_until(lambda: server.died, what="the server is killed")
        server.kill()
        server.start()
        rank.join(90)
        assert [(r.verdict, r.reason, r.exit_code) for r in results] == [("compiled", None, 0)]
        late = Node(tmp_path / "late", server.url, patience=PATIENT)
        assert (late.obtain().verdict, late.compiles, node.compiles) == ("remote", 0, 1)
        assert late.output().read_bytes() == node.output().read_bytes()
        with CacheClient(node.settings) as client:
            assert client.stats().publishes == 1


@pytest.mark.parametrize("count", [0, 1])
def test_store_that_cannot_write(tmp_path: Path, backend: Embedded, count: int) -> None:
    """UC-15: the first try, or every one, is answered 503; no row is made. The rank has its NEFF."""
    # With S3, the server's word on an upload that went past it.
    method = "s3:S3Store.inspect" if backend.shared else "folder:FolderStore.put"
    spec = f"neffcache_server.storage.{method}:before:error:{count}"
    with running_server(tmp_path / "server", program=(FAULTY, spec)) as server:
        node = Node(tmp_path / "host", server.url, patience=replace(QUICK, publish=30.0 if count else 0.3))
        got = node.obtain()
        assert (got.verdict, got.reason, got.exit_code) == ("compiled", None if count else "spooled", 0)
        with CacheClient(node.settings) as client:
            assert client.stats().entries == count
        server.program = ("-m", "neffcache_server")
        server.stop()
        server.start()
        push(node)
        assert Node(tmp_path / "late", server.url).obtain().verdict == "remote"


def test_store_that_takes_nothing_while_hosts_wait(tmp_path: Path, backend: Embedded) -> None:
    """UC-10, UC-15: they compile side by side, and not one after the other in the hope for the next one's result."""
    method = "s3:S3Store.inspect" if backend.shared else "folder:FolderStore.put"
    spec = f"neffcache_server.storage.{method}:before:error:0"
    hasty = replace(QUICK, first_answer=10.0, poll=0.3, outage=1.0)
    with running_server(tmp_path / "server", program=(FAULTY, spec)) as server, ThreadPoolExecutor(3) as threads:
        hosts = [Node(tmp_path / f"host{n}", server.url, patience=hasty) for n in range(3)]
        waiting = threading.Event()
        hosts[0].on_compile = lambda view: wait_until(waiting.is_set)
        side_by_side = threading.Barrier(2)
        for host in hosts[1:]:
            host.on_compile = lambda view: void(side_by_side.wait(60))
        first = threads.submit(hosts[0].obtain)
        wait_until(lambda: hosts[0].compiles == 1)
        others = [threads.submit(host.obtain) for host in hosts[1:]]
        wait_until(lambda: all(any("waiting for" in line for line in host.log) for host in hosts[1:]))
        waiting.set()
        assert (first.result().verdict, first.result().reason) == ("compiled", "spooled")
        assert [(o.result().verdict, o.result().reason) for o in others] == [("fallback", "not_shared")] * 2
    assert [host.spooled() for host in hosts] == [1, 1, 1]


@pytest.mark.production
@pytest.mark.parametrize("times", [1, 1_000_000], ids=["once", "always"])
def test_bucket_refuses_the_upload_of_a_rank(tmp_path: Path, backend: Production, times: int) -> None:
    """UC-15: throttled, or for good: published at the second try, or kept; no row without an object."""
    data = b"HTTP/1.1 503 Slow Down\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    with (
        Proxy(backend.s3.endpoint, Fault("put", "answer", times=times, data=data)) as door,
        running_server(tmp_path / "server", env={"NEFFCACHE_SERVER_S3_PUBLIC_ENDPOINT_URL": door.url}) as server,
    ):
        node = Node(tmp_path / "host", server.url, patience=replace(QUICK, publish=30.0 if times == 1 else 0.3))
        got = node.obtain()
        assert (got.verdict, got.reason) == ("compiled", None if times == 1 else "spooled")
        assert len(backend.blobs(server.data_dir)) == (times == 1)
        door.faults.clear()
        push(node)
        assert Node(tmp_path / "late", server.url).obtain().verdict == "remote"


@pytest.mark.production
def test_bucket_full(tmp_path: Path, backend: Production, server: ServerProcess) -> None:
    """507 to every write, reads go on: hits are served, a new NEFF is kept on its host until there is room."""
    assert Node(tmp_path / "first", server.url).obtain().reason is None
    with backend.s3.full():
        assert Node(tmp_path / "reader", server.url).obtain().verdict == "remote"
        node = Node(tmp_path / "host", server.url)
        got = node.obtain(OTHER)
        assert (got.verdict, got.reason, got.exit_code, node.spooled()) == ("compiled", "spooled", 0, 1)
        assert len(node.warnings()) == 1
    push(node)
    late = Node(tmp_path / "late", server.url)
    assert (late.obtain(OTHER).verdict, late.compiles) == ("remote", 0)


def test_store_that_cannot_be_read(tmp_path: Path, backend: Embedded) -> None:
    """A fault of the store is a fault and no missing blob: the entry stays, this rank compiles for itself."""
    method = "s3:S3Store.download_url" if backend.shared else "folder:FolderStore.open"
    spec = f"neffcache_server.storage.{method}:before:error:0"
    with running_server(tmp_path / "server", program=(FAULTY, spec)) as server:
        assert Node(tmp_path / "first", server.url).obtain().reason is None
        other = Node(tmp_path / "other", server.url)
        got = other.obtain()
        assert (got.verdict, got.reason, got.exit_code) == ("fallback", "download_failed", 0)
        server.program = ("-m", "neffcache_server")
        server.stop()
        server.start()
        assert Node(tmp_path / "late", server.url).obtain().verdict == "remote"


@pytest.mark.production
def test_bucket_away_under_a_hit(tmp_path: Path, backend: Production, server: ServerProcess) -> None:
    """A real outage: nothing is marked as missing, and the hit is back with the bucket."""
    assert Node(tmp_path / "first", server.url).obtain().reason is None
    with backend.s3.refusing():
        other = Node(tmp_path / "other", server.url)
        got = other.obtain()
        assert (got.verdict, got.reason, got.exit_code) == ("fallback", "download_failed", 0)
        assert len(other.warnings()) == 1
        with CacheClient(other.settings) as client:
            assert [e.state for e in client.entries().entries] == ["present"]
    assert Node(tmp_path / "late", server.url).obtain().verdict == "remote"


def test_blob_deleted_behind_our_back(tmp_path: Path, backend: Embedded, server: ServerProcess) -> None:
    """UC-15: 404 before any byte; the next rank that asks compiles, and its upload heals the key."""
    first = Node(tmp_path / "first", server.url)
    assert first.obtain().reason is None
    sha256 = blob(server, backend)
    backend.remove_blob(server.data_dir, "default", sha256)
    url = f"{server.url}/v1/ns/default/blobs/{sha256}"
    answer = httpx.get(url)
    assert (answer.status_code, answer.json()["code"]) == (404, "blob_missing")
    healer = Node(tmp_path / "healer", server.url)
    assert (healer.obtain().verdict, healer.compiles, healer.warnings()) == ("compiled", 1, [])
    assert Node(tmp_path / "late", server.url).obtain().verdict == "remote"
    assert httpx.get(url, follow_redirects=True).status_code == 200


def test_blob_damaged_in_the_store(tmp_path: Path, backend: Embedded, server: ServerProcess) -> None:
    """UC-11: the client's report makes the server look, withdraw it, and lease the key again."""
    assert Node(tmp_path / "first", server.url).obtain().reason is None
    sha256 = blob(server, backend)
    data = bytearray(backend.read_blob(server.data_dir, "default", sha256))
    data[len(data) // 2] ^= 1
    backend.replace_blob(server.data_dir, "default", sha256, bytes(data))
    finder = Node(tmp_path / "finder", server.url)
    got = finder.obtain()
    assert (got.verdict, got.reason, finder.compiles) == ("compiled", None, 1)
    assert finder.output().read_bytes() == finder.neff
    late = Node(tmp_path / "late", server.url)
    assert (late.obtain().verdict, late.compiles) == ("remote", 0)
    with CacheClient(finder.settings) as client:
        assert client.report_damage(sha256).verdict == "sound"
        assert [e.state for e in client.entries().entries] == ["present"]


def test_blob_damaged_while_its_compiler_makes_other_bytes(
    tmp_path: Path, backend: Embedded, server: ServerProcess
) -> None:
    """A quarantined artifact is replaced by the next publish, also a different one."""
    assert Node(tmp_path / "first", server.url).obtain().reason is None
    sha256 = blob(server, backend)
    data = backend.read_blob(server.data_dir, "default", sha256)
    backend.replace_blob(server.data_dir, "default", sha256, data[:-1] + b"\1")
    with CacheClient(Node(tmp_path / "x", server.url).settings) as client:
        assert client.report_damage(sha256).verdict == "quarantined"
        assert [e.state for e in client.entries().entries] == ["quarantined"]
    finder = Node(tmp_path / "finder", server.url)
    finder.neff = make_neff(payload=b"another build of it")
    assert finder.obtain().reason is None
    late = Node(tmp_path / "late", server.url)
    assert late.obtain().verdict == "remote"
    assert late.output().read_bytes() == finder.neff


def test_server_paused_under_holders_and_waiters(tmp_path: Path) -> None:
    """UC-01: stopped for several TTLs with five graphs under way; nobody is robbed, compiles = graphs."""
    graphs, pause = 5, 6.0
    with running_server(tmp_path / "server", env=SHORT) as server:
        done = threading.Event()
        nodes = [Node(tmp_path / f"{n}-{m}", server.url, patience=PATIENT) for n in range(graphs) for m in range(2)]
        for node in nodes:
            node.on_compile = lambda view: (done.wait(60), None)[1]
        results: list[str] = []

        def rank(n: int) -> None:
            results.append(nodes[n].obtain(f"{n // 2:064x}").verdict)

        threads = [threading.Thread(target=rank, args=(n,)) for n in range(len(nodes))]
        for thread in threads:
            thread.start()
        wait_until(lambda: sum(any("waiting for" in line for line in node.log) for node in nodes) == graphs)
        server.pause()
        threading.Event().wait(pause)
        server.resume()
        wait_until(lambda: httpx.get(f"{server.url}/readyz").status_code == 200)
        done.set()
        for thread in threads:
            thread.join(90)
        assert sorted(results) == ["compiled"] * graphs + ["waited"] * graphs
        assert sum(node.compiles for node in nodes) == graphs


def test_server_restarted_under_a_holder_and_a_waiter(tmp_path: Path) -> None:
    """SIGKILL, down for longer than a TTL: the lease goes on, the waiter gets the NEFF."""
    with running_server(tmp_path / "server", env=SHORT) as server:
        back = threading.Event()
        holder, waiter = (Node(tmp_path / n, server.url, patience=PATIENT) for n in ("holder", "waiter"))
        holder.on_compile = lambda view: (back.wait(60), None)[1]
        verdicts: dict[str, str] = {}
        threads = [
            threading.Thread(target=lambda n=n, node=node: verdicts.update({n: node.obtain().verdict}))
            for n, node in (("holder", holder), ("waiter", waiter))
        ]
        threads[0].start()
        wait_until(lambda: holder.compiles == 1)
        threads[1].start()
        wait_until(lambda: any("compiled by pid" in line for line in waiter.log))
        server.kill()
        threading.Event().wait(3.0)
        server.start()
        back.set()
        for thread in threads:
            thread.join(90)
        assert verdicts == {"holder": "compiled", "waiter": "waited"}
        assert waiter.compiles == 0


def test_server_gone_while_its_graph_is_compiled(tmp_path: Path, server: ServerProcess) -> None:
    """UC-10: the result is spooled, and goes up under its own lease when the server is back."""
    node = Node(tmp_path / "host", server.url)
    node.on_compile = lambda view: server.kill()
    got = node.obtain()
    assert (got.verdict, got.reason, got.exit_code) == ("compiled", "spooled", 0)
    server.start()
    push(node)
    late = Node(tmp_path / "late", server.url)
    assert (late.obtain().verdict, late.compiles) == ("remote", 0)


def test_database_locked_by_somebody_else(tmp_path: Path, backend: Embedded, server: ServerProcess) -> None:
    """A backup program with SQLite's lock, a rewrite of PostgreSQL's tables: everybody waits, nobody fails."""
    node = Node(tmp_path / "host", server.url, patience=PATIENT)
    results = []
    with backend.locked(server.data_dir):
        rank = threading.Thread(target=lambda: results.append(node.obtain()))
        rank.start()
        threading.Event().wait(1.5)
    rank.join(60)
    assert [(r.verdict, r.reason) for r in results] == [("compiled", None)]


@pytest.mark.production
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT], ids=["restarted", "crashed"])
def test_database_away_under_a_holder_and_a_waiter(
    tmp_path: Path, backend: Production, server: ServerProcess, number: signal.Signals
) -> None:
    """UC-15: the lease goes on, the waiter gets the holder's NEFF."""
    back = threading.Event()
    holder, waiter = (Node(tmp_path / n, server.url, patience=PATIENT) for n in ("holder", "waiter"))
    holder.on_compile = lambda view: (back.wait(60), None)[1]
    verdicts: dict[str, str] = {}
    threads = [
        threading.Thread(target=lambda n=n, node=node: verdicts.update({n: node.obtain().verdict}))
        for n, node in (("holder", holder), ("waiter", waiter))
    ]
    threads[0].start()
    wait_until(lambda: holder.compiles == 1)
    threads[1].start()
    wait_until(lambda: any("compiled by pid" in line for line in waiter.log))
    backend.postgres.stop(number)
    backend.postgres.start()
    back.set()
    for thread in threads:
        thread.join(90)
    assert verdicts == {"holder": "compiled", "waiter": "waited"}
    assert waiter.compiles == 0


@pytest.mark.embedded
def test_disk_of_the_server_full(tmp_path: Path) -> None:
    """503, which is no refusal: the rank keeps its copy until there is room again."""
    need_mounts()
    with (
        full_folder(tmp_path / "disk", size="2m") as (disk, fill, free),
        running_server(disk / "server") as server,
    ):
        fill()
        node = Node(tmp_path / "host", server.url)
        got = node.obtain()
        assert (got.verdict, got.exit_code, node.spooled()) in [("compiled", 0, 1), ("fallback", 0, 1)]
        assert len(node.warnings()) == 1
        free()
        push(node)
        late = Node(tmp_path / "late", server.url)
        assert (late.obtain().verdict, late.compiles) == ("remote", 0)
