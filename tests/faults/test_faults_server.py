"""Faults of the server, its store and its database. Rows of docs/failure-modes.md."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from neffcache_client.api import CacheClient
from neffcache_client.uploader import drain
from support.mounts import full_folder, need_mounts
from support.neffs import make_neff
from support.node import QUICK, Node
from support.server import ServerProcess, running_server
from support.waiting import wait_until

FAULTY = str(Path(__file__).resolve().parents[1] / "support" / "faulty_server.py")
PATIENT = replace(QUICK, first_answer=10.0, publish=60.0, outage=60.0)
SHORT = {"NEFFCACHE_SERVER_TTL_SECONDS": "2", "NEFFCACHE_SERVER_PROVISIONAL_SECONDS": "2"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with running_server(tmp_path / "server") as server:
        yield server


def blob(server: ServerProcess) -> Path:
    """The only blob in the server's folder."""
    (path,) = (p for p in (server.data_dir / "blobs").glob("*/??/*") if p.is_file())
    return path


def push(node: Node) -> None:
    """As `neffcache push`, until nothing waits."""
    with CacheClient(node.settings) as client:
        wait_until(lambda: node.spooled() == 0 or drain(node.settings, client, say=print).published)


STEPS = [
    ("neffcache_server.blobs.service:BlobService.authorise", "before", "before the upload is allowed"),
    ("neffcache_server.storage.folder:FolderStore.put", "before", "uploaded, not stored"),
    ("neffcache_server.storage.folder:FolderStore.put", "after", "stored, no row"),
    ("neffcache_server.blobs.repository:BlobRepository.put", "after", "row not committed"),
    ("neffcache_server.blobs.service:BlobService.receive", "after", "row committed, not answered"),
    ("neffcache_server.leases.publish:PublishService.publish", "before", "publish asked for"),
    ("neffcache_server.leases.repository:LeaseRepository.end", "after", "lease ended, no artifact"),
    ("neffcache_server.leases.repository:LeaseRepository.put_artifact", "after", "artifact, not committed"),
    ("neffcache_server.kit.hub:LocalHub.announce", "before", "committed, nobody told"),
    ("neffcache_server.leases.publish:PublishService.publish", "after", "told, not answered"),
]


@pytest.mark.parametrize(("where", "when"), [s[:2] for s in STEPS], ids=[s[2] for s in STEPS])
def test_server_killed_between_two_steps_of_a_publish(tmp_path: Path, where: str, when: str) -> None:
    """UC-15: one compile, one artifact, whatever the step; the lease lives through the restart."""
    # The grant of the lease is announced first.
    count = 2 if "announce" in where else 1
    with running_server(tmp_path / "server", program=(FAULTY, f"{where}:{when}:kill:{count}")) as server:
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
def test_store_that_cannot_write(tmp_path: Path, count: int) -> None:
    """UC-15: the first try, or every one, is answered 503; no row is made. The rank has its NEFF."""
    spec = f"neffcache_server.storage.folder:FolderStore.put:before:error:{count}"
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


def test_store_that_cannot_be_read(tmp_path: Path) -> None:
    """A fault of the store is a fault and no missing blob: the entry stays, this rank compiles for itself."""
    spec = "neffcache_server.storage.folder:FolderStore.open:before:error:0"
    with running_server(tmp_path / "server", program=(FAULTY, spec)) as server:
        assert Node(tmp_path / "first", server.url).obtain().reason is None
        other = Node(tmp_path / "other", server.url)
        got = other.obtain()
        assert (got.verdict, got.reason, got.exit_code) == ("fallback", "download_failed", 0)
        server.program = ("-m", "neffcache_server")
        server.stop()
        server.start()
        assert Node(tmp_path / "late", server.url).obtain().verdict == "remote"


def test_blob_deleted_behind_our_back(tmp_path: Path, server: ServerProcess) -> None:
    """UC-15: 404 before any byte; the next rank that asks compiles, and its upload heals the key."""
    first = Node(tmp_path / "first", server.url)
    assert first.obtain().reason is None
    path = blob(server)
    path.unlink()
    url = f"{server.url}/v1/ns/default/blobs/{path.name}"
    answer = httpx.get(url)
    assert (answer.status_code, answer.json()["code"]) == (404, "blob_missing")
    healer = Node(tmp_path / "healer", server.url)
    assert (healer.obtain().verdict, healer.compiles, healer.warnings()) == ("compiled", 1, [])
    assert Node(tmp_path / "late", server.url).obtain().verdict == "remote"
    assert httpx.get(url).status_code == 200


def test_blob_damaged_in_the_store(tmp_path: Path, server: ServerProcess) -> None:
    """UC-11: the client's report makes the server look, withdraw it, and lease the key again."""
    assert Node(tmp_path / "first", server.url).obtain().reason is None
    path = blob(server)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    finder = Node(tmp_path / "finder", server.url)
    got = finder.obtain()
    assert (got.verdict, got.reason, finder.compiles) == ("compiled", None, 1)
    assert finder.output().read_bytes() == finder.neff
    late = Node(tmp_path / "late", server.url)
    assert (late.obtain().verdict, late.compiles) == ("remote", 0)
    with CacheClient(finder.settings) as client:
        assert client.report_damage(path.name).verdict == "sound"
        assert [e.state for e in client.entries().entries] == ["present"]


def test_blob_damaged_while_its_compiler_makes_other_bytes(tmp_path: Path, server: ServerProcess) -> None:
    """A quarantined artifact is replaced by the next publish, also a different one."""
    assert Node(tmp_path / "first", server.url).obtain().reason is None
    sha256 = blob(server).name
    blob(server).write_bytes(blob(server).read_bytes()[:-1] + b"\1")
    with CacheClient(Node(tmp_path / "x", server.url).settings) as client:
        assert client.report_damage(sha256).verdict == "quarantined"
        assert [e.state for e in client.entries().entries] == ["quarantined"]
    finder = Node(tmp_path / "finder", server.url)
    finder.neff = make_neff(payload=b"another build of it")
    assert finder.obtain().reason is None
    assert Node(tmp_path / "late", server.url).obtain().verdict == "remote"
    assert blob(server).name != sha256


def test_server_paused_under_holders_and_waiters(tmp_path: Path) -> None:
    """UC-01: stopped for several TTLs with five graphs under way; nobody is robbed, compiles = graphs."""
    graphs, pause = 5, 8.0
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


def test_database_locked_by_somebody_else(tmp_path: Path, server: ServerProcess) -> None:
    """A backup program that holds SQLite's lock: everybody waits for it, nobody fails."""
    node = Node(tmp_path / "host", server.url, patience=PATIENT)
    with closing(sqlite3.connect(server.data_dir / "neffcache.sqlite3", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        results = []
        rank = threading.Thread(target=lambda: results.append(node.obtain()))
        rank.start()
        threading.Event().wait(1.5)
        other.execute("ROLLBACK")
        rank.join(60)
    assert [(r.verdict, r.reason) for r in results] == [("compiled", None)]


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
