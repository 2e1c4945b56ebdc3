"""One replica as a process: workers, an end without losses, names of requests, logs."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from support import backends
from support.backends import Embedded, Production
from support.cache_state import lease_id
from support.postgres import Postgres
from support.s3 import S3
from support.server import ServerProcess, running_server
from support.waiting import wait_until

HOLDER = {"host": "h0", "boot": "b0", "pid": 7}
KEY = "a" * 64
JSON_LOG = ("--log-format", "json", "--log-level", "info", "--access-log")


@pytest.fixture
def production(postgres: Postgres, s3: S3) -> Iterator[Embedded]:
    with backends.using(Production(postgres, s3)) as chosen:
        yield chosen


def ask(server: ServerProcess, number: int, wait: float = 0) -> httpx.Response:
    body = {"lease_id": lease_id(number), "holder": HOLDER, "wait_seconds": wait}
    return httpx.post(f"{server.url}/v1/ns/default/keys/{KEY}/acquire", json=body, timeout=60)


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def lines(server: ServerProcess) -> list[dict[str, object]]:
    return [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]


def test_workers_share_a_port_and_wake_each_others_waiters(production: Embedded, tmp_path: Path) -> None:
    with running_server(tmp_path, arguments=("--workers", "2", *JSON_LOG)) as server:
        assert len(children(server.pid)) == 2
        assert ask(server, 1).json()["state"] == "leased"
        httpx.post(f"{server.url}/v1/ns/default/leases/{lease_id(1)}/heartbeat", json={})
        with ThreadPoolExecutor(40) as waiters:
            answers = [waiters.submit(ask, server, n, 25) for n in range(100, 140)]
            query = "SELECT count(*) FROM leases WHERE status = 'live'"
            wait_until(lambda: production.rows(server.data_dir, query) == [(1,)])
            report = {"kind": "deterministic", "exit_code": 70, "log_tail": "why"}
            httpx.post(f"{server.url}/v1/ns/default/leases/{lease_id(1)}/fail", json=report)
            assert {a.result().json()["state"] for a in answers} == {"failed"}
        assert len({line["pid"] for line in lines(server) if line.get("method") == "POST"}) == 2
        assert server.stop() == 0


def test_worker_that_dies_is_replaced(production: Embedded, tmp_path: Path) -> None:
    with running_server(tmp_path, arguments=("--workers", "2")) as server:
        before = children(server.pid)
        os.kill(before[0], signal.SIGKILL)
        wait_until(lambda: len(set(children(server.pid)) - {before[0]}) == 2, what="a new worker")
        assert ask(server, 1).status_code == 200
        assert server.stop() == 0


def test_workers_end_with_their_parent(production: Embedded, tmp_path: Path) -> None:
    with running_server(tmp_path, arguments=("--workers", "2")) as server:
        workers = children(server.pid)
        server.kill()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), what="no worker is left")


def test_waiters_are_sent_elsewhere_when_a_replica_ends(backend: Embedded, tmp_path: Path) -> None:
    """At once, with a reason that a client retries on."""
    with running_server(tmp_path) as server, ThreadPoolExecutor(20) as waiters:
        assert ask(server, 1).json()["state"] == "leased"
        httpx.post(f"{server.url}/v1/ns/default/leases/{lease_id(1)}/heartbeat", json={})
        answers = [waiters.submit(ask, server, n, 25) for n in range(100, 120)]
        wait_until(lambda: connections(server) >= 20, what="they wait")
        assert server.stop() == 0
        got = [a.result() for a in answers]
        assert {(a.status_code, a.json()["code"], a.headers["retry-after"]) for a in got} == {
            (503, "shutting_down", "1")
        }


def connections(server: ServerProcess) -> int:
    """Established ones on the server's port, seen from its side."""
    local = f":{server.port:04X}"
    table = Path(f"/proc/{server.pid}/net/tcp").read_text().splitlines()[1:]
    return sum(row.split()[1].endswith(local) and row.split()[3] == "01" for row in table)


def test_every_answer_and_log_line_names_its_request(tmp_path: Path) -> None:
    with running_server(tmp_path, arguments=JSON_LOG) as server:
        own = httpx.get(f"{server.url}/livez").headers["x-request-id"]
        assert re.fullmatch(r"[0-9a-f]{16}", own)
        taken = httpx.get(f"{server.url}/v1/nothing", headers={"x-request-id": "from-the-proxy:7"})
        assert (taken.status_code, taken.headers["x-request-id"]) == (404, "from-the-proxy:7")
        for unusable in ("a b", "x" * 200, '"}{"'):
            other = httpx.get(f"{server.url}/livez", headers={"x-request-id": unusable})
            assert re.fullmatch(r"[0-9a-f]{16}", other.headers["x-request-id"])
        httpx.post(f"{server.url}/v1/ns/default/leases/{lease_id(1)}/heartbeat", json={})
        server.stop()
        logged = {line["request_id"]: line for line in lines(server) if "request_id" in line}
        assert logged[own]["path"] == "/livez"
        line = logged["from-the-proxy:7"]
        assert (line["method"], line["path"], line["status"], line["level"]) == ("GET", "/v1/nothing", 404, "info")
        assert lease_id(1) not in server.log


def test_address_of_the_client_is_believed_from_a_known_proxy_alone(tmp_path: Path) -> None:
    headers = {"x-forwarded-for": "203.0.113.9"}
    for allowed, shown in (("127.0.0.1", "203.0.113.9"), ("192.0.2.1", "127.0.0.1")):
        env = {"NEFFCACHE_SERVER_FORWARDED_ALLOW_IPS": allowed}
        with running_server(tmp_path / allowed, env=env, arguments=JSON_LOG) as server:
            httpx.get(f"{server.url}/livez", headers=headers)
            server.stop()
            (line,) = [line for line in lines(server) if line.get("path") == "/livez"]
            assert str(line["client"]).rpartition(":")[0] == shown


def test_replica_does_not_start_on_a_database_that_was_not_migrated(postgres: Postgres, tmp_path: Path) -> None:
    """Migrating is a step of its own: replicas that start together must not race."""
    env = {"NEFFCACHE_SERVER_DATABASE_URL": postgres.url(postgres.create_empty())}
    with pytest.raises(AssertionError, match="run `neffcache db upgrade` first"), running_server(tmp_path, env=env):
        pass
