"""/metrics is right, and what docs/grafana asks for is there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from neffcache_server.metrics.families import MAX_NAMESPACES, Snapshot, exposition
from neffcache_server.recording.events import REASONS
from neffcache_server.recording.history import Figures
from prometheus_client.parser import text_string_to_metric_families
from support.dashboard_data import fill
from support.server import ServerProcess, running_server

GRAFANA = Path(__file__).resolve().parents[2] / "docs" / "grafana"
NAME = re.compile(r"neffcache_[a-z_]+")
LABELS = {"namespace", "verdict", "reason", "version", "worker"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    fill(folder / "data", graphs=12, many_jobs=3, days=9)
    with running_server(folder) as running:
        yield running


@pytest.fixture(scope="module")
def samples(server: ServerProcess) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Samples by name, read by Prometheus' own parser."""
    answer = httpx.get(f"{server.url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(answer.text):
        assert family.documentation
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_names_and_labels_are_of_the_kinds_that_were_promised(
    samples: dict[str, list[tuple[dict[str, str], float]]],
) -> None:
    assert all(name.startswith("neffcache_") for name in samples)
    for values in samples.values():
        for labels, _ in values:
            assert set(labels) <= LABELS
            assert labels.get("reason", "") in REASONS | {"", "other"}


def test_figures_equal_those_of_stats(
    server: ServerProcess, samples: dict[str, list[tuple[dict[str, str], float]]]
) -> None:
    stats = httpx.get(f"{server.url}/v1/stats?namespace=default").json()
    counted: dict[str, float] = {}
    for labels, value in samples["neffcache_requests_total"]:
        if labels["namespace"] == "default":
            counted[labels["verdict"]] = counted.get(labels["verdict"], 0) + value
    assert counted == stats["verdicts"]
    of_default = {
        name: value
        for name, found in samples.items()
        for labels, value in found
        if labels.get("namespace") == "default"
    }
    assert of_default["neffcache_entries"] == stats["entries"]
    assert of_default["neffcache_stored_bytes"] == stats["bytes"]
    assert of_default["neffcache_waited_seconds_total"] == pytest.approx(stats["waited_seconds"])


def test_the_dashboard_and_the_alerts_ask_for_what_is_exported(
    samples: dict[str, list[tuple[dict[str, str], float]]],
) -> None:
    dashboard = json.loads((GRAFANA / "dashboard.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += [v["query"]["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    rules = [r for g in yaml.safe_load((GRAFANA / "alerts.yaml").read_text())["groups"] for r in g["rules"]]
    assert all(r["annotations"]["description"] for r in rules)
    named = {name for text in [*asked, *(r["expr"] for r in rules)] for name in NAME.findall(text)}
    assert named <= set(samples), "exported under another name, or not at all"
    assert set(samples) - named <= {"neffcache_worker_start_time_seconds"}, "exported and shown nowhere"


def test_many_namespaces_do_not_make_many_series() -> None:
    requests = {f"ns{n}": Figures({"local": n + 1}) for n in range(3 * MAX_NAMESPACES)}
    text = exposition(Snapshot(requests=requests)).decode()
    (family,) = [f for f in text_string_to_metric_families(text) if f.name == "neffcache_requests"]
    assert len({s.labels["namespace"] for s in family.samples}) == MAX_NAMESPACES + 1
    assert sum(s.value for s in family.samples) == sum(f.requests for f in requests.values())


def test_a_reason_is_no_second_request() -> None:
    figures = Figures({"failed": 3}, {("failed", "deterministic"): 2})
    text = exposition(Snapshot(requests={"default": figures})).decode()
    (family,) = [f for f in text_string_to_metric_families(text) if f.name == "neffcache_requests"]
    assert {s.labels["reason"]: s.value for s in family.samples} == {"": 1.0, "deterministic": 2.0}
