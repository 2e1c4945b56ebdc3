"""The local tier hands out whole NEFFs or nothing."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from neffcache_client.errors import LocalTierError
from neffcache_client.local_tier import LocalTier, unique
from support.neffs import make_neff, neff_of_size

KEY = "ab" * 32


def stored(tier: LocalTier, data: bytes, tmp_path: Path, key: str = KEY) -> Path:
    source = tmp_path / f"source-{key[:8]}"
    source.write_bytes(data)
    tier.store(key, str(source), meta(data))
    return Path(tier.path(key))


def meta(data: bytes) -> dict[str, object]:
    return {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "compile_seconds": 2.5}


def key_of(n: int) -> str:
    return hashlib.sha256(str(n).encode()).hexdigest()


def test_what_was_stored_comes_back_with_its_figures(tmp_path: Path) -> None:
    tier = LocalTier(str(tmp_path / "tier"))
    stored(tier, make_neff(), tmp_path)
    artifact = tier.fetch(KEY, str(tmp_path / "out"))
    assert artifact is not None
    assert (tmp_path / "out").read_bytes() == make_neff()
    assert artifact.compile_seconds == 2.5
    assert not list((tmp_path / "tier" / "tmp").iterdir())


def test_an_absent_key_is_a_miss_and_leaves_the_output_alone(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("before")
    assert LocalTier(str(tmp_path / "tier")).fetch(KEY, str(tmp_path / "out")) is None
    assert (tmp_path / "out").read_text() == "before"


@pytest.mark.parametrize("damage", ["flipped", "short", "empty", "long", "meta"])
def test_a_damaged_artifact_is_a_miss_counted_and_removed(tmp_path: Path, damage: str) -> None:
    """UC-11."""
    tier = LocalTier(str(tmp_path / "tier"))
    path = stored(tier, make_neff(), tmp_path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    changed = {"flipped": bytes(data), "short": bytes(data[:-1]), "empty": b"", "long": bytes(data) + b"x"}
    if damage == "meta":
        path.with_suffix(".json").write_text('{"sha256": 1}')
    else:
        path.write_bytes(changed[damage])
    assert tier.fetch(KEY, str(tmp_path / "out")) is None
    assert tier.corrupt == 1
    assert not (tmp_path / "out").exists()
    assert not path.exists()
    stored(tier, make_neff(), tmp_path)
    assert tier.fetch(KEY, str(tmp_path / "out")) is not None


def test_a_source_that_changed_after_its_digest_was_taken_is_not_stored(tmp_path: Path) -> None:
    tier = LocalTier(str(tmp_path / "tier"))
    (tmp_path / "source").write_bytes(make_neff(payload=b"other"))
    with pytest.raises(LocalTierError):
        tier.store(KEY, str(tmp_path / "source"), meta(make_neff()))
    assert not tier.contains(KEY)


def test_bytes_without_their_meta_data_are_a_miss(tmp_path: Path) -> None:
    """UC-15: a writer that died between the two renames."""
    tier = LocalTier(str(tmp_path / "tier"))
    stored(tier, make_neff(), tmp_path).with_suffix(".json").unlink()
    assert tier.fetch(KEY, str(tmp_path / "out")) is None
    assert tier.corrupt == 0


def test_a_caller_that_changes_its_output_does_not_change_the_tier(tmp_path: Path) -> None:
    tier = LocalTier(str(tmp_path / "tier"))
    stored(tier, make_neff(), tmp_path)
    tier.fetch(KEY, str(tmp_path / "out"))
    with (tmp_path / "out").open("r+b") as f:
        f.write(b"scribble")
    assert tier.fetch(KEY, str(tmp_path / "again")) is not None


def test_an_output_that_cannot_be_written_is_an_error_and_no_miss(tmp_path: Path) -> None:
    tier = LocalTier(str(tmp_path / "tier"))
    stored(tier, make_neff(), tmp_path)
    with pytest.raises(LocalTierError, match="cannot be written"):
        tier.fetch(KEY, str(tmp_path / "absent" / "out"))
    assert tier.contains(KEY)


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """UC-30."""
    tier = LocalTier(str(tmp_path / "tier"))
    real = os.replace

    def full(source: str, target: str) -> None:
        if target.endswith(".json"):
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(LocalTierError, match="No space left"):
        stored(tier, make_neff(), tmp_path)
    monkeypatch.undo()
    assert not list((tmp_path / "tier" / "tmp").iterdir())
    assert tier.fetch(KEY, str(tmp_path / "out")) is None


def test_the_bound_holds_and_the_least_recently_used_go_first(tmp_path: Path) -> None:
    """UC-30."""
    data = neff_of_size(100_000)
    tier = LocalTier(str(tmp_path / "tier"), max_bytes=350_000)
    for n in range(3):
        path = stored(tier, data, tmp_path, key_of(n))
        os.utime(path, (n, n))
    assert tier.fetch(key_of(0), str(tmp_path / "out")) is not None
    stored(tier, data, tmp_path, key_of(3))
    left = {key for key, _, _ in tier.usage()}
    assert left == {key_of(0), key_of(2), key_of(3)}


def test_a_neff_larger_than_the_bound_is_not_stored(tmp_path: Path) -> None:
    with pytest.raises(LocalTierError, match="NEFFCACHE_LOCAL_MAX_BYTES"):
        stored(LocalTier(str(tmp_path / "tier"), max_bytes=10), make_neff(), tmp_path)


def test_a_reader_that_has_begun_is_not_disturbed_by_eviction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UC-30: the artifact is unlinked between open and copy."""
    tier = LocalTier(str(tmp_path / "tier"))
    path = stored(tier, make_neff(), tmp_path)
    real = os.fstat

    def evict_first(fd: int) -> os.stat_result:
        tier.remove(KEY)
        return real(fd)

    monkeypatch.setattr(os, "fstat", evict_first)
    assert tier.fetch(KEY, str(tmp_path / "out")) is not None
    assert not path.exists()
    assert (tmp_path / "out").read_bytes() == make_neff()


def test_readers_and_writers_under_a_bound_see_no_error(tmp_path: Path) -> None:
    """UC-30: eviction all the time, every fetch is whole or a miss."""
    folder = str(tmp_path / "tier")
    contents = {key_of(n): neff_of_size(20_000 + n) for n in range(8)}
    faults: list[object] = []

    def work(seed: int) -> None:
        tier = LocalTier(folder, max_bytes=70_000)
        scratch = tmp_path / f"w{seed}"
        scratch.mkdir()
        try:
            for n in range(40):
                key = key_of((n * 5 + seed) % 8)
                out = scratch / "out"
                if tier.fetch(key, str(out)) is None:
                    stored(tier, contents[key], scratch, key)
                elif out.read_bytes() != contents[key]:
                    faults.append(key)
            if tier.corrupt:
                faults.append("corrupt")
        except Exception as exc:
            faults.append(exc)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not faults
    assert sum(size for _, size, _ in LocalTier(folder).usage()) <= 70_000


def test_temporary_names_differ_within_one_process(tmp_path: Path) -> None:
    """UC-11: equal pids on two hosts over a shared file system."""
    names = {unique("x") for _ in range(100)}
    assert len(names) == 100
    assert all(os.uname().nodename in name for name in names)


def test_the_path_of_a_local_hit_imports_next_to_nothing(tmp_path: Path) -> None:
    tier = LocalTier(str(tmp_path / "tier"))
    stored(tier, make_neff(), tmp_path)
    code = f"""
import sys, json
import __future__, os, fcntl, hashlib, struct, time, errno, stat, collections.abc
before = set(sys.modules)
from neffcache_client import host_lock, records, settings
from neffcache_client.local_tier import LocalTier
tier = LocalTier({str(tmp_path / "tier")!r})
assert tier.fetch({KEY!r}, {str(tmp_path / "out")!r})
lock = host_lock.HostLock({str(tmp_path)!r}, "default", {KEY!r})
assert lock.try_lock()
lock.write("00" * 16)
lock.release()
records.record(tier.tier_dir, verdict="local", key={KEY!r})
print(json.dumps(sorted(m for m in set(sys.modules) - before if not m.startswith(("neffcache_client", "encodings")))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_a_rank_that_only_waits_for_its_host_never_imports_the_http_client() -> None:
    """64 ranks of a host would burn seconds of CPU before anybody has compiled anything."""
    code = "import sys, neffcache_client.node_cache; assert not {'httpx', 'ssl', 'subprocess'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("bound", [None, 1 << 30])
def test_what_killed_processes_left_half_written_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: int | None
) -> None:
    """With and without a bound on the folder: a NEFF may have gigabytes, and jobs are killed every day."""
    tier = LocalTier(str(tmp_path / "tier"), bound)
    left = Path(tier.temp_path("left"))
    left.write_bytes(b"half")
    stored(tier, make_neff(), tmp_path)
    assert left.exists(), "somebody may be writing it"
    later = time.time() + 7200
    monkeypatch.setattr(time, "time", lambda: later)
    stored(tier, make_neff(), tmp_path, "cd" * 32)
    assert not left.exists()
