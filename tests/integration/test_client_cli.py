"""The command line: readable by a stranger, exact for machines, never a traceback."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from neffcache_client.cli import output
from neffcache_client.cli.main import COMMANDS, main
from neffcache_client.records import record
from support.node import KEY, NEFF, VERSION, Node
from support.scripted_server import Reply, ScriptedServer, leased, problem

ENTRY = {
    "key": KEY,
    "state": "present",
    "sha256": "5a" * 32,
    "size": 3_500_000,
    "created_at": 1_700_000_000.0,
    "compiler_version": VERSION,
    "target": "trn2",
    "compile_seconds": 391.0,
    "peak_rss_bytes": 12 << 30,
    "hits": 63,
    "last_hit_at": 1_700_000_100.0,
    "holder": {"host": "trn-3", "boot": "b", "pid": 4711, "rank": 0, "job": "llama"},
    "factors": {"target": "trn2", "lnc": "2", "options": [["--model-type", "transformer"]]},
}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        monkeypatch.setenv("NEFFCACHE_URL", server.url)
        monkeypatch.setenv("TORCH_NEURONX_NEFF_CACHE_DIR", str(tmp_path / "host" / "cache"))
        monkeypatch.setenv("TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR", str(tmp_path / "host" / "locks"))
        yield server


def page(*entries: object, total: int | None = None, after: str | None = None) -> Reply:
    return Reply({"entries": list(entries), "total": len(entries) if total is None else total, "next": after})


def test_entries_are_listed_in_a_table(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.script("entries", page(ENTRY))
    assert main(["entries", "ls"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["KEY", "COMPILER", "TARGET", "SIZE", "COMPILE", "HITS", "CREATED"]
    assert row.split("  ")[0] == KEY[:16]
    for text in (VERSION, "trn2", "3.3 MiB", "6 min 31 s", "63", "2023-11-14 22:13:20 UTC"):
        assert text in row


def test_entries_ls_follows_pages_up_to_its_limit(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.script("entries", page(ENTRY, total=3, after="x"), page(ENTRY, total=3, after="y"))
    assert main(["entries", "ls", "--limit", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (len(found["entries"]), found["total"]) == (2, 3)
    assert [s.path.split("?")[1] for s in server.calls("entries")] == ["limit=2", "limit=1&after=x"]


def test_entries_show_tells_all_about_one(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.script("entry", Reply(ENTRY))
    assert main(["entries", "show", KEY]) == 0
    out = capsys.readouterr().out
    for text in (VERSION, "trn2", "3500000 bytes", "5a" * 32, "6 min 31 s", "12.0 GiB", "pid 4711 on trn-3", "63"):
        assert text in out
    assert "  lnc      2" in out
    assert '  options  [["--model-type", "transformer"]]' in out


def test_a_few_digits_of_a_key_are_enough(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.script("entries", page(ENTRY, after="x"), page({**ENTRY, "key": "cd" * 32}))
    server.script("entry", Reply(ENTRY))
    assert main(["entries", "show", KEY[:8], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["factors"]["lnc"] == "2"


def test_an_ambiguous_or_unknown_key_is_said_so(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    twin = KEY[:-1] + "0"
    server.script("entries", page(ENTRY, {**ENTRY, "key": twin}), page(ENTRY))
    assert main(["entries", "show", KEY[:8]]) == 1
    assert "2 keys begin with" in capsys.readouterr().err
    assert main(["entries", "rm", "ffffff"]) == 1
    assert "there is no entry with key ffffff" in capsys.readouterr().err
    assert main(["entries", "show", "../etc"]) == 2
    assert "is no key" in capsys.readouterr().err


def test_entries_rm_removes(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["entries", "rm", KEY]) == 0
    assert capsys.readouterr().out == f"removed {KEY}\n"
    assert server.calls("delete_entry")[0].path.endswith(KEY)


def test_failures_are_listed_and_cleared(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    """UC-02."""
    failure = {"key": KEY, "kind": "deterministic", "code": "NCC_EOOM001", "exit_code": 70, "host": "trn-3"}
    failure |= {"first_seen_at": 1_700_000_000.0, "until": 9e9, "log_tail": "too large"}
    server.script("failures", *[Reply({"failures": [failure]})] * 3)
    assert main(["failures", "ls", "--log"]) == 0
    out = capsys.readouterr().out
    for text in ("NCC_EOOM001", "deterministic", "trn-3", "2023-11-14 22:13:20 UTC", "too large"):
        assert text in out
    assert main(["failures", "clear", KEY[:10]]) == 0
    assert capsys.readouterr().out == f"cleared {KEY}\n"
    assert server.calls("clear_failure")[0].path.endswith(KEY)
    assert main(["failures", "clear", "--all", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"cleared": [KEY]}


def test_failures_clear_wants_to_know_what(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["failures", "clear"]) == 2
    assert "name one key, or --all" in capsys.readouterr().err


def test_stats_sum_the_local_records_and_ask_the_server(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """UC-31."""
    tier = str(tmp_path / "host" / "cache" / "neffcache")
    record(tier, verdict="remote", bytes=1 << 20, saved_seconds=100.0)
    record(tier, verdict="fallback", reason="unreachable", compile_seconds=3.0)
    stats = {"namespace": "default", "entries": 14, "bytes": 5 << 30, "hits": 630, "compile_seconds_saved": 36000.0}
    server.script("stats", Reply(stats), Reply(stats))
    assert main(["stats"]) == 0
    out = capsys.readouterr().out
    for text in ("14 (5.0 GiB)", "630", "10 h", "1.0 MiB", "remote", "fallback", "unreachable"):
        assert text in out
    assert main(["stats", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["server"]["entries"] == 14
    assert found["local"]["verdicts"] == {"remote": 1, "fallback": 1}
    assert found["local"]["reasons"] == {"fallback": {"unreachable": 1}}


def test_local_stats_need_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_NEURONX_NEFF_CACHE_DIR", str(tmp_path))
    assert main(["stats", "--local", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "server" not in found
    assert found["local"]["spooled"] == 0


def test_push_empties_the_spool_and_says_so(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        away = f"http://127.0.0.1:{s.getsockname()[1]}"
    Node(tmp_path / "host", away).obtain()
    server.script("acquire", problem(503, "starting"), leased())
    assert main(["push"]) == 1
    told = capsys.readouterr()
    assert "1 waited for upload: 0 published, 0 already on the server, 1 left" in told.out
    assert "nothing was lost" in told.err
    assert main(["push"]) == 0
    assert "1 waited for upload: 1 published, 0 already on the server, 0 left" in capsys.readouterr().out
    assert server.calls("put")[0].body == NEFF
    assert main(["push", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left"] == 0


@pytest.mark.parametrize("command", [["stats"], ["entries", "ls"], ["failures", "ls"], ["push"]])
def test_without_a_server_a_command_says_what_to_do(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 2
    assert capsys.readouterr().err == (
        "neffcache: NEFFCACHE_URL is not set; name the server: export NEFFCACHE_URL=http://host:8765\n"
    )


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (problem(403, "forbidden", "this token may not read"), "this token may not read"),
        (problem(500, "broken", "database locked"), "database locked"),
        (Reply(status=404, body=b"<html>"), "is NEFFCACHE_URL a neffcache server?"),
        (Reply(drop=True), "connection to the cache broke"),
    ],
)
def test_errors_are_one_sentence(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str], reply: Reply, text: str
) -> None:
    server.script("entries", reply)
    assert main(["entries", "ls"]) == 1
    err = capsys.readouterr().err
    assert text in err
    assert len(err.splitlines()) == 1


def test_a_bad_setting_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NEFFCACHE_URL", "cache:8765")
    assert main(["stats"]) == 2
    assert "must start with http" in capsys.readouterr().err


def test_help_lists_every_command_without_importing_it() -> None:
    code = """
import sys
from neffcache_client.cli.main import main
try:
    main(["--help"])
except SystemExit:
    pass
assert not {"httpx", "torch", "fastapi", "neffcache_server", "neffcache_hook"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for command in COMMANDS:
        assert f"    {command} " in done.stdout


def test_a_missing_extra_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "neffcache_server.cli", None)
    assert main(["serve"]) == 2
    assert "pip install 'neffcache[server]'" in capsys.readouterr().err


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("neffcache ")


def test_sizes_and_durations_are_for_people() -> None:
    assert [output.size(n) for n in (None, 0, 1023, 1024, 28 << 20)] == ["-", "0 B", "1023 B", "1.0 KiB", "28.0 MiB"]
    assert [output.seconds(n) for n in (None, 3.21, 391, 15000)] == ["-", "3.2 s", "6 min 31 s", "4 h 10 min"]
