"""From a rank's request to the server's figures, through every way in which a request can end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from neffcache_client.cli.main import main
from support.neffs import make_neff
from support.node import KEY, Node
from support.server import ServerProcess, running_server
from support.waiting import wait_until

JOB = "train"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with running_server(tmp_path / "server") as running:
        yield running


def on_host(tmp_path: Path, server: ServerProcess, name: str, monkeypatch: pytest.MonkeyPatch, rank: int) -> Node:
    monkeypatch.setenv("NEFFCACHE_HOST", name)
    return Node(tmp_path / name, server.url, NEFFCACHE_JOB=JOB, RANK=str(rank))


def use(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the node's settings those of the command line."""
    monkeypatch.setenv("NEFFCACHE_URL", node.settings.url)
    monkeypatch.setenv("TORCH_NEURONX_NEFF_CACHE_DIR", node.settings.cache_dir)
    monkeypatch.setenv("TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR", node.settings.lock_dir)


def figures(server: ServerProcess, **query: Any) -> Any:
    return httpx.get(f"{server.url}/v1/stats", params={"namespace": "default", **query}).json()


def test_every_request_is_counted_once_by_whoever_saw_it(
    tmp_path: Path, server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """UC-03, UC-31: what ranks' own records say and what the server says is the same."""
    verdicts = []
    for name, rank in (("host-a", 0), ("host-b", 1)):
        node = on_host(tmp_path, server, name, monkeypatch, rank)
        verdicts += [node.obtain(output=f"{n}.neff").verdict for n in range(3)]
        use(node, monkeypatch)
        assert main(["push"]) == 0
    assert verdicts == ["compiled", "local", "local", "remote", "local", "local"]
    expected = {"compiled": 1, "remote": 1, "local": 4}
    assert figures(server)["verdicts"] == expected
    assert figures(server, job=JOB)["verdicts"] == expected
    assert figures(server, since_seconds=60)["verdicts"] == expected
    assert figures(server)["compile_seconds_saved"] == 2.5, "host-b's first hit, and no other"
    capsys.readouterr()
    assert main(["stats", "--json", "--job", JOB]) == 0
    assert json.loads(capsys.readouterr().out)["server"]["verdicts"] == expected
    assert main(["jobs"]) == 0
    line = next(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(JOB))
    assert line[1:6] == ["2", "2", "6", "5", "1"], "ranks, hosts, requests, hits, compiles"
    assert main(["jobs", JOB, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["ranks"]) == 2


def test_a_compile_of_an_outage_is_one_compile_though_it_is_pushed_later(
    tmp_path: Path, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UC-23: nothing is hidden, nothing counted twice."""
    server.stop()
    node = on_host(tmp_path, server, "host-a", monkeypatch, 0)
    assert node.obtain().verdict == "fallback"
    server.start()
    use(node, monkeypatch)
    assert main(["push"]) == 0
    assert main(["push"]) == 0
    found = figures(server)
    assert found["verdicts"] == {"fallback": 1, "pushed": 1}
    assert figures(server, job=JOB)["verdicts"] == {"fallback": 1}
    text = httpx.get(f"{server.url}/metrics").text
    assert 'reason="unreachable",verdict="fallback"} 1.0' in text


def test_waiting_is_told_whole_though_it_took_several_calls(
    tmp_path: Path, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = on_host(tmp_path, server, "host-b", monkeypatch, 1)
    lease = "1" * 32
    holder = {"host": "host-a", "boot": "b", "pid": 1, "rank": 0, "job": JOB}
    ns = f"{server.url}/v1/ns/default"
    httpx.post(f"{ns}/keys/{KEY}/acquire", json={"lease_id": lease, "holder": holder})
    httpx.post(f"{ns}/leases/{lease}/heartbeat", json={})
    asked = {"lease_id": "2" * 32, "holder": {**holder, "host": "host-b", "rank": 1}, "waited_seconds": 40.0}
    busy = httpx.post(f"{ns}/keys/{KEY}/acquire", json=asked).json()
    assert busy["state"] == "busy"
    live = httpx.get(f"{server.url}/v1/live?namespace=default").json()
    assert [e["holder"]["host"] for e in live["leases"]] == ["host-a"]
    assert "lease_id" not in json.dumps(live)
    import hashlib

    data = make_neff()
    sha256 = hashlib.sha256(data).hexdigest()
    httpx.put(f"{ns}/blobs/{sha256}", content=data, headers={"neffcache-lease": lease}).raise_for_status()
    body = {"sha256": sha256, "size": len(data), "compile_seconds": 50.0}
    httpx.post(f"{ns}/leases/{lease}/publish", json=body).raise_for_status()
    assert httpx.post(f"{ns}/keys/{KEY}/acquire", json=asked).json()["state"] == "hit"
    found = figures(server)
    assert (found["verdicts"], found["waits"]) == ({"compiled": 1, "waited": 1}, 1)
    assert found["waited_seconds"] == pytest.approx(40.0, abs=0.5)
    assert found["compile_seconds_saved"] == 50.0
    assert other.compiles == 0


def test_a_rank_that_talks_to_the_server_sends_the_hosts_reports_along(
    tmp_path: Path, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launchers live for a second and a local hit talks to nobody: somebody else has to report it."""
    node = on_host(tmp_path, server, "host-a", monkeypatch, 0)
    use(node, monkeypatch)
    node.obtain()
    node.obtain(output="again.neff")
    node.obtain("c" * 64, output="other.neff")
    wait_until(lambda: figures(server)["verdicts"].get("local") == 1)


def test_the_feed_tells_a_change_within_seconds(server: ServerProcess) -> None:
    with httpx.stream("GET", f"{server.url}/v1/events", timeout=20) as stream:
        lines = stream.iter_lines()
        assert next(line for line in lines if line.startswith("event:")) == "event: live"
        assert json.loads(next(lines).removeprefix("data: "))["leases"] == []
        holder = {"host": "host-a", "boot": "b", "pid": 1}
        asked = {"lease_id": "3" * 32, "holder": holder}
        httpx.post(f"{server.url}/v1/ns/default/keys/{KEY}/acquire", json=asked).raise_for_status()
        data = next(line for line in lines if line.startswith("data:") and KEY in line)
        assert json.loads(data.removeprefix("data: "))["leases"][0]["holder"]["host"] == "host-a"


def test_an_open_feed_does_not_hold_up_the_servers_end(server: ServerProcess) -> None:
    with httpx.stream("GET", f"{server.url}/v1/events", timeout=20) as stream:
        next(stream.iter_lines())
        assert server.stop() == 0
    server.start()


@pytest.mark.parametrize("path", ["/v1/ns/default/job?name=none", "/v1/stats?namespace=default&job=none"])
def test_an_unknown_job_is_said_to_be_unknown(path: str, server: ServerProcess) -> None:
    answer = httpx.get(server.url + path)
    assert (answer.status_code, answer.json()["code"]) == (404, "job_unknown")
