"""What ranks of the demo did, what their own records say and what the server shows are one thing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from support.server import running_server


@pytest.mark.slow
def test_the_servers_figures_are_those_of_the_demo(tmp_path: Path) -> None:
    """UC-31, with ranks that compile, wait, fetch and find."""
    with running_server(tmp_path / "server") as server:
        out = tmp_path / "out.json"
        command = [sys.executable, "-m", "neffcache_client.cli.main", "demo", "--ranks", "4", "--hosts", "2"]
        command += ["--models", "mlp", "--skip-baselines", "--json", str(out)]
        env = {**os.environ, "NEFFCACHE_URL": server.url}
        subprocess.run(command, env=env, check=True, capture_output=True, timeout=170)
        saved = 0.0
        for row in json.loads(out.read_text())["scenarios"]:
            job = f"demo-{row['scenario'].replace(' ', '-')}"
            stats = httpx.get(f"{server.url}/v1/stats", params={"namespace": "default", "job": job}).json()
            told = {"compiled": "compiles", "waited": "waits", "remote": "remote_hits", "local": "local_hits"}
            assert {v: stats["verdicts"].get(v, 0) for v in told} == {v: row[name] for v, name in told.items()}
            saved += stats["compile_seconds_saved"]
            shown = httpx.get(f"{server.url}/jobs/show", params={"namespace": "default", "job": job}).text
            assert f"on {row['hosts']} hosts" in shown
            assert "not reported yet" not in shown, "every rank reported its end"
        total = httpx.get(f"{server.url}/v1/stats?namespace=default").json()
        assert total["compile_seconds_saved"] == pytest.approx(saved)
        assert total["compile_seconds_saved"] == pytest.approx(3 * total["compile_seconds_spent"]), (
            "3 of 4 hosts saved it"
        )
