"""Blobs in a real S3: presigned both ways, checked at publish; what is missing, forbidden or away."""

from __future__ import annotations

import base64
import hashlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import backends
from support.backends import Production
from support.cache_state import lease_id, neff
from support.postgres import Postgres
from support.s3 import BUCKET, S3
from support.server import ServerProcess, running_server

TOKEN = "a-token-that-nobody-but-us-may-see"
HOLDER = {"host": "h0", "boot": "b0", "pid": 7}
KEY = "a" * 64


@pytest.fixture(scope="module")
def backend(postgres: Postgres, s3: S3) -> Iterator[Production]:
    with backends.using(Production(postgres, s3)) as production:
        assert isinstance(production, Production)
        yield production


@pytest.fixture(scope="module")
def server(backend: Production, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("s3"), env={"NEFFCACHE_SERVER_ADMIN_TOKEN": TOKEN}) as running:
        yield running


class Api:
    """Calls in a namespace of its own."""

    numbers = iter(range(1, 1000))

    def __init__(self, server: ServerProcess, backend: Production) -> None:
        self.namespace = f"ns-{next(self.numbers)}"
        headers = {"authorization": f"Bearer {TOKEN}"}
        self.http = httpx.Client(base_url=f"{server.url}/v1/ns/{self.namespace}/", headers=headers, timeout=60)
        self._where = (backend, server.data_dir)

    def lease(self, key: str = KEY) -> str:
        lease = lease_id(next(self.numbers))
        answer = self.http.post(f"keys/{key}/acquire", json={"lease_id": lease, "holder": HOLDER}).json()
        assert answer["state"] == "leased", answer
        return lease

    def ticket(self, lease: str, data: bytes, size: int | None = None) -> dict[str, Any]:
        answer = self.http.post(
            f"blobs/{digest(data)}/upload",
            json={"size": len(data) if size is None else size},
            headers={"neffcache-lease": lease},
        )
        assert answer.status_code == 200, answer.text
        ticket: dict[str, Any] = answer.json()
        return ticket

    def publish(self, lease: str, data: bytes) -> httpx.Response:
        body = {"sha256": digest(data), "size": len(data), "compile_seconds": 1.0}
        return self.http.post(f"leases/{lease}/publish", json=body)

    def published(self, data: bytes, key: str = KEY) -> str:
        lease = self.lease(key)
        ticket = self.ticket(lease, data)
        assert httpx.put(ticket["url"], content=data, headers=ticket["headers"]).status_code == 200
        outcome: str = self.publish(lease, data).json()["outcome"]
        return outcome

    def object(self, data: bytes) -> dict[str, str]:
        backend, folder = self._where
        return {"Bucket": BUCKET, "Key": f"{backend.prefix(folder)}/{self.namespace}/{digest(data)}"}


@pytest.fixture
def api(server: ServerProcess, backend: Production) -> Iterator[Api]:
    made = Api(server, backend)
    with made.http:
        yield made


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def names(s3: S3) -> list[str]:
    return s3.keys()


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]


def test_bytes_go_and_come_by_presigned_url_and_no_token_does(
    api: Api, server: ServerProcess, s3: S3, tmp_path: Path
) -> None:
    """Any client that follows a redirect will do, and the store never sees what opens our door."""
    before, data = len(s3.seen()), neff("direct")
    assert api.published(data) == "published"
    url = f"{api.http.base_url}blobs/{digest(data)}"
    redirect = api.http.get(url)
    assert redirect.status_code == 307
    assert redirect.headers["location"].startswith(s3.endpoint)
    assert api.http.get(url, follow_redirects=True).content == data
    copy = tmp_path / "copy"
    curl = ["curl", "-sfL", "-H", f"Authorization: Bearer {TOKEN}", "-o", str(copy), url]
    subprocess.run(curl, check=True)
    assert copy.read_bytes() == data
    by_clients = [seen for seen in s3.seen()[before:] if not seen.agent.startswith("Boto3")]
    assert [seen.method for seen in by_clients] == ["PUT", "GET", "GET"]
    assert {(seen.authorization, seen.ours) for seen in by_clients} == {("", "")}
    assert TOKEN not in (s3.folder / "access.log").read_text()
    entry = api.http.get(f"entries/{KEY}").json()
    assert (entry["compiler_version"], entry["target"]) == ("2.26.0+abc", "trn2")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data, headers: (data[:-1] + b"x", headers),
        lambda data, headers: (data[:-1], {**headers, "content-length": str(len(data) - 1)}),
        lambda data, headers: (data, {k: v for k, v in headers.items() if k != "x-amz-checksum-sha256"}),
        lambda data, headers: (data, {k: v for k, v in headers.items() if k != "if-none-match"}),
    ],
    ids=["other bytes", "fewer bytes", "no checksum", "unconditional"],
)
def test_store_takes_nothing_but_what_was_signed(api: Api, spoil: Any, s3: S3) -> None:
    data, lease = neff("signed"), api.lease()
    ticket = api.ticket(lease, data)
    body, headers = spoil(data, ticket["headers"])
    assert httpx.put(ticket["url"], content=body, headers=headers).status_code in (400, 403)
    assert code(api.publish(lease, data)) == (422, "blob_not_uploaded")
    assert api.http.get(f"entries/{KEY}").status_code == 404


def test_what_is_no_neff_is_refused_at_publish_and_removed(api: Api, s3: S3) -> None:
    data, lease = b"not a NEFF" * 1000, api.lease()
    ticket = api.ticket(lease, data)
    assert httpx.put(ticket["url"], content=data, headers=ticket["headers"]).status_code == 200
    assert code(api.publish(lease, data)) == (422, "neff_not_a_container")
    assert api.object(data)["Key"] not in names(s3)
    cut = neff("cut")[:-10]
    ticket = api.ticket(lease, cut)
    assert httpx.put(ticket["url"], content=cut, headers=ticket["headers"]).status_code == 200
    assert api.publish(lease, cut).status_code == 422
    assert api.object(cut)["Key"] not in names(s3)


@pytest.mark.parametrize("size", [0, 1, 1024])
def test_no_neff_is_that_small(api: Api, size: int) -> None:
    """UC-25: an empty artifact is refused before it is sent."""
    answer = api.http.post(
        f"blobs/{digest(b'')}/upload", json={"size": size}, headers={"neffcache-lease": api.lease()}
    )
    assert code(answer) == (422, "neff_invalid")


def test_only_what_this_lease_uploaded_is_published(api: Api, s3: S3) -> None:
    data = neff("mine")
    s3.client().put_object(**api.object(data), Body=data)
    assert code(api.publish(api.lease(), data)) == (422, "blob_not_uploaded")


def test_object_without_a_checksum_is_read_and_digested(api: Api, s3: S3) -> None:
    """A store that computes none, or one that ignored the condition."""
    good, bad = neff("good"), neff("bad")
    for data, outcome in ((good, 200), (bad, 422)):
        lease = api.lease(digest(data))
        api.ticket(lease, data)
        s3.client().put_object(**api.object(data), Body=good)
        assert "ChecksumSHA256" not in s3.client().head_object(**api.object(data), ChecksumMode="ENABLED")
        assert api.publish(lease, data).status_code == outcome
    assert api.object(good)["Key"] in names(s3)
    assert api.object(bad)["Key"] not in names(s3)


def test_damaged_object_is_replaced_through_the_server(api: Api, s3: S3) -> None:
    """`If-None-Match` alone would keep it for ever."""
    data, lease = neff("healed"), api.lease()
    s3.client().put_object(**api.object(data), Body=data[:-1])
    ticket = api.ticket(lease, data)
    assert ticket["how"] == "stream"
    headers = {"neffcache-lease": lease}
    assert api.http.put(f"blobs/{digest(data)}", content=data, headers=headers).status_code == 200
    assert api.publish(lease, data).status_code == 200
    assert s3.client().get_object(**api.object(data))["Body"].read() == data


def test_same_bytes_for_two_keys_are_there_already(api: Api) -> None:
    data = neff("twice")
    api.published(data)
    lease = api.lease("b" * 64)
    ticket = api.ticket(lease, data)
    assert httpx.put(ticket["url"], content=data, headers=ticket["headers"]).status_code == 412
    assert api.publish(lease, data).json()["outcome"] == "published"


def test_size_that_an_uploader_claims_removes_nothing(api: Api, s3: S3) -> None:
    data = neff("served")
    api.published(data)
    lease = api.lease("b" * 64)
    api.ticket(lease, data, size=5000)
    assert api.publish(lease, data).status_code == 422
    assert api.object(data)["Key"] in names(s3)
    assert api.http.get(f"blobs/{digest(data)}", follow_redirects=True).content == data


def test_blob_that_disappeared_is_no_redirect(api: Api, s3: S3) -> None:
    """UC-15: 404 from us before any byte, not from the store after it."""
    data = neff("gone")
    api.published(data)
    s3.client().delete_object(**api.object(data))
    assert code(api.http.get(f"blobs/{digest(data)}")) == (404, "blob_missing")
    # The upload alone brings the key back, before it is published.
    assert api.published(data) == "already_present"
    assert api.http.get(f"blobs/{digest(data)}", follow_redirects=True).content == data


def test_store_that_is_away_is_no_missing_blob(api: Api, server: ServerProcess, s3: S3) -> None:
    """Throttling and outages must not send the fleet compiling."""
    data = neff("away")
    api.published(data)
    assert httpx.get(f"{server.url}/readyz").json() == {"status": "ready"}
    with s3.refusing():
        assert code(api.http.get(f"blobs/{digest(data)}")) == (503, "storage_unavailable")
        # No replica would be left to wait with, were all of them to fail this.
        ready = httpx.get(f"{server.url}/readyz")
        assert (ready.status_code, "store" in ready.json()) == (200, True)
        assert api.http.post(f"keys/{KEY}/acquire", json={"lease_id": "f" * 32, "holder": HOLDER}).json()["state"]
    assert api.http.get(f"entries/{KEY}").json()["state"] == "present"
    assert api.http.get(f"blobs/{digest(data)}", follow_redirects=True).content == data


def test_without_presigned_urls_everything_passes_through_the_server(
    backend: Production, s3: S3, tmp_path: Path
) -> None:
    env = {"NEFFCACHE_SERVER_S3_PRESIGN": "none", "NEFFCACHE_SERVER_ADMIN_TOKEN": TOKEN}
    with running_server(tmp_path, env=env) as server, Api(server, backend).http as http:
        data, lease = neff("through" * 100_000), lease_id(9000)
        http.post(f"keys/{KEY}/acquire", json={"lease_id": lease, "holder": HOLDER})
        headers = {"neffcache-lease": lease}
        ticket = http.post(f"blobs/{digest(data)}/upload", json={"size": len(data)}, headers=headers).json()
        assert ticket["how"] == "stream"
        assert http.put(f"blobs/{digest(data)}", content=data, headers=headers).status_code == 200
        body = {"sha256": digest(data), "size": len(data), "compile_seconds": 1.0}
        assert http.post(f"leases/{lease}/publish", json=body).status_code == 200
        blob = f"blobs/{digest(data)}"
        assert http.get(blob).content == data
        part = http.get(blob, headers={"range": "bytes=100-199"})
        assert (part.status_code, part.content) == (206, data[100:200])
        assert http.get(blob, headers={"range": "bytes=-7"}).content == data[-7:]
        assert list((server.data_dir / "staging").iterdir()) == []


def test_ranks_are_told_the_public_address(backend: Production, tmp_path: Path) -> None:
    env = {
        "NEFFCACHE_SERVER_S3_PUBLIC_ENDPOINT_URL": "https://store.example",
        "NEFFCACHE_SERVER_ADMIN_TOKEN": TOKEN,
    }
    with running_server(tmp_path, env=env) as server, Api(server, backend).http as http:
        lease = lease_id(9001)
        http.post(f"keys/{KEY}/acquire", json={"lease_id": lease, "holder": HOLDER})
        headers = {"neffcache-lease": lease}
        ticket = http.post(f"blobs/{KEY}/upload", json={"size": 5000}, headers=headers).json()
        assert ticket["url"].startswith(f"https://store.example/{BUCKET}/")
        assert "x-amz-checksum-sha256" in ticket["url"]
        assert ticket["headers"]["x-amz-checksum-sha256"] == base64.b64encode(bytes.fromhex(KEY)).decode()


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"NEFFCACHE_SERVER_STORAGE_URL": "s3://no-such-bucket/x"}, "does not exist; create it"),
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "refuses the server's credentials"),
        ({"NEFFCACHE_SERVER_S3_CA_FILE": "/nonexistent.pem"}, None),
    ],
)
def test_store_that_cannot_be_used_is_a_sentence_at_start(
    backend: Production, s3: S3, tmp_path: Path, env: dict[str, str], words: str | None
) -> None:
    buckets = [b["Name"] for b in s3.client().list_buckets()["Buckets"]]
    if words is None:
        # Plain http needs no certificates: nothing is wrong before they are used.
        with running_server(tmp_path, env=env):
            return
    with pytest.raises(AssertionError) as failed, running_server(tmp_path, env=env):
        pass
    assert words in str(failed.value)
    assert "Traceback" not in str(failed.value)
    assert [b["Name"] for b in s3.client().list_buckets()["Buckets"]] == buckets
