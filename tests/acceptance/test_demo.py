"""`neffcache demo` keeps what it promises, and says so in its table, its JSON and its exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "neffcache_client.cli.main", "demo"]


def demo(*args: str, timeout: float = 150) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *args], capture_output=True, text=True, timeout=timeout, check=False)


def test_a_fleet_compiles_each_graph_once_and_then_never_again(tmp_path: Path) -> None:
    """UC-18, UC-31: one compile for all hosts; a warm fleet compiles nothing, and the figures say so."""
    figures = tmp_path / "out.json"
    done = demo("--ranks", "4", "--hosts", "2", "--models", "mlp,convnet", "--json", str(figures))
    assert done.returncode == 0, done.stderr
    out = json.loads(figures.read_text())
    rows = {row["scenario"]: row for row in out["scenarios"]}
    assert out["cold"] == {"graphs": 2, "compiles": 2}
    assert out["warm"] == {"graphs": 2, "compiles": 0}
    assert rows["no cache"]["compiles"] == 8
    assert rows["built-in cache"]["compiles"] == 4
    # One leader per host and graph reaches the launcher, the other rank of the host finds the vendor's folder filled.
    assert rows["neffcache cold"]["waits"] + rows["neffcache cold"]["remote_hits"] == 2
    assert rows["neffcache warm"]["remote_hits"] == 4
    assert all(row["fallbacks"] == 0 for row in rows.values())
    assert out["max_abs_diff"] < 1e-3
    assert "| neffcache warm |" in done.stdout
    assert "stand-in" in done.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--ranks", "0"], "at least 1"),
        (["--ranks", "2", "--hosts", "3"], "every host has at least one rank"),
        (["--models", "mlp,gpt7"], "gpt7"),
    ],
)
def test_a_size_that_makes_no_sense_is_one_sentence(args: list[str], says: str) -> None:
    done = demo(*args)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    done = demo("--models", "mlp", "--keep", str(tmp_path))
    assert done.returncode == 1
    assert "not empty" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_ranks_and_server(number: signal.Signals, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--ranks", "2", "--hosts", "2", "--models", "decoder-train", "--keep", str(tmp_path / "kept")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell that runs the tests in the background lets them ignore Ctrl-C, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None
        assert "2 ranks on 2 hosts" in process.stdout.readline()
        os.kill(process.pid, number)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "stopped" in err
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
