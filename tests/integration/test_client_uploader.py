"""The spool is emptied when the server is back."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from neffcache_client import uploader
from neffcache_client.api import CacheClient
from neffcache_client.spool import Spool, SpoolEntry
from neffcache_client.uploader import PushReport, drain, start_in_background
from support.node import KEY, NEFF, Node
from support.scripted_server import Reply, ScriptedServer, busy, hit, leased, problem
from support.waiting import wait_until

OTHER = "cd" * 32


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def node(tmp_path: Path, server: ScriptedServer) -> Node:
    return Node(tmp_path / "host", server.url)


def spool(node: Node, key: str = KEY, **fields: str) -> None:
    source = node.folder / "source"
    source.write_bytes(NEFF)
    entry = SpoolEntry(key=key, factors={"recipe": 1}, compile_seconds=2.0, **fields)  # type: ignore[arg-type]
    Spool(node.settings.tier_dir).add(entry, str(source), link=False)


def push(node: Node) -> PushReport:
    with CacheClient(node.settings) as client:
        return drain(node.settings, client, say=node.log.append)


def test_a_spooled_result_is_published_past_failures(node: Node, server: ScriptedServer) -> None:
    spool(node)
    server.script("acquire", leased())
    report = push(node)
    assert (report.published, report.kept, node.spooled()) == (1, [], 0)
    asked = server.calls("acquire")[0].json
    assert asked["from_spool"] is True
    assert asked["factors"] == {"recipe": 1}
    assert server.calls("put")[0].body == NEFF
    assert node.log == [f"{KEY[:12]}: published"]


def test_what_the_server_has_already_is_dropped(node: Node, server: ScriptedServer) -> None:
    spool(node)
    server.script("acquire", hit("0" * 64, 1))
    assert push(node).already_present == 1
    assert node.spooled() == 0
    assert server.calls("put") == []


def test_the_lease_it_was_compiled_under_is_tried_first(node: Node, server: ScriptedServer) -> None:
    """An expired lease may still publish while nobody superseded it."""
    spool(node, lease_id="0f" * 16)
    assert push(node).published == 1
    assert server.calls("acquire") == []
    assert "0f" * 16 in server.calls("publish")[0].path


def test_a_superseded_lease_is_no_obstacle(node: Node, server: ScriptedServer) -> None:
    spool(node, lease_id="0f" * 16)
    server.script("upload", problem(409, "lease_superseded"))
    server.script("acquire", leased())
    assert push(node).published == 1


def test_what_somebody_compiles_right_now_is_kept(node: Node, server: ScriptedServer) -> None:
    spool(node)
    server.script("acquire", busy())
    report = push(node)
    assert report.busy == 1
    assert node.spooled() == 1


def test_an_unusable_server_stops_the_push_and_nothing_is_lost(node: Node, server: ScriptedServer) -> None:
    spool(node)
    spool(node, OTHER)
    server.script("acquire", problem(503, "down"))
    report = push(node)
    assert report.unavailable is not None
    assert node.spooled() == 2
    assert len(server.calls("acquire")) == 1


def test_a_refused_entry_does_not_hold_up_the_others(node: Node, server: ScriptedServer) -> None:
    spool(node)
    spool(node, OTHER)
    server.script("acquire", leased(), leased())
    server.script("upload", problem(422, "neff_invalid"))
    report = push(node)
    assert (report.published, len(report.kept), node.spooled()) == (1, 1, 1)
    assert len(server.calls("release")) == 1


def test_a_damaged_entry_is_thrown_away(node: Node, server: ScriptedServer) -> None:
    spool(node)
    (entry,) = Spool(node.settings.tier_dir).pending()
    Path(entry.neff).write_bytes(NEFF[:-1])
    assert push(node).damaged == 1
    assert node.spooled() == 0


def test_an_entry_that_vanishes_under_a_push_does_not_hold_up_the_others(node: Node, server: ScriptedServer) -> None:
    """Two pushes at once: the other one has sent it meanwhile."""
    spool(node)
    spool(node, OTHER)
    gate = threading.Event()
    server.script("acquire", leased(), leased())
    path = f"/v1/ns/default/blobs/{hashlib.sha256(NEFF).hexdigest()}"
    server.script("upload", Reply({"how": "stream", "url": path}, gate=gate))
    reports: list[PushReport] = []
    thread = threading.Thread(target=lambda: reports.append(push(node)))
    thread.start()
    server.wait_for("upload")
    waiting = Spool(node.settings.tier_dir)
    waiting.remove(waiting.pending()[0])
    gate.set()
    thread.join(30)
    (report,) = reports
    assert (report.published, len(report.kept)) == (1, 1)
    assert len(server.calls("release")) == 1


def test_another_tenants_result_is_not_uploaded(node: Node, server: ScriptedServer) -> None:
    spool(node, namespace="tenant-b")
    assert len(push(node).kept) == 1
    assert server.seen == []


def test_the_background_process_empties_the_spool(node: Node, server: ScriptedServer) -> None:
    """UC-10: uploads resume when the server is back."""
    spool(node)
    spool(node, OTHER)
    server.script("acquire", leased(), leased())
    assert start_in_background(node.settings)
    wait_until(lambda: node.spooled() == 0)
    assert len(server.calls("publish")) == 2


def test_a_healthy_server_makes_the_next_rank_start_it(node: Node, server: ScriptedServer) -> None:
    spool(node, OTHER)
    server.script("acquire", leased(), leased())
    assert node.obtain().verdict == "compiled"
    wait_until(lambda: node.spooled() == 0)
    assert {s.path.split("/")[5] for s in server.calls("acquire")} == {KEY, OTHER}


def test_an_interrupted_publish_goes_on_under_its_own_lease(node: Node, server: ScriptedServer) -> None:
    """The server restarts at the worst moment: nobody else has to compile this again."""
    server.script("acquire", leased())
    server.script("publish", *[problem(503, "down") for _ in range(3)])
    assert node.obtain().reason == "spooled"
    wait_until(lambda: node.spooled() == 0)
    lease_id = server.calls("acquire")[0].json["lease_id"]
    assert {s.path.split("/")[5] for s in server.calls("publish")} == {lease_id}
    assert len(server.calls("acquire")) == 1


def test_there_is_one_uploader_per_host(node: Node, server: ScriptedServer) -> None:
    spool(node)
    fd = uploader._only_one(node.settings)
    assert fd is not None
    assert uploader._only_one(node.settings) is None
    assert start_in_background(node.settings) is False
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def test_nothing_is_started_for_an_empty_spool(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("started"))
    assert start_in_background(node.settings) is False


def test_the_uploader_holds_none_of_the_callers_pipes(node: Node, server: ScriptedServer) -> None:
    """The caller reads the launcher's output to its end: an uploader with the pipe would hang the rank."""
    spool(node)
    gate = threading.Event()
    server.script("acquire", Reply(leased().json, gate=gate))
    read_end, write_end = os.pipe()
    os.set_inheritable(write_end, True)
    saved = os.dup(1)
    os.dup2(write_end, 1)
    try:
        assert start_in_background(node.settings)
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(write_end)
    server.wait_for("acquire")
    os.set_blocking(read_end, False)
    assert os.read(read_end, 1) == b"", "end of file while the uploader lives"
    os.close(read_end)
    gate.set()
    wait_until(lambda: node.spooled() == 0)
