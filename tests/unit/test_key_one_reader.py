"""One process of a host parses a graph; the others find it in the index."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest
from neffcache_hook.key import compute, index, spawn
from neffcache_hook.key.command import parse
from neffcache_hook.key.identity import CompilerIdentity
from support.launchers import GRAPH


def _key(folder: Path) -> str | None:
    cmd = parse(["compile", str(folder / "g.hlo.pb"), "--target", "trn2", "--output", "o"], {})
    assert cmd is not None
    compiler = CompilerIdentity("1.0", "d" * 64, "executable")
    return compute.compute_key(
        cmd, cwd=str(folder), environ={}, compiler=compiler, index_dir=str(folder / "index")
    ).key


def test_processes_that_meet_a_graph_at_once_parse_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "g.hlo.pb").write_bytes(GRAPH)
    parsed: list[int] = []
    both = threading.Barrier(2)
    real = spawn.canonicalise

    def canonicalise(fd: int, raw: str) -> dict[str, object]:
        parsed.append(fd)
        return real(fd, raw)

    def work() -> None:
        both.wait()
        keys.append(_key(tmp_path))

    monkeypatch.setattr(spawn, "canonicalise", canonicalise)
    keys: list[str | None] = []
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(keys)) == 1
    assert None not in keys
    assert len(parsed) == 1


def test_a_reader_that_is_stuck_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "g.hlo.pb").write_bytes(GRAPH)
    first = _key(tmp_path)
    for entry in (tmp_path / "index").glob("*/??/*.json"):
        entry.unlink()
    monkeypatch.setattr(index, "PATIENCE_SECONDS", 0.1)
    locks = list((tmp_path / "index").glob("*/locks/*"))
    assert len(locks) == 1
    with locks[0].open() as stuck:
        fcntl.flock(stuck, fcntl.LOCK_EX)
        assert _key(tmp_path) == first
