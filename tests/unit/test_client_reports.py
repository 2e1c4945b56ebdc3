"""Reports: every line that the server did not see, once, in batches, from a cursor."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from neffcache_client import reports
from neffcache_client.errors import ServerUnreachable
from neffcache_client.records import record
from neffcache_client.settings import ClientSettings
from neffcache_client.wire import ReportsAnswer, ReportsRequest

KEY = "a" * 64


class Server:
    """Takes reports, or breaks before or after it took them."""

    def __init__(self) -> None:
        self.taken: list[ReportsRequest] = []
        self.fail = False
        self.lose_answer = False

    def report(self, request: ReportsRequest) -> ReportsAnswer:
        if self.fail:
            raise ServerUnreachable("away")
        if request.batch not in [r.batch for r in self.taken]:
            self.taken.append(request)
        if self.lose_answer:
            raise ServerUnreachable("the answer was lost")
        return ReportsAnswer(taken=len(request.reports))

    @property
    def verdicts(self) -> list[str]:
        return [r.verdict for request in self.taken for r in request.reports]


@pytest.fixture
def settings(tmp_path: Path) -> ClientSettings:
    return ClientSettings.from_env({"NEFFCACHE_URL": "http://x", "TORCH_NEURONX_NEFF_CACHE_DIR": str(tmp_path)})


def send(settings: ClientSettings, server: Any) -> int:
    return reports.send(settings, server)


def test_what_the_server_counted_itself_is_not_reported(settings: ClientSettings) -> None:
    tier, server = settings.tier_dir, Server()
    record(tier, verdict="local", key=KEY, bytes=5, rank=3, job="j")
    record(tier, verdict="remote", key=KEY, server=True)
    record(tier, verdict="fallback", key=KEY, reason="unreachable", compile_seconds=2.5)
    assert send(settings, server) == 2
    assert server.verdicts == ["local", "fallback"]
    local, fallback = server.taken[0].reports
    assert (local.key, local.bytes, local.rank, local.job, local.host) == (KEY, 5, 3, "j", os.uname().nodename)
    assert (fallback.reason, fallback.compile_seconds) == ("unreachable", 2.5)
    assert 0 <= local.age_seconds < 60


def test_each_line_is_sent_once_and_a_files_end_is_remembered(settings: ClientSettings) -> None:
    server = Server()
    for _ in range(3):
        record(settings.tier_dir, verdict="local", key=KEY)
        assert send(settings, server) == 1
        assert send(settings, server) == 0
    assert server.verdicts == ["local"] * 3


def test_lines_stay_while_the_server_is_away(settings: ClientSettings) -> None:
    server = Server()
    server.fail = True
    record(settings.tier_dir, verdict="local", key=KEY)
    with pytest.raises(ServerUnreachable):
        send(settings, server)
    server.fail = False
    assert send(settings, server) == 1


def test_a_batch_whose_answer_was_lost_is_the_same_batch_again(settings: ClientSettings) -> None:
    server = Server()
    server.lose_answer = True
    record(settings.tier_dir, verdict="local", key=KEY)
    with pytest.raises(ServerUnreachable):
        send(settings, server)
    server.lose_answer = False
    assert send(settings, server) == 1
    assert server.verdicts == ["local"], "sent twice under one name"


def test_batches_are_bounded(settings: ClientSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "MAX_REPORTS", 4)
    server = Server()
    for n in range(10):
        record(settings.tier_dir, verdict="local", key=f"{n:064x}")
    assert send(settings, server) == 10
    assert [len(r.reports) for r in server.taken] == [4, 4, 2]
    assert len({r.key for request in server.taken for r in request.reports}) == 10


def test_a_line_that_is_being_written_waits_for_its_end(settings: ClientSettings) -> None:
    record(settings.tier_dir, verdict="local", key=KEY)
    (path,) = (Path(settings.tier_dir) / "records").glob("*.jsonl")
    line = path.read_bytes()
    path.write_bytes(line + line[:20])
    server = Server()
    assert send(settings, server) == 1
    path.write_bytes(line + line)
    assert send(settings, server) == 1


def test_torn_and_foreign_lines_are_passed_over(settings: ClientSettings) -> None:
    record(settings.tier_dir, verdict="local", key=KEY)
    (path,) = (Path(settings.tier_dir) / "records").glob("*.jsonl")
    bad = [
        '{"verdict": "loc',
        "[1]",
        json.dumps({"verdict": "local", "time": 1e9, "key": "x"}),
        '{"verdict": "local"}',
    ]
    path.write_bytes("\n".join(bad).encode() + b"\n" + path.read_bytes())
    assert send(settings, Server()) == 1


def test_other_hosts_in_a_shared_folder_send_their_own(settings: ClientSettings) -> None:
    record(settings.tier_dir, verdict="local", key=KEY)
    os.environ["NEFFCACHE_HOST"] = "another/one"
    server = Server()
    assert send(settings, server) == 0
    record(settings.tier_dir, verdict="local", key=KEY)
    assert send(settings, server) == 1
    assert server.taken[0].reports[0].host == "another_one"


def test_the_end_of_a_run_is_reported(settings: ClientSettings) -> None:
    """UC-31."""
    folder = Path(reports.runs_dir(settings.tier_dir))
    folder.mkdir(parents=True)
    host = os.uname().nodename
    import time

    found = {"time": time.time(), "host": host, "job": "j", "rank": 7, "ready_seconds": 3.5, "fetch_seconds": 0.5}
    (folder / f"{host}.7.1.1.json").write_text(json.dumps(found) + "\n")
    server = Server()
    assert send(settings, server) == 1
    (run,) = server.taken[0].runs
    assert (run.job, run.rank, run.ready_seconds, run.fetch_seconds) == ("j", 7, 3.5, 0.5)
    assert send(settings, server) == 0


def test_reports_are_due_when_there_is_something_new_and_not_again_at_once(settings: ClientSettings) -> None:
    tier = settings.tier_dir
    assert not reports.due(tier)
    record(tier, verdict="local", key=KEY)
    assert reports.due(tier)
    send(settings, Server())
    record(tier, verdict="local", key=KEY)
    assert not reports.due(tier), "just reported"
    cursor = Path(reports._cursor_path(tier))
    old = cursor.stat().st_mtime - reports.EVERY_SECONDS - 1
    os.utime(cursor, (old, old))
    assert reports.due(tier)


def test_files_that_are_old_and_sent_are_removed(settings: ClientSettings) -> None:
    record(settings.tier_dir, verdict="local", key=KEY)
    (path,) = (Path(settings.tier_dir) / "records").glob("*.jsonl")
    send(settings, Server())
    old = path.stat().st_mtime - 31 * 86400
    os.utime(path, (old, old))
    send(settings, Server())
    assert not path.exists()
