"""Disks of a rank's host that are full, read-only, damaged or in the way. Rows of docs/failure-modes.md."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from neffcache_client.api import CacheClient
from neffcache_client.errors import LocalTierError
from neffcache_client.uploader import drain
from support.backends import Embedded
from support.compilers import FakeCompiler
from support.launchers import UNREACHABLE, Host
from support.mounts import full_folder, need_mounts, read_only, small_disk
from support.neffs import neff_of_size
from support.node import KEY, VERSION, Node
from support.server import ServerProcess, running_server

LARGE = neff_of_size(300_000, version=VERSION)
pytestmark = pytest.mark.usefixtures("backend")
own_disk = pytest.mark.one_backend(
    "the fault and what is kept are the host's own; the server takes a part that it plays everywhere"
)
no_server = pytest.mark.one_backend("there is no server")
DIGEST = hashlib.sha256(LARGE).hexdigest()


@pytest.fixture(scope="module")
def server(backend: Embedded, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def space(request: pytest.FixtureRequest) -> dict[str, str]:
    """A namespace of the test's own."""
    return {"NEFFCACHE_NAMESPACE": f"ns-{abs(hash(request.node.nodeid)):x}"}


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_local_folder_full(tmp_path: Path, server: ServerProcess, space: dict[str, str]) -> None:
    """UC-30: the NEFF reaches the caller and the server; the host keeps no copy and no half of one."""
    need_mounts()
    with full_folder(tmp_path / "host" / "cache") as (disk, fill, _):
        node = Node(tmp_path / "host", server.url, **space)
        node.neff = LARGE
        fill()
        got = node.obtain()
        assert (got.verdict, got.reason, got.exit_code, len(node.warnings())) == ("compiled", None, 0, 1)
        assert "No space left" in node.warnings()[0]
        assert not [path for path in files(disk) if path.suffix in (".neff", ".tmp") and path.stat().st_size]
        late = Node(tmp_path / "late", server.url, **space)
        assert late.obtain().verdict == "remote"


def test_local_folder_full_under_a_download(tmp_path: Path, server: ServerProcess, space: dict[str, str]) -> None:
    """UC-30"""
    need_mounts()
    first = Node(tmp_path / "first", server.url, **space)
    first.neff = LARGE
    assert first.obtain().reason is None
    with full_folder(tmp_path / "host" / "cache") as (_, fill, _):
        node = Node(tmp_path / "host", server.url, **space)
        fill()
        assert (node.obtain().verdict, node.compiles, len(node.warnings())) == ("remote", 0, 1)
        assert node.output().read_bytes() == LARGE


@no_server
def test_local_folder_full_and_no_server(tmp_path: Path) -> None:
    """UC-30, UC-10: neither a copy nor a spool, and still a NEFF."""
    need_mounts()
    with full_folder(tmp_path / "host" / "cache") as (_, fill, _):
        node = Node(tmp_path / "host", UNREACHABLE)
        node.neff = LARGE
        fill()
        got = node.obtain()
        assert (got.verdict, got.exit_code, node.spooled()) == ("fallback", 0, 0)
        assert node.output().read_bytes() == LARGE


@own_disk
def test_no_inodes_left(tmp_path: Path, server: ServerProcess, space: dict[str, str]) -> None:
    """UC-30: a disk with room and without a free inode."""
    need_mounts()
    with small_disk(tmp_path / "host" / "cache", inodes=3) as disk:
        for n in range(3):
            try:
                (disk / str(n)).touch()
            except OSError:
                break
        node = Node(tmp_path / "host", server.url, **space)
        assert (node.obtain().reason, len(node.warnings())) == (None, 1)


@own_disk
def test_output_disk_full(tmp_path: Path, server: ServerProcess, space: dict[str, str]) -> None:
    """The caller's own disk: a hit cannot be put there, which is an error in words and leaves no part of a file."""
    need_mounts()
    first = Node(tmp_path / "first", server.url, **space)
    first.neff = LARGE
    assert first.obtain().reason is None
    with full_folder(tmp_path / "output") as (disk, fill, free):
        node = Node(tmp_path / "host", server.url, **space)
        fill()
        with pytest.raises(LocalTierError, match="cannot be written: No space left on device"):
            node.obtain(output=str(disk / "out.neff"))
        free()
        assert files(disk) == []
        assert node.obtain(output=str(disk / "out.neff")).verdict in ("local", "remote")


@own_disk
def test_disk_full_under_the_compiler(tmp_path: Path, server: ServerProcess, space: dict[str, str]) -> None:
    """The compiler's words and code are the caller's; no half of a NEFF is left, and nobody else is told a result."""
    need_mounts()
    compiler = FakeCompiler(tmp_path / "compilers", neff_bytes=3 << 20)
    host = Host(tmp_path / "host", compiler, server.url, **space)
    with small_disk(tmp_path / "host" / "T1"):
        started = host.start()
        done = started.finish()
        assert (done.exit_code != 0, done.output, started.leftovers()) == (True, None, [])
        assert b"No space left" in done.stderr
    well = Host(tmp_path / "well", compiler, server.url, NEFFCACHE_RETRY_FAILED="1", **space).compile()
    assert well.exit_code == 0


@own_disk
def test_local_folder_read_only(tmp_path: Path, server: ServerProcess, space: dict[str, str]) -> None:
    """UC-30: an image with a read-only cache: hits from it, and new NEFFs reach caller and server."""
    need_mounts()
    node = Node(tmp_path / "host", server.url, **space)
    assert node.obtain().reason is None
    with read_only(tmp_path / "host" / "cache"):
        again = Node(tmp_path / "host", server.url, **space)
        assert again.obtain(output="again.neff").verdict == "local"
        got = again.obtain("cd" * 32, output="new.neff")
        assert (got.verdict, got.reason, len(again.warnings())) == ("compiled", None, 1)
        assert "Read-only file system" in again.warnings()[0]


def test_lock_folder_read_only(tmp_path: Path, server: ServerProcess, space: dict[str, str]) -> None:
    """No leader, no breaker, no slots: every process asks the server, whose lease decides."""
    need_mounts()
    with read_only(tmp_path / "host" / "locks"):
        nodes = [Node(tmp_path / "host", server.url, **space) for _ in range(3)]
        verdicts: list[str] = []
        for n, node in enumerate(nodes):
            node.private_stem = f"private-{n}"

        def rank(n: int) -> None:
            verdicts.append(nodes[n].obtain(output=f"{n}.neff").verdict)

        threads = [threading.Thread(target=rank, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert sum(node.compiles for node in nodes) == 1
    assert sorted(verdicts) in (
        ["compiled", "local", "local"],
        ["compiled", "local", "waited"],
        ["compiled", "waited", "waited"],
    )


@own_disk
def test_everything_of_a_launcher_read_only(tmp_path: Path, server: ServerProcess, space: dict[str, str]) -> None:
    """The job does not notice: same output, same words, same exit code."""
    need_mounts()
    compiler = FakeCompiler(tmp_path / "compilers", stderr="a warning\n")
    host = Host(tmp_path / "host", compiler, server.url, **space)
    with read_only(tmp_path / "host" / "neff_cache"), read_only(tmp_path / "host" / "local_cache"):
        first, second = host.compile(), host.compile()
    assert (first.exit_code, first.stderr, compiler.runs) == (0, b"a warning\n", 1)
    assert second == (0, b"", b"", first.output)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "swapped", "meta"])
def test_local_artifact_damaged(tmp_path: Path, server: ServerProcess, space: dict[str, str], damage: str) -> None:
    """UC-11: found before the caller sees it, counted, thrown away and fetched anew."""
    node = Node(tmp_path / "host", server.url, **space)
    assert node.obtain().reason is None
    (neff,) = (p for p in files(node.tier / "artifacts") if p.suffix == ".neff")
    data = bytearray(neff.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
        neff.write_bytes(data)
    elif damage in ("cut", "empty"):
        neff.write_bytes(data[: len(data) // 2 if damage == "cut" else 0])
    elif damage == "swapped":
        neff.write_bytes(LARGE)
    else:
        neff.with_suffix(".json").write_text("{")
    again = Node(tmp_path / "host", server.url, **space)
    assert (again.obtain(output="again.neff").verdict, again.compiles) == ("remote", 0)
    assert again.output("again.neff").read_bytes() == node.neff
    assert Node(tmp_path / "host", server.url, **space).obtain(output="third.neff").verdict == "local"


def test_spool_damaged(tmp_path: Path, server: ServerProcess, space: dict[str, str]) -> None:
    """What was damaged on disk while it waited is never published."""
    node = Node(tmp_path / "host", UNREACHABLE, **space)
    assert node.obtain().verdict == "fallback"
    (spooled,) = (p for p in files(node.tier / "spool") if p.suffix == ".neff")
    data = bytearray(spooled.read_bytes())
    data[-1] ^= 1
    spooled.unlink()
    spooled.write_bytes(data)
    online = Node(tmp_path / "host", server.url, **space)
    with CacheClient(online.settings) as client:
        report = drain(online.settings, client, say=print)
        assert (report.damaged, report.published, online.spooled()) == (1, 0, 0)
        assert client.stats().entries == 0


def test_folders_removed_while_in_use(tmp_path: Path, server: ServerProcess, space: dict[str, str]) -> None:
    """Somebody clears /tmp under a compile."""
    node = Node(tmp_path / "host", server.url, **space)

    def clear(view: object) -> None:
        for name in ("cache", "locks"):
            folder = tmp_path / "host" / name
            if folder.exists():
                folder.rename(tmp_path / f"away-{name}")

    node.on_compile = clear
    assert (node.obtain().reason, node.output().read_bytes()) == (None, node.neff)
    assert Node(tmp_path / "late", server.url, **space).obtain().verdict == "remote"


@own_disk
def test_file_where_a_folder_should_be(tmp_path: Path, server: ServerProcess, space: dict[str, str]) -> None:
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "cache").write_text("")
    (tmp_path / "host" / "locks").write_text("")
    node = Node(tmp_path / "host", server.url, **space)
    assert (node.obtain().reason, len(node.warnings())) == (None, 1)


@no_server
def test_readers_under_eviction(tmp_path: Path) -> None:
    """UC-30: a bound far below what is stored, writers and readers at once; a reader gets all of a NEFF or a miss."""
    bound = 4 * len(LARGE)
    stop = threading.Event()
    trouble: list[BaseException] = []

    def work(n: int) -> None:
        node = Node(tmp_path / "host", UNREACHABLE, NEFFCACHE_LOCAL_MAX_BYTES=str(bound), NEFFCACHE_MODE="readwrite")
        tier = node.cache._tier
        source = tmp_path / f"source-{n}"
        source.write_bytes(LARGE)
        meta = {"sha256": DIGEST, "size": len(LARGE)}
        try:
            for round_ in range(40):
                key = f"{(n + round_) % 12:064x}"
                if tier.fetch(key, str(tmp_path / f"out-{n}")) is not None:
                    assert (tmp_path / f"out-{n}").read_bytes() == LARGE
                else:
                    tier.store(key, str(source), meta)
            assert tier.corrupt == 0
        except BaseException as exc:
            trouble.append(exc)
        finally:
            stop.set()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert trouble == []
    left = [p for p in files(tmp_path / "host" / "cache") if p.suffix == ".neff"]
    assert sum(p.stat().st_size for p in left) <= bound


@own_disk
def test_two_hosts_with_equal_pids_share_a_folder(
    tmp_path: Path, server: ServerProcess, space: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """UC-11: temporary names differ by host, process and use."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    nodes = []
    for host in ("a", "b"):
        monkeypatch.setenv("NEFFCACHE_HOST", host)
        nodes.append(Node(tmp_path / "shared", server.url, **space))
    names = {nodes[0].cache._tier.temp_path(KEY) for _ in range(100)}
    assert len(names) == 100
