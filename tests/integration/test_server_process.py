"""`neffcache serve` and `neffcache db` as processes."""

from __future__ import annotations

import json
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.cache_state import lease_id, rows
from support.server import ServerProcess, running_server
from support.waiting import wait_until

HOLDER = {"host": "h0", "boot": "b0", "pid": 7}
KEY = "a" * 64


def neffcache(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "neffcache_server", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def ask(server: ServerProcess, number: int, **given: Any) -> httpx.Response:
    body = {"lease_id": lease_id(number), "holder": HOLDER, **given}
    return httpx.post(f"{server.url}/v1/ns/default/keys/{KEY}/acquire", json=body, timeout=60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_sends_waiters_elsewhere_and_ends_quietly(tmp_path: Path, number: signal.Signals) -> None:
    with running_server(tmp_path) as server:
        assert ask(server, 1).json()["state"] == "leased"
        answers: list[httpx.Response] = []
        waiter = threading.Thread(target=lambda: answers.append(ask(server, 2, wait_seconds=25)))
        waiter.start()
        wait_until(lambda: _connections(server.port) > 0, what="the waiter is connected")
        assert server.stop(number) == 0
        waiter.join()
        assert (answers[0].status_code, answers[0].json()["code"]) == (503, "shutting_down")
        assert server.log == f"neffcache server on {server.url} (data: {server.data_dir})\n"


def _connections(port: int) -> int:
    """Established connections to a port of this machine."""
    wanted = f":{port:04X}"
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(line.split()[1].endswith(wanted) and line.split()[3] == "01" for line in lines)


def test_waiter_that_hung_up_is_not_given_the_lease(tmp_path: Path) -> None:
    """A cancelled job of 64 ranks leaves no leases behind that nobody will use."""
    with running_server(tmp_path) as server:
        ask(server, 1)
        body = json.dumps({"lease_id": lease_id(2), "holder": HOLDER, "wait_seconds": 25})
        head = f"POST /v1/ns/default/keys/{KEY}/acquire HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
            for _ in range(5):
                httpx.get(f"{server.url}/readyz")
        # Every round trip after the hang-up is one more turn of the server's loop.
        for _ in range(5):
            httpx.get(f"{server.url}/readyz")
        httpx.delete(f"{server.url}/v1/ns/default/leases/{lease_id(1)}")
        assert ask(server, 3).json()["state"] == "leased"
        assert rows(server.data_dir, "SELECT count(*) FROM leases") == [(2,)]


def test_killed_server_loses_no_lease(tmp_path: Path) -> None:
    """The holder's lease and its id survive SIGKILL; whoever asks meanwhile waits."""
    with running_server(tmp_path) as server:
        epoch = ask(server, 1).json()["epoch"]
        server.kill()
        server.start()
        assert ask(server, 2).json()["state"] == "busy"
        assert ask(server, 1).json()["epoch"] == epoch
        beat = httpx.post(f"{server.url}/v1/ns/default/leases/{lease_id(1)}/heartbeat", json={})
        assert beat.json()["epoch"] == epoch
        assert rows(server.data_dir, "SELECT count(*) FROM leases WHERE status = 'live'") == [(1,)]


def test_stopped_server_robs_nobody_when_it_goes_on(tmp_path: Path) -> None:
    """SIGSTOP past the TTL under a live holder."""
    env = {
        "NEFFCACHE_SERVER_TTL_SECONDS": "2",
        "NEFFCACHE_SERVER_PROVISIONAL_SECONDS": "2",
        "NEFFCACHE_SERVER_OUTAGE_SECONDS": "1",
    }
    with running_server(tmp_path, env=env) as server:
        ask(server, 1)
        server.pause()
        answers: list[httpx.Response] = []
        asker = threading.Thread(target=lambda: answers.append(ask(server, 2)))
        asker.start()
        # The lease has to run out by the real clock, while the server stands still.
        threading.Event().wait(3.0)
        server.resume()
        asker.join()
        assert answers[0].json()["state"] == "busy"
        beat = httpx.post(f"{server.url}/v1/ns/default/leases/{lease_id(1)}/heartbeat", json={})
        assert beat.status_code == 200
        assert "no heartbeat could be taken" in server.log


def test_second_server_on_the_same_data_is_refused(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        second = neffcache("serve", "--port", "0", "--data-dir", str(server.data_dir))
        assert second.returncode == 2
        assert "another server uses the data folder" in second.stderr


def test_taken_port_is_a_sentence(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        second = neffcache("serve", "--port", str(server.port), "--data-dir", str(tmp_path / "other"))
        assert second.returncode == 2
        assert f"cannot listen on 127.0.0.1:{server.port}" in second.stderr
        assert "Traceback" not in second.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("serve", "--workers", "4"), "one process"),
        (("serve", "--storage-url", "ftp://x"), "STORAGE_URL"),
        (("serve", "--data-dir", "/proc/nothing"), "cannot be used"),
        (("db", "upgrade", "--database-url", "mysql://x/y"), "unsupported database"),
    ],
)
def test_unusable_set_up_is_a_sentence(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    data = () if "--data-dir" in arguments else ("--data-dir", str(tmp_path))
    result = neffcache(*arguments, *data)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_unknown_setting_stops_the_server(tmp_path: Path) -> None:
    env = {"NEFFCACHE_SERVER_DATADIR": "x", "PATH": "/usr/bin"}
    result = neffcache("serve", "--data-dir", str(tmp_path), env=env)
    assert result.returncode == 2
    assert "did you mean NEFFCACHE_SERVER_DATA_DIR?" in result.stderr


def test_access_log_blots_out_lease_ids(tmp_path: Path) -> None:
    with running_server(tmp_path, arguments=("--access-log", "--log-level", "info")) as server:
        ask(server, 1)
        httpx.post(f"{server.url}/v1/ns/default/leases/{lease_id(1)}/heartbeat", json={})
        server.stop()
        assert "/leases/***/heartbeat" in server.log
        assert lease_id(1) not in server.log


def test_database_can_be_checked_and_upgraded_by_hand(tmp_path: Path) -> None:
    data = ("--data-dir", str(tmp_path))
    assert neffcache("db", "check", *data).returncode == 1
    assert neffcache("db", "upgrade", *data).returncode == 0
    assert neffcache("db", "upgrade", *data).returncode == 0
    assert neffcache("db", "check", *data).returncode == 0


def test_database_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    neffcache("db", "upgrade", "--data-dir", str(tmp_path))
    with sqlite3.connect(tmp_path / "neffcache.sqlite3") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    result = neffcache("serve", "--port", "0", "--data-dir", str(tmp_path))
    assert result.returncode == 2
    assert "newer version" in result.stderr
