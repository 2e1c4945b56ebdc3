"""Many launchers at once on one graph: how often the compiler runs, and what each of them gets."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.compilers import FakeCompiler
from support.launchers import Done, Host, Started
from support.server import ServerProcess, running_server
from support.waiting import wait_until

HOSTS = 8
RANKS = 64


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with running_server(tmp_path / "server") as server:
        yield server


def _fleet(tmp_path: Path, compiler: FakeCompiler, url: str) -> list[Host]:
    return [Host(tmp_path / f"host{n}", compiler, url) for n in range(HOSTS)]


def _start_all(hosts: list[Host]) -> list[Started]:
    return [hosts[n % HOSTS].start() for n in range(RANKS)]


def _records(host: Host) -> list[dict[str, object]]:
    files = sorted((host.tier / "records").glob("*"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def _spooled(host: Host) -> int:
    return len(list((host.tier / "spool").glob("*.json")))


def _push(host: Host) -> None:
    command = [sys.executable, "-m", "neffcache_client.cli.main", "push"]
    subprocess.run(command, env=host.env, check=True, capture_output=True)


def test_sixty_four_launchers_on_eight_hosts_compile_once(tmp_path: Path, server: ServerProcess) -> None:
    """UC-17, UC-18. Every run of this compiler makes other bytes, so equal outputs came from one run."""
    compiler = FakeCompiler(tmp_path / "compilers", seconds=2.0)
    hosts = _fleet(tmp_path, compiler, server.url)
    results = [started.finish() for started in _start_all(hosts)]
    assert {r.exit_code for r in results} == {0}
    assert compiler.runs == 1
    assert len({r.output for r in results}) == 1
    assert results[0].output
    assert [r.stderr for r in results] == [b""] * RANKS
    verdicts = [r["verdict"] for host in hosts for r in _records(host)]
    assert len(verdicts) == RANKS
    assert verdicts.count("compiled") == 1


def test_with_the_server_down_each_host_compiles_once_and_push_heals(tmp_path: Path, server: ServerProcess) -> None:
    """UC-10"""
    compiler = FakeCompiler(tmp_path / "compilers", seconds=1.0)
    hosts = _fleet(tmp_path, compiler, server.url)
    server.stop()
    results = [started.finish() for started in _start_all(hosts)]
    assert {r.exit_code for r in results} == {0}
    assert compiler.runs == HOSTS
    assert len({r.output for r in results}) == HOSTS
    assert [r.stderr for r in results] == [b""] * RANKS
    assert [_spooled(host) for host in hosts] == [1] * HOSTS
    assert "WARNING" in hosts[0].log()
    server.start()
    for host in hosts:
        _push(host)
    assert [_spooled(host) for host in hosts] == [0] * HOSTS
    late = Host(tmp_path / "late", compiler, server.url).compile()
    assert (late.exit_code, compiler.runs) == (0, HOSTS)
    assert late.output in {r.output for r in results}


def test_a_killed_rank_frees_the_key_for_the_others(tmp_path: Path, server: ServerProcess) -> None:
    """UC-01: the holder dies by SIGKILL, its host's other process goes on at once."""
    gate = tmp_path / "gate"
    compiler = FakeCompiler(tmp_path / "compilers", gate=gate, partial=True, leave_grandchild=True)
    host = Host(tmp_path / "host", compiler, server.url)
    holder = host.start()
    wait_until(lambda: compiler.started == 1 and len(compiler.pids) == 2)
    first_pids = compiler.pids
    waiter = host.start()
    holder.process.kill()
    holder.finish()
    wait_until(lambda: compiler.started == 2, what="the waiter compiles")
    assert not set(first_pids) & set(compiler.alive())
    gate.touch()
    assert waiter.finish().exit_code == 0
    assert compiler.runs == 2


def test_a_stopped_rank_releases_its_lease_to_another_host(tmp_path: Path, server: ServerProcess) -> None:
    """UC-01: SIGTERM, as a scheduler sends it; nobody waits for a TTL."""
    gate = tmp_path / "gate"
    compiler = FakeCompiler(tmp_path / "compilers", gate=gate)
    holder = Host(tmp_path / "a", compiler, server.url).start()
    wait_until(lambda: compiler.started == 1)
    waiter = Host(tmp_path / "b", compiler, server.url).start()
    holder.process.terminate()
    assert holder.finish().exit_code == 143
    wait_until(lambda: compiler.started == 2, seconds=15, what="the other host compiles")
    gate.touch()
    assert waiter.finish().exit_code == 0


def test_a_waiter_that_is_stopped_leaves_the_holder_alone(tmp_path: Path, server: ServerProcess) -> None:
    gate = tmp_path / "gate"
    compiler = FakeCompiler(tmp_path / "compilers", gate=gate)
    holder = Host(tmp_path / "a", compiler, server.url).start()
    wait_until(lambda: compiler.started == 1)
    other = Host(tmp_path / "b", compiler, server.url)
    waiter = other.start()
    wait_until(lambda: "waiting for" in other.log())
    waiter.process.terminate()
    stopped = waiter.finish()
    assert (stopped.exit_code, stopped.output) == (143, None)
    gate.touch()
    assert holder.finish().exit_code == 0
    assert compiler.runs == 1


def test_a_compiler_error_reaches_every_rank_with_its_reason(tmp_path: Path, server: ServerProcess) -> None:
    """UC-02, UC-04"""
    compiler = FakeCompiler(tmp_path / "compilers", exit_code=70, stderr="ERROR [NCC_EOOM001] too large\n")
    hosts = [Host(tmp_path / name, compiler, server.url) for name in "abc"]
    first = hosts[0].compile()
    assert (first.exit_code, first.stderr) == (70, b"ERROR [NCC_EOOM001] too large\n")
    for host in hosts:
        again: Done = host.compile()
        assert (again.exit_code, again.output) == (70, None)
        assert b"[NCC_EOOM001] too large" in again.stderr
        assert b"served from" in again.stderr
    assert compiler.runs == 1
    assert hosts[2].compile("--retry_failed_compilation").exit_code == 70
    assert compiler.runs == 2


def test_a_miss_is_an_error_where_the_user_requires_a_hit(tmp_path: Path, server: ServerProcess) -> None:
    compiler = FakeCompiler(tmp_path / "compilers")
    required = Host(tmp_path / "a", compiler, server.url, NEFFCACHE_MODE="require")
    done = required.compile()
    assert (done.exit_code, done.output, compiler.runs) == (75, None, 0)
    assert b"NEFFCACHE_MODE=require" in done.stderr
    filled = Host(tmp_path / "b", compiler, server.url).compile()
    assert required.compile() == (0, b"", b"", filled.output)
