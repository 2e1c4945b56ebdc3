"""The HTTP API of a real server process."""

from __future__ import annotations

import hashlib
import itertools
import socket
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from neffcache_server.app import create_app
from support.backends import Embedded
from support.cache_state import lease_id, neff, server_settings
from support.neffs import REAL_VERSION, real_neff
from support.server import ServerProcess, running_server
from support.waiting import wait_until

_numbers = itertools.count(1)
HOLDER = {"host": "h0", "boot": "b0", "pid": 7, "rank": 3, "job": "job-1"}


@pytest.fixture(scope="module")
def server(backend: Embedded, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    env = {"NEFFCACHE_SERVER_BUSY_SECONDS": "0.3", "NEFFCACHE_SERVER_MAX_BLOB_BYTES": str(8 << 20)}
    with running_server(tmp_path_factory.mktemp("server"), env=env) as running:
        yield running


@pytest.fixture
def api(server: ServerProcess) -> Iterator[httpx.Client]:
    """A client in a namespace of its own."""
    url = f"{server.url}/v1/ns/ns-{next(_numbers)}/"
    # Blobs may come from the store itself.
    with httpx.Client(base_url=url, timeout=60, follow_redirects=True) as client:
        yield client


def leased(api: httpx.Client, key: str = "a" * 64, **given: Any) -> str:
    """Acquire a key and return the lease id."""
    lease = lease_id(next(_numbers))
    answer = api.post(f"keys/{key}/acquire", json={"lease_id": lease, "holder": HOLDER, **given})
    assert answer.json()["state"] == "leased", answer.text
    return lease


def namespace_of(api: httpx.Client) -> str:
    return api.base_url.path.strip("/").rpartition("/")[2]


def put(api: httpx.Client, data: bytes, lease: str | None, sha256: str | None = None) -> httpx.Response:
    headers = {"neffcache-lease": lease} if lease else {}
    return api.put(f"blobs/{sha256 or hashlib.sha256(data).hexdigest()}", content=data, headers=headers)


def published(api: httpx.Client, data: bytes, key: str = "a" * 64, **given: Any) -> str:
    """Bring a NEFF in under a key; returns its digest."""
    lease = leased(api, key, **given)
    sha256 = hashlib.sha256(data).hexdigest()
    assert put(api, data, lease).status_code == 200
    body = {"sha256": sha256, "size": len(data), "compile_seconds": 2.5, "peak_rss_bytes": 5}
    answer = api.post(f"leases/{lease}/publish", json=body)
    assert answer.json()["outcome"] == "published", answer.text
    return sha256


def refused(answer: httpx.Response, status: int, code: str) -> str:
    """Assert a problem document; returns its sentence."""
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json"), answer.text
    problem = answer.json()
    assert (problem["status"], problem["code"]) == (status, code)
    assert problem["detail"]
    return str(problem["detail"])


def test_compile_once_then_hit(api: httpx.Client, server: ServerProcess) -> None:
    data = neff("hit")
    sha256 = published(api, data, factors={"target": "trn2"})
    answer = api.post(f"keys/{'a' * 64}/acquire", json={"lease_id": "f" * 32, "holder": HOLDER}).json()
    assert answer["state"] == "hit"
    artifact = answer["artifact"]
    assert (artifact["sha256"], artifact["size"]) == (sha256, len(data))
    assert (artifact["compiler_version"], artifact["target"]) == ("2.26.0+abc", "trn2")
    assert api.get(server.url + artifact["url"]).content == data
    entry = api.get(f"entries/{'a' * 64}").json()
    assert (entry["factors"], entry["holder"], entry["hits"]) == ({"target": "trn2"}, HOLDER, 1)
    assert entry["peak_rss_bytes"] == 5
    assert api.post("keys/lookup", json={"keys": ["a" * 64, "b" * 64]}).json()["present"].keys() == {"a" * 64}


@pytest.mark.parametrize("name", ["matmul_small.neff", "matmul_large.neff"])
def test_real_neff_comes_down_as_it_went_up(api: httpx.Client, name: str) -> None:
    """Its compiler version and target are shown; the smallest damage is refused."""
    data = real_neff(name).read_bytes()
    sha256 = published(api, data)
    assert api.get(f"blobs/{sha256}").content == data
    entry = api.get(f"entries/{'a' * 64}").json()
    assert (entry["compiler_version"], entry["target"]) == (REAL_VERSION, "trn2")
    lease = leased(api, "b" * 64)
    flipped = bytearray(data)
    flipped[-100] ^= 1
    refused(put(api, bytes(flipped), lease, sha256), 422, "neff_checksum_mismatch")
    refused(put(api, data[:-1], lease, sha256), 422, "neff_truncated")


def test_each_kind_of_damage_has_its_own_answer(api: httpx.Client, server: ServerProcess, backend: Embedded) -> None:
    data, lease = neff("damage"), leased(api)
    flipped = data[:-1] + bytes([data[-1] ^ 1])
    sentences = {
        refused(put(api, flipped, lease), 422, "neff_checksum_mismatch"),
        refused(put(api, data[:-1], lease), 422, "neff_truncated"),
        refused(put(api, data + b"x", lease), 422, "neff_truncated"),
        refused(put(api, b"", lease), 422, "neff_empty"),
        refused(put(api, b"hello\n", lease), 422, "neff_not_a_container"),
        refused(put(api, b"hello world\n" * 1000, lease), 422, "neff_not_a_container"),
        refused(put(api, data, lease, "0" * 64), 422, "digest_mismatch"),
    }
    assert len(sentences) == 7
    assert list(backend.staging(server.data_dir).iterdir()) == []
    body = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "compile_seconds": 1}
    refused(api.post(f"leases/{lease}/publish", json=body), 422, "blob_not_uploaded")


def test_refusal_reaches_a_client_that_is_still_sending(api: httpx.Client) -> None:
    lease = leased(api)
    refused(put(api, b"text, not a NEFF\n" * 300_000, lease), 422, "neff_not_a_container")


def test_upload_needs_a_live_lease_of_the_namespace(api: httpx.Client, server: ServerProcess) -> None:
    data = neff("lease")
    sha256 = hashlib.sha256(data).hexdigest()
    refused(put(api, data, None), 403, "lease_required")
    refused(put(api, data, "nonsense"), 403, "lease_required")
    refused(put(api, data, "e" * 32), 404, "lease_unknown")
    lease = leased(api)
    other = httpx.put(f"{server.url}/v1/ns/other/blobs/{sha256}", content=data, headers={"neffcache-lease": lease})
    refused(other, 404, "lease_unknown")
    api.delete(f"leases/{lease}")
    refused(put(api, data, lease), 409, "lease_ended")
    ticket = api.post(f"blobs/{sha256}/upload", json={"size": 1}, headers={"neffcache-lease": lease})
    refused(ticket, 409, "lease_ended")


def test_publish_takes_only_what_this_lease_uploaded(api: httpx.Client) -> None:
    data = neff("mine")
    sha256 = published(api, data)
    lease = leased(api, "b" * 64)
    body = {"sha256": sha256, "size": len(data), "compile_seconds": 1}
    refused(api.post(f"leases/{lease}/publish", json=body), 422, "blob_not_uploaded")
    assert put(api, data, lease).status_code == 200
    refused(api.post(f"leases/{lease}/publish", json={**body, "size": 1}), 422, "invalid_request")
    assert api.post(f"leases/{lease}/publish", json=body).json()["outcome"] == "published"


def test_lost_answers_can_be_asked_for_again(api: httpx.Client) -> None:
    data, lease = neff("again"), leased(api)
    again = api.post(f"keys/{'a' * 64}/acquire", json={"lease_id": lease, "holder": HOLDER}).json()
    assert again["state"] == "leased"
    assert put(api, data, lease).json() == put(api, data, lease).json()
    body = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "compile_seconds": 1}
    first, second = (api.post(f"leases/{lease}/publish", json=body) for _ in range(2))
    assert first.json() == second.json()
    failing = leased(api, "b" * 64)
    report = {"kind": "deterministic", "exit_code": 70, "code": "NCC_EARG001", "log_tail": "why"}
    first, second = (api.post(f"leases/{failing}/fail", json=report) for _ in range(2))
    assert first.json() == second.json()
    released = leased(api, "c" * 64)
    assert [api.delete(f"leases/{released}").status_code for _ in range(2)] == [204, 204]


def test_superseded_holder_changes_nothing(api: httpx.Client) -> None:
    """UC-01: the artifact of the new holder is untouched."""
    lease = leased(api)
    data, other = neff("old"), neff("new")
    assert put(api, data, lease).status_code == 200
    new = leased(api, supersedes=lease)
    body = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "compile_seconds": 1}
    for path, sent in (("heartbeat", {}), ("publish", body), ("fail", {"kind": "transient", "exit_code": 1})):
        refused(api.post(f"leases/{lease}/{path}", json=sent), 409, "lease_superseded")
    refused(put(api, data, lease), 409, "lease_superseded")
    put(api, other, new)
    body = {"sha256": hashlib.sha256(other).hexdigest(), "size": len(other), "compile_seconds": 1}
    assert api.post(f"leases/{new}/publish", json=body).json()["outcome"] == "published"
    refused(api.post(f"leases/{lease}/heartbeat", json={}), 409, "lease_superseded")


def test_failures_are_listed_and_cleared(api: httpx.Client) -> None:
    """UC-02."""
    lease = leased(api)
    report = {"kind": "deterministic", "exit_code": 70, "code": "NCC_EOOM001", "log_tail": "out of memory"}
    api.post(f"leases/{lease}/fail", json=report)
    (listed,) = api.get("failures").json()["failures"]
    assert (listed["key"], listed["code"], listed["host"]) == ("a" * 64, "NCC_EOOM001", "h0")
    body = {"lease_id": "d" * 32, "holder": HOLDER}
    answer = api.post(f"keys/{'a' * 64}/acquire", json=body).json()
    assert (answer["state"], answer["failure"]["log_tail"]) == ("failed", "out of memory")
    assert api.delete(f"failures/{'a' * 64}").status_code == 204
    refused(api.delete(f"failures/{'a' * 64}"), 404, "failure_unknown")
    assert api.get("failures").json() == {"failures": []}
    leased(api)


def test_entries_are_paged_newest_first_and_removed(api: httpx.Client, server: ServerProcess) -> None:
    keys = [f"{n:064x}" for n in range(5)]
    for key in keys:
        published(api, neff(f"page {key}"), key)
    seen, after = [], None
    while True:
        page = api.get("entries", params={"limit": 2, **({"after": after} if after else {})}).json()
        assert page["total"] == 5
        seen += [entry["key"] for entry in page["entries"]]
        after = page["next"]
        if after is None:
            break
    assert seen == keys[::-1]
    sha256 = api.get(f"entries/{keys[0]}").json()["sha256"]
    assert api.delete(f"entries/{keys[0]}").status_code == 204
    refused(api.delete(f"entries/{keys[0]}"), 404, "entry_unknown")
    refused(api.get(f"entries/{keys[0]}"), 404, "entry_unknown")
    refused(api.get(f"blobs/{sha256}"), 404, "blob_unknown")
    assert list(server.data_dir.glob(f"blobs/*/*/{sha256}")) == []
    leased(api, keys[0])
    refused(api.get("entries", params={"after": "yesterday"}), 422, "invalid_request")


def test_blob_of_two_keys_outlives_one_of_them(api: httpx.Client) -> None:
    data = neff("shared")
    sha256 = published(api, data, "a" * 64)
    assert published(api, data, "b" * 64) == sha256
    api.delete(f"entries/{'a' * 64}")
    assert api.get(f"blobs/{sha256}").content == data


@pytest.mark.embedded
def test_blobs_can_be_had_in_parts(api: httpx.Client) -> None:
    data = neff("parts" * 1000)
    url = f"blobs/{published(api, data)}"
    head = api.head(url)
    assert (head.status_code, int(head.headers["content-length"]), head.content) == (200, len(data), b"")
    etag = head.headers["etag"]
    part = api.get(url, headers={"range": "bytes=100-199"})
    assert (part.status_code, part.content) == (206, data[100:200])
    assert part.headers["content-range"] == f"bytes 100-199/{len(data)}"
    assert api.get(url, headers={"range": "bytes=-7", "if-range": etag}).content == data[-7:]
    assert api.get(url, headers={"range": "bytes=-7", "if-range": '"other"'}).content == data
    assert api.get(url, headers={"if-none-match": etag}).status_code == 304
    refused(api.get(url, headers={"range": f"bytes={len(data)}-"}), 416, "range_not_satisfiable")


def test_no_blob_is_read_across_namespaces(api: httpx.Client, server: ServerProcess) -> None:
    """Nor does an upload say whether another namespace has the same bytes."""
    data = neff("private")
    sha256 = published(api, data)
    refused(httpx.get(f"{server.url}/v1/ns/elsewhere/blobs/{sha256}"), 404, "blob_unknown")
    with httpx.Client(base_url=f"{server.url}/v1/ns/elsewhere/") as other:
        lease = leased(other)
        body = {"sha256": sha256, "size": len(data), "compile_seconds": 1}
        refused(other.post(f"leases/{lease}/publish", json=body), 422, "blob_not_uploaded")


def test_blob_that_disappeared_is_compiled_again_and_heals(
    api: httpx.Client, server: ServerProcess, backend: Embedded
) -> None:
    """UC-15: 404 before any byte, the row is marked, the next rank compiles."""
    data = neff("vanishing")
    sha256 = published(api, data)
    backend.remove_blob(server.data_dir, namespace_of(api), sha256)
    refused(api.get(f"blobs/{sha256}"), 404, "blob_missing")
    assert api.get(f"entries/{'a' * 64}").json()["state"] == "missing"
    assert api.post("keys/lookup", json={"keys": ["a" * 64]}).json() == {"present": {}}
    assert put(api, data, leased(api)).status_code == 200
    assert api.get(f"entries/{'a' * 64}").json()["state"] == "present"
    assert api.get(f"blobs/{sha256}").content == data


def test_blob_cut_short_in_the_store_is_never_served(
    api: httpx.Client, server: ServerProcess, backend: Embedded
) -> None:
    """UC-11."""
    data = neff("cut")
    sha256 = published(api, data)
    backend.replace_blob(server.data_dir, namespace_of(api), sha256, data[:-1])
    refused(api.get(f"blobs/{sha256}"), 404, "blob_missing")
    leased(api)


@pytest.mark.embedded
def test_faulty_store_is_no_missing_blob(api: httpx.Client, server: ServerProcess) -> None:
    sha256 = published(api, neff("faulty"))
    (blob,) = server.data_dir.glob(f"blobs/*/*/{sha256}")
    blob.unlink()
    blob.symlink_to(blob)
    refused(api.get(f"blobs/{sha256}"), 503, "storage_unavailable")
    assert api.get(f"entries/{'a' * 64}").json()["state"] == "present"


@pytest.mark.embedded
def test_faulty_database_is_503(api: httpx.Client, server: ServerProcess) -> None:
    connection = sqlite3.connect(server.data_dir / "neffcache.sqlite3", isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        body = {"lease_id": "c" * 32, "holder": HOLDER}
        answer = api.post(f"keys/{'a' * 64}/acquire", json=body)
        refused(answer, 503, "database_unavailable")
        assert answer.headers["retry-after"] == "1"
    finally:
        connection.close()
    leased(api)


def test_upload_that_breaks_off_leaves_nothing(api: httpx.Client, server: ServerProcess, backend: Embedded) -> None:
    data = neff("broken" * 100_000)
    lease, sha256 = leased(api), hashlib.sha256(data).hexdigest()
    staging = backend.staging(server.data_dir)
    head = (
        f"PUT {httpx.URL(str(api.base_url)).path}blobs/{sha256} HTTP/1.1\r\nhost: x\r\nneffcache-lease: {lease}\r\n"
        f"content-length: {len(data) + 1000}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode() + data[:-5])
        wait_until(lambda: bool(list(staging.iterdir())), what="the upload has begun")
    wait_until(lambda: not list(staging.iterdir()), what="the upload is forgotten")
    refused(api.get(f"blobs/{sha256}"), 404, "blob_unknown")


def test_too_large_bodies_are_refused(api: httpx.Client) -> None:
    lease = leased(api)
    refused(put(api, bytes((8 << 20) + 1), lease), 413, "blob_too_large")
    ticket = api.post(f"blobs/{'a' * 64}/upload", json={"size": 9 << 20}, headers={"neffcache-lease": lease})
    refused(ticket, 413, "blob_too_large")
    large = {"lease_id": "b" * 32, "holder": HOLDER, "factors": {"x": "y" * 300_000}}
    refused(api.post(f"keys/{'b' * 64}/acquire", json=large), 413, "factors_too_large")
    refused(api.post("keys/lookup", content=b" " * (2 << 20)), 413, "body_too_large")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/v1/nothing", None, 404, "route_unknown"),
        ("PATCH", "/v1/stats", None, 405, "method_not_allowed"),
        ("POST", "/v1/ns/x/keys/XYZ/acquire", {}, 422, "invalid_request"),
        ("GET", "/v1/ns/UPPER/entries", None, 422, "invalid_request"),
        ("GET", "/v1/stats?namespace=UPPER", None, 422, "invalid_request"),
        ("POST", "/v1/ns/x/keys/lookup", {"keys": ["a" * 64] * 1001}, 422, "invalid_request"),
        ("POST", "/v1/ns/x/keys/lookup", {"keys": ["short"]}, 422, "invalid_request"),
        ("POST", f"/v1/ns/x/leases/{'a' * 32}/heartbeat", {}, 404, "lease_unknown"),
        ("DELETE", f"/v1/ns/x/leases/{'a' * 32}", None, 404, "lease_unknown"),
        ("DELETE", "/v1/ns/x/leases/nonsense", None, 422, "invalid_request"),
    ],
)
def test_refusals_are_problem_documents(
    server: ServerProcess, method: str, path: str, body: Any, status: int, code: str
) -> None:
    refused(httpx.request(method, server.url + path, json=body), status, code)


def test_lease_ids_are_told_to_nobody(api: httpx.Client, server: ServerProcess) -> None:
    lease = leased(api)
    others = [
        api.post(f"keys/{'a' * 64}/acquire", json={"lease_id": "9" * 32, "holder": HOLDER}),
        api.get("entries"),
        httpx.get(f"{server.url}/v1/stats"),
        api.post(f"keys/{'a' * 64}/acquire", json={"lease_id": "secret!", "holder": HOLDER}),
        api.delete("leases/secret!"),
    ]
    for answer in others:
        assert lease not in answer.text
        assert "secret!" not in answer.text
    assert lease not in server.log


@pytest.mark.embedded
def test_probes(server: ServerProcess, tmp_path: Path) -> None:
    assert httpx.get(f"{server.url}/livez").status_code == 200
    assert httpx.get(f"{server.url}/readyz").status_code == 200
    staging = server.data_dir / "blobs" / ".staging"
    staging.rename(tmp_path / "elsewhere")
    try:
        answer = httpx.get(f"{server.url}/readyz")
        assert (answer.status_code, answer.json()["status"]) == (200, "ready")
        assert "is gone" in answer.json()["store"]
        assert httpx.get(f"{server.url}/livez").status_code == 200
    finally:
        (tmp_path / "elsewhere").rename(staging)
    assert httpx.get(f"{server.url}/readyz").json() == {"status": "ready"}


def test_openapi_documents_errors_as_problems(tmp_path: Path) -> None:
    schema = create_app(server_settings(tmp_path)).openapi()
    assert "HTTPValidationError" not in schema["components"]["schemas"]
    for path, item in schema["paths"].items():
        for method, operation in item.items():
            answers = {int(s): a for s, a in operation["responses"].items() if int(s) >= 400}
            assert 503 in answers or path == "/livez", (method, path)
            for answer in answers.values():
                assert list(answer["content"]) == ["application/problem+json"], (method, path)
                assert answer["description"]
    acquire = schema["paths"]["/v1/ns/{namespace}/keys/{key}/acquire"]["post"]["responses"]
    assert "lease_ended" in acquire["409"]["description"]
