"""`neffcache doctor` against a real server, in environments that are well and in ones that are not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import neffcache_hook.checkup as hook_checks
import pytest
from neffcache_client.checkup import server as server_checks
from neffcache_client.cli.main import main
from support.compilers import FakeCompiler, environment
from support.server import ServerProcess, running_server

ADMIN = "the-first-admin-token-of-tests"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    env = {"NEFFCACHE_SERVER_ADMIN_TOKEN": ADMIN}
    with running_server(tmp_path_factory.mktemp("doctor"), env=env) as running:
        yield running


@pytest.fixture
def rank(tmp_path: Path, server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    """An environment of a rank in which everything is well."""
    compiler = FakeCompiler(tmp_path / "compilers")
    env = environment(compiler.folder, cache=tmp_path, url=server.url, NEFFCACHE_TOKEN=ADMIN)
    for name in set(os.environ) - set(env):
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    # Canonical forms are the business of other tests, and bindings take long to import.
    monkeypatch.setattr(hook_checks, "_bindings", lambda: iter(()))
    return compiler


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and findings."""
    code = main(["doctor", "--json", *arguments])
    answer = json.loads(capsys.readouterr().out)
    assert answer["healthy"] == (code == 0)
    return code, answer["findings"]


def failures(findings: list[dict[str, Any]]) -> str:
    """The lines that FAIL, with what to do."""
    return "\n".join(f"{f['name']}: {f['text']} -> {f['todo']}" for f in findings if f["status"] == "FAIL")


def text(findings: list[dict[str, Any]]) -> str:
    return "\n".join(f"{f['status']} {f['name']}: {f['text']}" for f in findings)


def test_healthy_rank(rank: FakeCompiler, server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    """UC-03: effective settings, local folder, compiler, round trip and the hook's load path; exit code 0."""
    code, findings = doctor(capsys)
    assert (code, failures(findings)) == (0, "")
    told = text(findings)
    for expected in (
        f"ok url: {server.url} (NEFFCACHE_URL)",
        "ok namespace: default (default)",
        "ok token: set (NEFFCACHE_TOKEN)",
        f"{rank.path}, version {rank.version}",
        "neffcache_hook",
        "1 MiB up in ",
        "admin in every namespace",
        "clock is 0.",
    ):
        assert expected in told
    assert ADMIN not in told
    assert rank.runs == 0
    with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {ADMIN}"}) as api:
        assert api.get("/v1/ns/default/entries").json()["total"] == 0
        assert api.get("/v1/stats").json()["live_leases"] == 0


def test_lines_for_people_say_what_to_do(
    rank: FakeCompiler, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """UC-03: a typing error in a variable's name."""
    monkeypatch.setenv("NEFFCACHE_NAMESPCE", "team")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  variables       NEFFCACHE_NAMESPCE means nothing to neffcache\n" in out
    assert "-> did you mean NEFFCACHE_NAMESPACE?\n" in out
    assert out.endswith("1 to be put right\n")


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("NEFFCACHE_URL", "", "NEFFCACHE_URL is not set"),
        ("NEFFCACHE_URL", "cache:8765", "must start with http://"),
        ("NEFFCACHE_URL", "http://127.0.0.1:9", "cannot be reached"),
        ("NEFFCACHE_MODE", "off", "switches the cache off"),
        ("NEFFCACHE_TOKEN", "nct_revoked", "unknown, has run out or was revoked"),
        ("NEFFCACHE_TOKEN", "", "A token is needed"),
        ("TORCH_NEURONX_NEFF_DISABLE_CACHE", "1", "neffcache with it"),
        ("TORCH_DEVICE_BACKEND_AUTOLOAD", "0", "neffcache run -- CMD"),
        ("PATH", "/nowhere", "there is no neuronx-cc on PATH"),
        ("TORCH_NEURONX_NEFF_CACHE_DIR", "/proc/none", "cannot be written"),
    ],
)
def test_what_keeps_the_cache_from_being_used(
    rank: FakeCompiler,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    value: str,
    words: str,
) -> None:
    monkeypatch.setenv(variable, value)
    code, findings = doctor(capsys)
    assert code == 1
    assert words in failures(findings)


def test_launcher_on_path_needs_no_torch(rank: FakeCompiler) -> None:
    command = [sys.executable, "-m", "neffcache_client.cli.main"]
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [*command, "run", "--", *command, "doctor", "--json"], env=env, capture_output=True, text=True, timeout=120
    )
    told = text(json.loads(done.stdout)["findings"])
    assert "ok launcher: first on PATH in this environment" in told
    assert f"{rank.path}, version {rank.version}" in told
    assert done.returncode == 0


def test_reader_is_told_that_its_compiles_are_shared_with_nobody(
    rank: FakeCompiler, server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"name": "reader", "role": "read", "namespace": "default"}
    made = httpx.post(f"{server.url}/v1/tokens", json=body, headers={"authorization": f"Bearer {ADMIN}"}).json()
    monkeypatch.setenv("NEFFCACHE_TOKEN", made["token"])
    code, findings = doctor(capsys, "--server")
    assert code == 0
    assert "warn token: reader: read in namespace default; what is compiled here is shared with nobody" in text(
        findings
    )
    assert not [f for f in findings if f["name"] == "compiler"]
    monkeypatch.setenv("NEFFCACHE_NAMESPACE", "other")
    code, findings = doctor(capsys, "--server")
    assert "nothing in namespace other" in failures(findings)


@pytest.mark.parametrize(("difference", "status"), [(0.3, "ok"), (-60.0, "warn"), (3600.0, "FAIL")])
def test_clock_difference(difference: float, status: str) -> None:
    assert server_checks._clock(difference).status == status


def test_bindings_that_disagree_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(digests: dict[str, str | None]) -> list[str]:
        done = subprocess.CompletedProcess([], 0, stdout=b"notice\n" + json.dumps(digests).encode() + b"\n")
        monkeypatch.setattr(subprocess, "run", lambda *a, **k: done)
        return [f"{f.status} {f.text}" for f in hook_checks._bindings()]

    assert answers({"torch_mlir": None, "iree": "a", "jaxlib": "a"}) == [
        "ok StableHLO is brought into its canonical form by iree"
    ]
    assert "disagree (iree, jaxlib)" in answers({"torch_mlir": None, "iree": "a", "jaxlib": "b"})[1]
    assert answers({"iree": None})[0].startswith("warn no MLIR binding")


def test_installed_bindings_agree() -> None:
    found = [f.status for f in hook_checks._bindings()]
    assert found == ["ok"]
