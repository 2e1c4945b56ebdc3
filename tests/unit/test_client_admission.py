"""How many compiles a host runs at once, and with what memory."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from neffcache_client import admission
from neffcache_client.admission import Ticket, wait_for_turn
from neffcache_client.history import Expected, History
from neffcache_client.memory import free_bytes
from support.waiting import wait_until

GB = 1 << 30
PLENTY = 1000 * GB
Make = Callable[..., Ticket]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Ticket] = []

    def ticket(limit: int | None = None, free: int | None = PLENTY) -> Ticket:
        made.append(Ticket(str(tmp_path / "locks"), limit, lambda: free))
        return made[-1]

    yield ticket
    for one in made:
        one.leave()


def test_no_more_than_the_limit_run_at_once(make: Make) -> None:
    """UC-04"""
    tickets = [make(limit=2) for _ in range(4)]
    assert [t.enter(Expected()) for t in tickets] == [True, True, False, False]
    tickets[0].leave()
    assert [t.worth_a_try() for t in tickets[2:]] == [True, True]
    assert [t.enter(Expected()) for t in tickets[2:]] == [True, False]


def test_of_six_compiles_of_thirty_gigabytes_three_fit_into_a_hundred(make: Make) -> None:
    """UC-09"""
    tickets = [make(free=100 * GB) for _ in range(6)]
    assert [t.enter(Expected(30 * GB, 60.0)) for t in tickets] == [True] * 3 + [False] * 3


def test_memory_that_a_compile_has_taken_is_not_kept_free_twice(make: Make) -> None:
    first, second = make(free=100 * GB), make(free=40 * GB)
    assert first.enter(Expected(60 * GB))
    assert not second.enter(Expected(30 * GB)), "40 are free, but 60 of them are promised"
    first.note(58 * GB)
    assert second.enter(Expected(30 * GB))


def test_a_compile_that_is_alone_is_let_in_whatever_it_takes(make: Make) -> None:
    """Nothing waits for ever for memory that this host does not have."""
    assert make(free=1 * GB).enter(Expected(500 * GB))


def test_the_longest_goes_first_and_nobody_waits_for_ever(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    running, short, long = (make(limit=1) for _ in range(3))
    running.enter(Expected())
    assert not short.enter(Expected(None, 10.0))
    assert not long.enter(Expected(None, 900.0))
    running.leave()
    assert not short.enter(Expected(None, 10.0))
    monkeypatch.setattr(admission, "_LONG_WAIT_SECONDS", -1.0)
    assert short.enter(Expected(None, 1000.0))


def test_a_large_compile_is_not_starved_by_small_ones(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    running, large, small = (make(free=50 * GB) for _ in range(3))
    running.enter(Expected(20 * GB))
    assert not large.enter(Expected(40 * GB, 100.0))
    assert small.enter(Expected(1 * GB, 1.0)), "there is room beside the large one that waits"
    small.leave()
    monkeypatch.setattr(admission, "_LONG_WAIT_SECONDS", -1.0)
    assert not small.enter(Expected(1 * GB, 1.0)), "once it has waited long, nobody passes it"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_process_gives_its_place_up(tmp_path: Path, make: Make, number: int) -> None:
    code = (
        "import sys; from neffcache_client.admission import Ticket; from neffcache_client.history import Expected\n"
        f"t = Ticket({str(tmp_path / 'locks')!r}, 1); print(t.enter(Expected()), flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"True\n"
            ticket = make(limit=1)
            assert not ticket.enter(Expected())
            holder.send_signal(number)
            wait_until(lambda: ticket.enter(Expected()))
        finally:
            holder.kill()


def test_a_stuck_decision_or_an_unusable_folder_lets_everybody_in(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "_LOCK_SECONDS", 0.05)
    assert make(limit=1).enter(Expected())
    with open(tmp_path / "locks" / "neffcache" / "compiles.lock", "rb") as stuck:
        fcntl.flock(stuck, fcntl.LOCK_EX)
        assert make(limit=1).enter(Expected())
    (tmp_path / "file").write_text("")
    assert Ticket(str(tmp_path / "file"), 1).enter(Expected())


def test_an_abort_ends_the_waiting_and_leaves_the_queue(tmp_path: Path, make: Make) -> None:
    running, waiting = make(limit=1), make(limit=1)
    running.enter(Expected())
    abort = threading.Event()
    threading.Timer(0.2, abort.set).start()
    assert not wait_for_turn(waiting, Expected(), abort)
    assert len(os.listdir(tmp_path / "locks" / "neffcache" / "compiles")) == 1


def test_history_knows_the_key_or_else_graphs_of_about_that_size(tmp_path: Path) -> None:
    history = History(str(tmp_path))
    assert history.expect("a" * 64, 1000) == Expected()
    for n, peak in enumerate((10 * GB, 30 * GB, 20 * GB)):
        history.note(f"{n}" * 64, 900 + n, peak=peak, seconds=float(n))
    history.note("f" * 64, 1000, peak=90 * GB, seconds=5.0, too_little=True)
    assert history.expect("1" * 64, None) == Expected(30 * GB, 1.0)
    assert history.expect("a" * 64, 1000) == Expected(30 * GB, 1.0), "a guess after a kill says nothing of others"
    assert history.expect("f" * 64, 1000) == Expected(90 * GB, 5.0)
    assert history.expect("a" * 64, 100_000) == Expected()
    assert history.expect("a" * 64, None) == Expected()


def test_history_passes_over_lines_that_make_no_sense(tmp_path: Path) -> None:
    history = History(str(tmp_path))
    history.note("1" * 64, 900, peak=GB, seconds=1.0)
    file = next((tmp_path / "history").iterdir())
    file.write_bytes(
        b'{"key": 1}\nnull\n[]\n\xff{"key": "x", "peak": "much"}\n' + file.read_bytes() + b'{"key": "cut'
    )
    assert history.expect("2" * 64, 901) == Expected(GB, 1.0)
    (tmp_path / "history" / "x").mkdir()
    History(str(file)).note("1" * 64, 900, peak=GB, seconds=1.0)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_memory_is_the_smaller_of_the_host_and_every_group_above(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    _write(proc / "meminfo", "MemTotal: 99 kB\nMemAvailable: 4000 kB\n")
    assert free_bytes(str(proc), str(groups)) == 4000 * 1024
    _write(proc / "self" / "cgroup", "0::/pod/job\n")
    _write(groups / "pod" / "job" / "memory.max", "max\n")
    _write(groups / "pod" / "job" / "memory.current", "100\n")
    _write(groups / "pod" / "memory.max", "5000\n")
    _write(groups / "pod" / "memory.current", "3000\n")
    _write(groups / "pod" / "memory.stat", "anon 1\ninactive_file 500\n")
    assert free_bytes(str(proc), str(groups)) == 2500


def test_the_older_control_groups_are_understood(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    _write(proc / "self" / "cgroup", "5:cpu,cpuacct:/\n4:memory:/not/visible/in/the/container\n")
    _write(groups / "memory" / "memory.limit_in_bytes", "9000\n")
    _write(groups / "memory" / "memory.usage_in_bytes", "8000\n")
    _write(groups / "memory" / "memory.stat", "total_inactive_file 7000\n")
    assert free_bytes(str(proc), str(groups)) == 8000


def test_a_host_that_tells_nothing_is_not_judged(tmp_path: Path) -> None:
    assert free_bytes(str(tmp_path), str(tmp_path)) is None
