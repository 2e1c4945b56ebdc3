"""Two workers behind one address tell one truth: /metrics and /v1/stats, whichever of them answers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support import backends
from support.backends import Embedded, Production
from support.cache_state import lease_id, neff
from support.postgres import Postgres
from support.s3 import S3
from support.server import ServerProcess, running_server
from support.waiting import wait_until

KEY, FAILING = "a" * 64, "b" * 64
NEFF = neff("one")
SHA = hashlib.sha256(NEFF).hexdigest()
ASKERS = 48
COMPILE_SECONDS = 100.0
# Nobody but a scrape writes what a worker has gathered: what differs between workers stays to be seen.
SELDOM = {"NEFFCACHE_SERVER_FLUSH_SECONDS": "600"}

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def production(postgres: Postgres, s3: S3) -> Iterator[Embedded]:
    with backends.using(Production(postgres, s3)) as chosen:
        yield chosen


class Api:
    """Every call on a connection of its own, so that any worker may take it."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self._server.url + path, timeout=60).raise_for_status()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        answer = httpx.post(f"{self._server.url}/v1/ns/default/{path}", json=body, timeout=60).raise_for_status()
        return answer.json() if answer.content else None

    def ask(self, key: str, number: int, *, host: str, wait: float = 0) -> Any:
        holder = {"host": host, "boot": "b", "pid": number, "rank": number, "job": "train"}
        body = {"lease_id": lease_id(number), "holder": holder, "wait_seconds": wait}
        return self.post(f"keys/{key}/acquire", body)

    def publish(self, number: int) -> None:
        headers = {"neffcache-lease": lease_id(number)}
        url = f"{self._server.url}/v1/ns/default/blobs/{SHA}"
        httpx.put(url, content=NEFF, headers=headers, timeout=60).raise_for_status()
        body = {"sha256": SHA, "size": len(NEFF), "compile_seconds": COMPILE_SECONDS}
        self.post(f"leases/{lease_id(number)}/publish", body)

    def scrape(self) -> tuple[str, Samples]:
        """The worker that answered, and all that is not said to be its own."""
        worker, found = "", {}
        for family in text_string_to_metric_families(self.get("/metrics").text):
            for sample in family.samples:
                if "worker" in sample.labels:
                    worker = sample.labels["worker"]
                else:
                    found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
        return worker, found


def workers_of(server: ServerProcess) -> set[str]:
    return set(Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split())


def by_worker(api: Api, workers: set[str]) -> dict[str, list[Samples]]:
    """Scrapes until each worker has answered, several at once: one that is idle would take all."""
    found: dict[str, list[Samples]] = {}

    def enough() -> bool:
        with ThreadPoolExecutor(8) as scrapers:
            for worker, samples in scrapers.map(lambda _: api.scrape(), range(16)):
                found.setdefault(worker, []).append(samples)
        return set(found) == workers

    wait_until(enough, what="both workers were scraped")
    return found


def test_either_worker_tells_what_was_done_on_both(production: Embedded, tmp_path: Path) -> None:
    """Ranks wait on both workers, hit on both, fail on both."""
    log = ("--log-format", "json", "--log-level", "info", "--access-log")
    with running_server(tmp_path, env=SELDOM, arguments=("--workers", "2", *log)) as server:
        api, workers = Api(server), workers_of(server)
        by_worker(api, workers)  # what a worker remembers of an empty server must not stay
        assert api.ask(KEY, 1, host="h0")["state"] == "leased"
        api.post(f"leases/{lease_id(1)}/heartbeat", {})
        with ThreadPoolExecutor(ASKERS) as ranks:
            asked = [ranks.submit(api.ask, KEY, 100 + n, host=f"h{1 + n % 8}", wait=25) for n in range(ASKERS)]
            api.publish(1)
            answers = [a.result() for a in asked]
            answers += ranks.map(lambda n: api.ask(KEY, 200 + n, host=f"h{1 + n % 8}"), range(ASKERS))
            assert api.ask(FAILING, 2, host="h0")["state"] == "leased"
            body = {"kind": "deterministic", "exit_code": 70, "code": "NCC_EOOM001", "log_tail": "no"}
            api.post(f"leases/{lease_id(2)}/fail", body)
            failed = list(ranks.map(lambda n: api.ask(FAILING, 300 + n, host=f"h{1 + n % 8}"), range(ASKERS)))
        assert {a["state"] for a in answers} == {"hit"}
        assert {a["state"] for a in failed} == {"failed"}
        took = [line for line in server.log.splitlines() if f"keys/{KEY}/acquire" in line or "/keys/***" in line]
        assert all(any(f'"pid": {pid}' in line for line in took) for pid in workers), "both served ranks"

        by_worker(api, workers)  # a scrape writes what the worker that answers has gathered
        scrapes = by_worker(api, workers)
        truth = next(iter(scrapes.values()))[0]
        assert all(samples == truth for of_worker in scrapes.values() for samples in of_worker)

        ours = (("namespace", "default"),)
        counted = {
            (dict(labels)["verdict"], dict(labels)["reason"]): value
            for (name, labels), value in truth.items()
            if name == "neffcache_requests_total"
        }
        hits = counted.pop(("waited", ""), 0) + counted.pop(("remote", ""), 0)
        assert hits == 2 * ASKERS
        assert counted == {("compiled", ""): 1, ("failed", "deterministic"): ASKERS + 1}
        assert truth["neffcache_served_bytes_total", ours] == (2 * ASKERS + 1) * len(NEFF)
        assert truth["neffcache_compile_seconds_total", ours] >= COMPILE_SECONDS
        assert truth["neffcache_compile_saved_seconds_total", ours] == 8 * COMPILE_SECONDS, "once a host"
        assert truth["neffcache_published_total", ours] == truth["neffcache_entries", ours] == 1
        assert truth["neffcache_stored_bytes", ours] == len(NEFF)
        assert truth["neffcache_failures_in_force", ours] == 1

        for _ in range(8):
            stats = api.get("/v1/stats?namespace=default").json()
            assert stats["verdicts"] == {
                "compiled": 1,
                "failed": ASKERS + 1,
                "remote": stats["verdicts"]["remote"],
                "waited": hits - stats["verdicts"]["remote"],
            }
            assert (stats["hits"], stats["misses"], stats["publishes"]) == (2 * ASKERS, 2, 1)
            assert stats["bytes_served"] == truth["neffcache_served_bytes_total", ours]
            assert stats["waited_seconds"] == pytest.approx(truth["neffcache_waited_seconds_total", ours])
            assert stats["compile_seconds_saved"] == truth["neffcache_compile_saved_seconds_total", ours]
            assert (stats["entries"], stats["bytes"]) == (1, len(NEFF))
