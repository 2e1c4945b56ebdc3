"""One process per host finds out that the server is away."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest
from neffcache_client import breaker
from neffcache_client.breaker import Breaker

SERVER = "http://cache:8765\ndefault\n"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(breaker, "_now", clock)
    return clock


def make(folder: Path, identity: str = SERVER) -> Breaker:
    return Breaker(str(folder), identity)


def test_everybody_asks_until_somebody_failed(tmp_path: Path, clock: Clock) -> None:
    assert make(tmp_path).allow()
    make(tmp_path).failed("refused")
    later = make(tmp_path)
    assert not later.allow()
    assert later.why == "refused"


def test_another_server_or_token_has_its_own_breaker(tmp_path: Path, clock: Clock) -> None:
    make(tmp_path).failed("refused")
    assert make(tmp_path, "http://other:8765\ndefault\n").allow()
    assert make(tmp_path, SERVER + "token").allow()


def test_half_open_lets_exactly_one_probe(tmp_path: Path, clock: Clock) -> None:
    """UC-10."""
    make(tmp_path).failed("refused")
    clock.now += 40
    breakers = [make(tmp_path) for _ in range(8)]
    allowed = [b for b in breakers if b.allow()]
    assert len(allowed) == 1
    allowed[0].succeeded()
    assert all(make(tmp_path).allow() for _ in range(3))


def test_a_failed_probe_opens_again(tmp_path: Path, clock: Clock) -> None:
    make(tmp_path).failed("refused")
    clock.now += 40
    prober = make(tmp_path)
    assert prober.allow()
    prober.failed("still away")
    assert not make(tmp_path).allow()
    clock.now += 40
    assert make(tmp_path).allow()


def test_a_prober_that_dies_leaves_the_probe_to_the_next(tmp_path: Path, clock: Clock) -> None:
    make(tmp_path).failed("refused")
    record = Path(make(tmp_path).path)
    fields = json.loads(record.read_text())
    fields["until"] = 0.001
    record.write_text(json.dumps(fields))
    code = f"from neffcache_client.breaker import Breaker; assert Breaker({str(tmp_path)!r}, {SERVER!r}).allow()"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert make(tmp_path).allow()


def seconds_open(folder: Path, clock: Clock) -> float:
    until: float = json.loads(Path(make(folder).path).read_text())["until"]
    return until - clock.now


def test_it_opens_for_a_restart_at_first_and_twice_as_long_after_each_failed_probe(
    tmp_path: Path, clock: Clock
) -> None:
    for seconds in (4, 8, 16, 30, 30):
        asking = make(tmp_path)
        assert asking.allow()
        asking.failed("away")
        assert seconds * 0.8 <= seconds_open(tmp_path, clock) <= seconds * 1.2
        clock.now += seconds * 0.79
        assert not make(tmp_path).allow()
        clock.now += seconds * 0.42


def test_eight_ranks_that_fail_together_are_one_failure(tmp_path: Path, clock: Clock) -> None:
    ranks = [make(tmp_path) for _ in range(8)]
    assert all(rank.allow() for rank in ranks)
    for rank in ranks:
        rank.failed("away")
    assert seconds_open(tmp_path, clock) <= 4.8


def test_where_no_lock_can_be_had_everybody_probes(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path).failed("refused")
    clock.now += 40

    def no_locks(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    prober = make(tmp_path)
    assert prober.allow()
    prober.succeeded()
    assert make(tmp_path).allow()


def test_an_answer_ends_the_outage_for_good(tmp_path: Path, clock: Clock) -> None:
    for _ in range(4):
        asking = make(tmp_path)
        assert asking.allow()
        asking.failed("away")
        clock.now += 40
    prober = make(tmp_path)
    assert prober.allow()
    prober.succeeded()
    asking = make(tmp_path)
    assert asking.allow()
    asking.failed("away again")
    assert seconds_open(tmp_path, clock) <= 4.8


@pytest.mark.parametrize(
    "content",
    ["", "garbage", "[]", '{"until": 1e9, "seconds": "x"}', '{"boot": "another", "until": 9e9}', '{"until": "x"}'],
)
def test_a_file_that_says_nothing_means_closed(tmp_path: Path, clock: Clock, content: str) -> None:
    path = Path(make(tmp_path).path)
    path.parent.mkdir()
    path.write_text(content)
    assert make(tmp_path).allow()


def test_no_file_keeps_a_host_away_for_longer_than_one_interval(tmp_path: Path, clock: Clock) -> None:
    make(tmp_path).failed("refused")
    path = Path(make(tmp_path).path)
    path.write_text(path.read_text().replace("10", "99999999", 1))
    late = make(tmp_path)
    late.allow()
    clock.now += 37
    assert late.allow() or make(tmp_path).allow()


def test_without_a_usable_folder_the_process_remembers_for_itself(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "file").write_text("")
    b = make(tmp_path / "file")
    assert b.allow()
    b.failed("refused")
    assert not b.allow()
    clock.now += 40
    assert b.allow()
