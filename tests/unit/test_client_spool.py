"""The spool keeps whole results."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from neffcache_client.errors import LocalTierError, NeffInvalid
from neffcache_client.spool import Spool, SpoolEntry
from support.neffs import make_neff

KEY = "ab" * 32


@pytest.fixture
def neff(tmp_path: Path) -> Path:
    path = tmp_path / "a.neff"
    path.write_bytes(make_neff())
    return path


def test_an_entry_comes_back_as_it_was(tmp_path: Path, neff: Path) -> None:
    spool = Spool(str(tmp_path / "tier"))
    spool.add(
        SpoolEntry(key=KEY, factors={"recipe": 1}, compile_seconds=3.0, url="http://x", namespace="n"),
        str(neff),
        link=True,
    )
    (entry,) = spool.pending()
    assert (entry.key, entry.factors, entry.compile_seconds, entry.namespace) == (KEY, {"recipe": 1}, 3.0, "n")
    assert spool.check(entry).size == len(make_neff())
    spool.remove(entry)
    assert not list((tmp_path / "tier" / "spool").iterdir())


def test_a_key_waits_once(tmp_path: Path, neff: Path) -> None:
    spool = Spool(str(tmp_path / "tier"))
    for _ in range(3):
        spool.add(SpoolEntry(key=KEY), str(neff), link=False)
    assert len(spool) == 1


def test_a_key_waits_once_for_each_namespace(tmp_path: Path, neff: Path) -> None:
    """Nobody pushes another tenant's result, so it must not stand in the way of ours."""
    spool = Spool(str(tmp_path / "tier"))
    for namespace in ("a", "b", "a"):
        spool.add(SpoolEntry(key=KEY, namespace=namespace), str(neff), link=False)
    assert sorted(entry.namespace for entry in spool.pending()) == ["a", "b"]


def test_what_cannot_be_read_does_not_stand_in_the_way_of_its_key(tmp_path: Path, neff: Path) -> None:
    spool = Spool(str(tmp_path / "tier"))
    spool.add(SpoolEntry(key=KEY), str(neff), link=False)
    next((tmp_path / "tier" / "spool").glob("*.json")).write_text("{")
    spool.add(SpoolEntry(key=KEY), str(neff), link=False)
    assert len(spool.pending()) == 1


def test_without_a_link_later_changes_of_the_source_do_not_matter(tmp_path: Path, neff: Path) -> None:
    spool = Spool(str(tmp_path / "tier"))
    spool.add(SpoolEntry(key=KEY), str(neff), link=False)
    with neff.open("r+b") as f:
        f.write(b"scribble")
    (entry,) = spool.pending()
    spool.check(entry)


def test_a_linked_entry_outlives_the_local_tier(tmp_path: Path, neff: Path) -> None:
    spool = Spool(str(tmp_path / "tier"))
    spool.add(SpoolEntry(key=KEY), str(neff), link=True)
    neff.unlink()
    (entry,) = spool.pending()
    spool.check(entry)


def test_half_an_entry_is_no_entry(tmp_path: Path, neff: Path) -> None:
    folder = tmp_path / "tier" / "spool"
    folder.mkdir(parents=True)
    (folder / f"{KEY}.x.json.tmp").write_text("{}")
    (folder / f"{KEY}.y.json").write_text('{"key"')
    (folder / f"{KEY}.z.json").write_text('{"key": "../../etc"}')
    assert Spool(str(tmp_path / "tier")).pending() == []


def test_a_damaged_neff_is_found_out(tmp_path: Path, neff: Path) -> None:
    spool = Spool(str(tmp_path / "tier"))
    spool.add(SpoolEntry(key=KEY), str(neff), link=False)
    (entry,) = spool.pending()
    Path(entry.neff).write_bytes(make_neff()[:-1])
    with pytest.raises(NeffInvalid):
        spool.check(entry)


def test_a_folder_that_cannot_be_written_is_said_so(tmp_path: Path, neff: Path) -> None:
    (tmp_path / "tier").write_text("a file")
    with pytest.raises(LocalTierError, match="spool"):
        Spool(str(tmp_path / "tier")).add(SpoolEntry(key=KEY), str(neff), link=False)


def test_what_killed_processes_left_half_spooled_goes(
    tmp_path: Path, neff: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.utime(neff, (0, 0))
    spool = Spool(str(tmp_path / "tier"))
    spool.add(SpoolEntry(key=KEY), str(neff), link=True)
    folder = tmp_path / "tier" / "spool"
    left = [folder / "x.host.1.neff", folder / "x.host.1.json.tmp"]
    left[0].hardlink_to(neff)
    left[1].write_bytes(b"half")
    spool.pending()
    assert all(path.exists() for path in left), "somebody may be writing them, old as the artifact may be"
    later = time.time() + 7200
    monkeypatch.setattr(time, "time", lambda: later)
    (entry,) = spool.pending()
    assert not any(path.exists() for path in left)
    spool.check(entry)
