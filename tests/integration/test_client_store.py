"""The client at the object store's door: what it brings, and what a refusal there means."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from neffcache_client import errand
from support.node import NEFF, Node
from support.scripted_server import Reply, ScriptedServer, hit, leased

SHA = hashlib.sha256(NEFF).hexdigest()
DENIED = Reply(status=403, body=b"<?xml version='1.0'?><Error><Code>RequestTimeTooSkewed</Code></Error>")


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def node(tmp_path: Path, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr(errand, "start_in_background", lambda settings: None)
    return Node(tmp_path / "host", server.url, NEFFCACHE_TOKEN="secret")


def presigned(server: ScriptedServer) -> Reply:
    return Reply({"how": "presigned", "url": f"{server.url}/store/x", "headers": {"if-none-match": "*"}})


def test_a_refusal_by_the_store_is_tried_again_under_another_url(node: Node, server: ScriptedServer) -> None:
    """It is no word about our token or lease: a URL that ran out looks just like that."""
    server.script("acquire", leased())
    server.script("upload", presigned(server), presigned(server))
    server.script("put", DENIED)
    assert node.obtain().reason is None
    assert len(server.calls("upload")) == 2
    assert len(server.calls("put")) == 2


def test_a_refused_download_names_the_store_and_its_reason(node: Node, server: ScriptedServer) -> None:
    server.script("acquire", hit(SHA, len(NEFF)))
    redirect = Reply(status=307, headers={"location": f"{server.url}/store/x"})
    server.script("get", redirect, DENIED, redirect, DENIED)
    got = node.obtain()
    assert (got.verdict, got.reason) == ("fallback", "download_failed")
    assert "object store answered 403 (RequestTimeTooSkewed)" in "\n".join(node.log)


def test_a_store_under_the_servers_own_name_gets_no_token_either(node: Node, server: ScriptedServer) -> None:
    """One proxy for both: stores refuse a request that carries two kinds of credentials."""
    server.script("acquire", leased())
    server.script("upload", presigned(server))
    assert node.obtain().reason is None
    (put,) = server.calls("put")
    assert "authorization" not in put.headers
    server.script("acquire", hit(SHA, len(NEFF)))
    server.script("get", Reply(status=307, headers={"location": "/store/x"}), Reply(body=NEFF))
    assert node.obtain("cd" * 32, output="other.neff").verdict == "remote"
    first, second = server.calls("get")
    assert first.headers["authorization"] == "Bearer secret"
    assert "authorization" not in second.headers
