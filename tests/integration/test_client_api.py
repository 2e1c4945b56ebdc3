"""What the client's HTTP side promises its callers: its own errors, and its own addresses."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from neffcache_client.api import CacheClient
from neffcache_client.errors import CacheUnavailable
from neffcache_client.settings import ClientSettings
from neffcache_client.wire import HeartbeatRequest
from support.node import NEFF, Node
from support.scripted_server import Reply, ScriptedServer, hit, leased

SHA = hashlib.sha256(NEFF).hexdigest()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


def client(url: str) -> CacheClient:
    return CacheClient(ClientSettings.from_env({"NEFFCACHE_URL": url}))


def test_a_call_on_a_closed_client_raises_as_every_other_does(server: ScriptedServer) -> None:
    """A heartbeat that begins while its job ends must not print a traceback among the compiler's words."""
    one = client(server.url)
    one.close()
    with pytest.raises(CacheUnavailable, match="closed"):
        one.heartbeat("0" * 32, HeartbeatRequest())


@pytest.mark.parametrize("location", ["http://[::1", "http://h:port/x", "http://\x7f/"])
def test_a_redirect_to_nowhere_is_a_fault_of_the_server(server: ScriptedServer, location: str) -> None:
    server.script("get", Reply(status=307, headers={"location": location}))
    with client(server.url) as one, pytest.raises(CacheUnavailable), one.get(f"/v1/ns/default/blobs/{SHA}"):
        pass


def test_a_server_below_a_proxys_folder_is_used_whole(tmp_path: Path, server: ScriptedServer) -> None:
    """What it calls a path begins where NEFFCACHE_URL ends, for blobs too."""
    url = f"{server.url}/tools/neffcache"
    server.script("acquire", leased())
    server.script("upload", Reply({"how": "stream", "url": f"/v1/ns/default/blobs/{SHA}"}))
    assert Node(tmp_path / "a", url).obtain().reason is None
    server.script("acquire", hit(SHA, len(NEFF)))
    server.script("get", Reply(body=NEFF))
    assert Node(tmp_path / "b", url).obtain().verdict == "remote"
    assert {seen.path.startswith("/tools/neffcache/v1/") for seen in server.seen} == {True}


def test_an_artifact_that_is_not_the_servers_own_is_not_reported_to_it(server: ScriptedServer) -> None:
    with client(server.url) as one, pytest.raises(CacheUnavailable):
        one.report_damage(SHA, url="http://elsewhere/blob")
    assert server.seen == []


def test_a_name_that_is_no_unicode_does_not_cut_a_host_off(tmp_path: Path, server: ScriptedServer) -> None:
    """Bytes of a job's name in another encoding: neither its request nor its host's breaker may fail over them."""
    server.script("acquire", leased(), leased())
    node = Node(tmp_path, server.url, NEFFCACHE_JOB="caf\udce9")
    assert node.obtain().verdict == "compiled"
    assert server.calls("acquire")[0].json["holder"]["job"] == "caf?"
    assert node.warnings() == []
