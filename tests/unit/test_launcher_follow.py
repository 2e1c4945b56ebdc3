from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from neffcache_client.host_lock import HostLock
from neffcache_hook.launcher import follow as module
from neffcache_hook.launcher.follow import CallerGone, follow
from neffcache_hook.launcher.main import Caller


@pytest.fixture
def lock(tmp_path: Path) -> HostLock:
    return HostLock(str(tmp_path), "default", "ab" * 32)


@pytest.fixture
def caller() -> Iterator[Caller]:
    caller = Caller()
    yield caller
    if caller.fd >= 0:
        os.close(caller.fd)


@pytest.fixture
def leader(tmp_path: Path) -> Iterator[HostLock]:
    leader = HostLock(str(tmp_path), "default", "ab" * 32)
    assert leader.try_lock()
    leader.write("1" * 32)
    yield leader
    leader.release()


def test_without_a_leader_nobody_is_followed(lock: HostLock, caller: Caller) -> None:
    assert not follow(lock, caller, lambda: False)
    assert not os.path.exists(lock.path)


def test_a_neff_that_arrives_ends_the_waiting(lock: HostLock, caller: Caller, leader: HostLock) -> None:
    looks = iter([False, False, True])
    assert follow(lock, caller, lambda: next(looks))


def test_a_leader_that_lets_go_without_a_neff_ends_it_too(lock: HostLock, caller: Caller, leader: HostLock) -> None:
    """A leader that died: its lease must still be in the file for the next one to supersede."""

    def arrived() -> bool:
        leader.release(clean=False)
        return False

    assert not follow(lock, caller, arrived)
    record = lock.read()
    assert record is not None
    assert record.lease_id == "1" * 32


def test_a_stuck_leader_is_not_followed_for_ever(
    lock: HostLock, caller: Caller, leader: HostLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SECONDS", 0.0)
    monkeypatch.setattr(module, "_SPREAD_SECONDS", 1)
    assert not follow(lock, caller, lambda: False)


def test_the_callers_death_ends_the_waiting(lock: HostLock, leader: HostLock) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    caller = Caller.__new__(Caller)
    caller.pid, caller.fd = os.getppid(), os.pidfd_open(child.pid)
    threading.Timer(0.1, child.stdin.close).start()
    try:
        with pytest.raises(CallerGone):
            follow(lock, caller, lambda: False)
    finally:
        os.close(caller.fd)
        child.wait()


def test_followers_that_look_do_not_stand_in_each_others_way(lock: HostLock, leader: HostLock) -> None:
    leader.release()
    with open(lock.path, "rb") as other:
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        assert not module._is_held(lock.path)
