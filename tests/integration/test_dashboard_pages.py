"""Every page, on each database and store that a server may have."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.neffs import make_neff
from support.server import ServerProcess, running_server

pytestmark = pytest.mark.usefixtures("backend")

KEY, OTHER = "a" * 64, "b" * 64
NEFF = make_neff()
SHA = hashlib.sha256(NEFF).hexdigest()


@pytest.fixture(scope="module")
def server(backend: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """With one artifact, one hit, one failure and one compile under way."""
    env = {"NEFFCACHE_SERVER_GC_UNUSED_SECONDS": "864000", "NEFFCACHE_SERVER_GC_MAX_BYTES": "1000000"}
    folder: Path = tmp_path_factory.mktemp("server")
    with running_server(folder, env=env) as running, httpx.Client(base_url=f"{running.url}/v1/ns/default/") as api:
        lease = acquire(api, KEY, 1)
        api.put(f"blobs/{SHA}", content=NEFF, headers={"neffcache-lease": lease}).raise_for_status()
        body = {"sha256": SHA, "size": len(NEFF), "compile_seconds": 3600.0}
        api.post(f"leases/{lease}/publish", json=body).raise_for_status()
        acquire(api, KEY, 2)
        failed = acquire(api, OTHER, 3)
        body = {"kind": "deterministic", "exit_code": 70, "code": "NCC_EOOM001", "log_tail": "<b>no</b> room"}
        api.post(f"leases/{failed}/fail", json=body).raise_for_status()
        acquire(api, "c" * 64, 4)
        released = acquire(api, "d" * 64, 5)
        api.delete(f"leases/{released}").raise_for_status()
        yield running


def acquire(api: httpx.Client, key: str, number: int) -> str:
    holder = {"host": f"h{number}", "boot": f"b{number}", "pid": number, "rank": number, "job": "train"}
    lease = f"{number:032x}"
    asked = {"lease_id": lease, "holder": holder, "factors": {"recipe": 1, "target": "trn2"}}
    api.post(f"keys/{key}/acquire", json=asked).raise_for_status()
    return lease


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/", "NCC_EOOM001"),
        ("/", "&lt;b&gt;no&lt;/b&gt; room"),
        ("/?namespace=default", "rank 4"),
        ("/savings?range=24h", "1.0 h spent"),
        ("/savings?range=7d", "Jobs that saved most"),
        ("/savings?range=30d&price=12.5", "12.50"),
        ("/savings?range=1y", "fetched from the server"),
        ("/graphs", "aaaaaaaaaaaa"),
        ("/graphs?q=H1&sort=hits&up=true", "aaaaaaaaaaaa"),
        ("/graphs?q=aaaa&sort=used", "aaaaaaaaaaaa"),
        ("/graphs?sort=size&namespace=other", "No graph is stored yet"),
        (f"/graphs/default/{KEY}", "trn2"),
        (f"/graphs/default/{OTHER}", "is answered with <strong>NCC_EOOM001</strong>"),
        (f"/graphs/default/{'c' * 64}", "Rank 4 on h4 compiles it"),
        (f"/graphs/default/{'d' * 64}", "Nothing is published under this key"),
        (f"/graphs/default/{OTHER}", "Nearest stored graph"),
        ("/jobs?q=TRA&sort=saved_seconds", "train"),
        ("/jobs/show?namespace=default&job=train", "rank 1 · h1"),
        ("/storage", "may have 976.6 KiB and has"),
        ("/storage?namespace=default", "Not used, 10 days"),
        ("/health", "answered in"),
        ("/metrics", 'neffcache_compile_saved_seconds_total{namespace="default"} 3600.0'),
    ],
)
def test_a_page_says_what_happened(path: str, says: str, server: ServerProcess) -> None:
    answer = httpx.get(server.url + path, timeout=30)
    assert answer.status_code == 200
    assert says in answer.text
