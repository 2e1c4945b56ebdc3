"""UC-25: artifacts of every size, by presigned URL and through the server, whose memory stays as it is."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from neffcache_client.api import CacheClient
from neffcache_client.errors import NeffEmpty, RequestRefused
from neffcache_client.neff import check_neff
from neffcache_client.settings import ClientSettings
from neffcache_client.transfer import download, upload
from neffcache_client.wire import AcquireRequest, Artifact, Holder, PublishRequest, UploadRequest
from support import backends
from support.backends import Production
from support.postgres import Postgres
from support.s3 import S3
from support.server import ServerProcess, running_server
from support.sized_neff import write_neff

KIB, MIB = 1 << 10, 1 << 20
SIZES = [16 * KIB, 5 * MIB - 1, 5 * MIB, 64 * MIB, 64 * MIB + 1, 300 * MIB]
if os.environ.get("NEFFCACHE_TEST_2GIB"):
    SIZES.append(2 << 30)


@pytest.fixture(scope="module", params=["all", "none"], ids=["presigned", "streamed"])
def server(
    request: pytest.FixtureRequest, postgres: Postgres, s3: S3, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    env = {"NEFFCACHE_SERVER_S3_PRESIGN": request.param}
    with (
        backends.using(Production(postgres, s3)),
        running_server(tmp_path_factory.mktemp("sizes"), env=env) as running,
    ):
        yield running


@pytest.fixture
def client(server: ServerProcess, tmp_path: Path) -> Iterator[CacheClient]:
    settings = ClientSettings.from_env(
        {"NEFFCACHE_URL": server.url, "TORCH_NEURONX_NEFF_CACHE_DIR": str(tmp_path / "tier")}
    )
    with CacheClient(settings) as made:
        yield made


def leased(client: CacheClient) -> str:
    lease = secrets.token_hex(16)
    holder = Holder(host="h", boot="b", pid=1)
    answer = client.acquire(secrets.token_hex(32), AcquireRequest(lease_id=lease, holder=holder))
    assert answer.state == "leased"
    return lease


def peak_rss(pid: int) -> int:
    """Bytes; the most that a process ever had in memory."""
    (line,) = [x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmHWM")]
    return int(line.split()[1]) * KIB


def through_the_server(s3: S3, since: int) -> int:
    """Bytes that the server itself sent to the store or got from it."""
    return sum(seen.received + seen.sent for seen in s3.seen()[since:] if seen.agent.startswith("Boto3"))


def round_trip(client: CacheClient, tmp_path: Path, size: int) -> None:
    """Up, published, down; equal."""
    source, copy = tmp_path / "up.neff", tmp_path / "down.neff"
    write_neff(source, size)
    info = check_neff(source)
    lease = leased(client)
    upload(client, lease, str(source), info)
    answer = client.publish(lease, PublishRequest(sha256=info.sha256, size=size, compile_seconds=3600.0))
    artifact: Artifact = answer.artifact
    assert (artifact.size, artifact.compiler_version, artifact.target) == (size, "2.26.0+abc", "trn2")
    download(client, artifact, str(copy))
    with copy.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == info.sha256
    source.unlink()
    copy.unlink()


@pytest.mark.slow
def test_every_size_comes_down_as_it_went_up(
    server: ServerProcess, client: CacheClient, s3: S3, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    round_trip(client, tmp_path, SIZES[0])
    memory = peak_rss(server.pid)
    for size in SIZES:
        since = len(s3.seen())
        round_trip(client, tmp_path, size)
        passed = through_the_server(s3, since)
        if "presigned" in request.node.name:
            # What it reads to learn of the compiler, and what was on its way when it had read enough.
            assert passed < 16 * MIB, size
        else:
            assert passed >= 2 * size
    assert peak_rss(server.pid) - memory < 64 * MIB


def test_empty_artifact_is_refused_by_both_sides(client: CacheClient, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(NeffEmpty):
        check_neff(tmp_path / "empty")
    with pytest.raises(RequestRefused, match="0"):
        client.upload_target(hashlib.sha256(b"").hexdigest(), leased(client), UploadRequest(size=0))
