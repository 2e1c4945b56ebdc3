"""A rank's own record, made at its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from neffcache_client.records import record
from neffcache_client.settings import ClientSettings
from neffcache_hook.end_of_run import RUN, EndOfRun, register

ENV = {"NEFFCACHE_URL": "http://127.0.0.1:9", "NEFFCACHE_MODE": "readonly", "NEFFCACHE_JOB": "train", "RANK": "3"}


@pytest.fixture
def settings(tmp_path: Path) -> ClientSettings:
    return ClientSettings.from_env({**ENV, "TORCH_NEURONX_NEFF_CACHE_DIR": str(tmp_path)})


def test_a_record_sums_the_launchers_of_this_rank(settings: ClientSettings) -> None:
    """UC-31: keys, verdicts, bytes, seconds; a warm job shows no compile."""
    tier = settings.tier_dir
    record(tier, verdict="compiled", key="a", job="train", rank=3, compile_seconds=9.0)
    run = EndOfRun(settings)
    run.started = round(time.time() + 0.002, 3)
    while time.time() < run.started:
        pass
    record(tier, verdict="local", key="b", job="train", rank=3, bytes=10, saved_seconds=4.0)
    record(tier, verdict="waited", key="c", job="train", rank=3, seconds=8.0, waited_seconds=6.5, bytes=5)
    record(tier, verdict="fallback", key="d", reason="unreachable", job="train", rank=4)
    record(tier, verdict="local", key="e", job="other", rank=3)
    found = run.document()
    assert found["verdicts"] == {"local": 1, "waited": 1}, "not from before, not of other ranks, not of other jobs"
    assert [r["key"] for r in found["requests"]] == ["b", "c"]
    assert (found["compiles"], found["bytes"], found["waited_seconds"], found["fetch_seconds"]) == (0, 15, 6.5, 1.5)
    assert (found["rank"], found["job"], found["saved_seconds"]) == (3, "train", 4.0)


def test_a_process_says_it_at_its_exit_in_the_log_and_nowhere_else(tmp_path: Path) -> None:
    """UC-03: the line comes, with nothing to count too; stdout and stderr are the program's own."""
    code = (
        "import os\n"
        "from neffcache_client.settings import ClientSettings\n"
        "from neffcache_hook.end_of_run import register\n"
        "assert register(os.environ, ClientSettings.from_env())\n"
        "assert not register(os.environ, ClientSettings.from_env()), 'once'\n"
    )
    env = {**os.environ, **ENV, "TORCH_NEURONX_NEFF_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (path,) = (tmp_path / "neffcache" / "runs").glob("*.json")
    assert json.loads(path.read_text())["compiles"] == 0
    (log,) = (tmp_path / "neffcache" / "log").iterdir()
    assert "end of run, rank 3, job train: nothing was asked of neffcache; 0 compiles" in log.read_text()


def test_children_of_a_rank_keep_quiet_and_ranks_under_a_launcher_do_not(settings: ClientSettings) -> None:
    assert not register({RUN: f"{os.getppid()}.3"}, settings), "a worker of rank 3"
    parent = {RUN: f"{os.getppid()}.-"}
    assert register(parent, settings), "torchrun has no rank"
    assert parent[RUN] == f"{os.getpid()}.3"
    from neffcache_hook import end_of_run

    end_of_run.finish(report=False)


def test_a_full_disk_does_not_disturb_the_exit(settings: ClientSettings, tmp_path: Path) -> None:
    (tmp_path / "neffcache").write_text("a file where a folder should be")
    EndOfRun(settings)()
