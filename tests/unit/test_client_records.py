"""Verdicts are noted and summed."""

from __future__ import annotations

import os
from pathlib import Path

from neffcache_client.records import read_records, record, summarise


def test_records_are_summed_by_verdict_and_reason(tmp_path: Path) -> None:
    """UC-31."""
    tier = str(tmp_path)
    record(tier, verdict="local", key="a", bytes=10, saved_seconds=2.0, job="j1")
    record(tier, verdict="compiled", key="b", compile_seconds=5.0, job="j1")
    record(tier, verdict="fallback", key="c", reason="unreachable", compile_seconds=1.0, job="j2")
    record(tier, verdict="fallback", key="d", reason="breaker_open", corrupt=1)
    total = summarise(tier)
    assert total.verdicts == {"local": 1, "compiled": 1, "fallback": 2}
    assert total.reasons == {"fallback": {"unreachable": 1, "breaker_open": 1}}
    assert (total.bytes, total.compile_seconds, total.saved_seconds, total.corrupt) == (10, 6.0, 2.0, 1)
    assert summarise(tier, "j1").verdicts == {"local": 1, "compiled": 1}


def test_a_record_says_who_and_when(tmp_path: Path) -> None:
    record(str(tmp_path), verdict="local", key="a", rank=None)
    (found,) = read_records(str(tmp_path))
    assert found["pid"] == os.getpid()
    assert found["host"] == os.uname().nodename
    assert found["time"] > 0
    assert "rank" not in found


def test_a_torn_line_costs_itself_only(tmp_path: Path) -> None:
    record(str(tmp_path), verdict="local")
    (path,) = (tmp_path / "records").iterdir()
    with path.open("a") as f:
        f.write('{"verdict": "rem\n[1]\n')
    record(str(tmp_path), verdict="local")
    assert summarise(str(tmp_path)).verdicts == {"local": 2}


def test_recording_never_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    record(str(tmp_path / "file"), verdict="local")
    record(str(tmp_path), verdict="local", odd=object())
    assert summarise(str(tmp_path / "absent")).verdicts == {}
