"""One leader per key and host, and a dead leader's name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from neffcache_client.errors import Aborted
from neffcache_client.host_lock import HostLock, LockRecord, file_system_type, is_local
from neffcache_client.identity import boot_id, is_gone, is_running, start_time
from support.waiting import wait_until

KEY = "cd" * 32
LEASE = "0f" * 16
_HOLD = """
import sys, time
from neffcache_client.host_lock import HostLock
lock = HostLock(sys.argv[1], "default", sys.argv[2])
assert lock.try_lock()
lock.write(sys.argv[3])
print("held", flush=True)
time.sleep(60)
"""


def lock_in(folder: Path) -> HostLock:
    return HostLock(str(folder), "default", KEY)


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock."""
    command = [sys.executable, "-c", _HOLD, str(folder), KEY, LEASE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def never() -> bool:
    return False


def test_only_one_gets_the_lock(tmp_path: Path) -> None:
    a, b = lock_in(tmp_path), lock_in(tmp_path)
    assert a.try_lock() is True
    assert b.try_lock() is False
    a.release()
    assert b.try_lock() is True
    b.release()


def test_a_killed_leader_wakes_the_waiter_and_names_its_lease(tmp_path: Path) -> None:
    """UC-01: same host, no TTL involved."""
    with holder(tmp_path) as process:
        lock = lock_in(tmp_path)
        threading.Thread(target=process.kill).start()
        assert lock.wait(30, abort=threading.Event(), peek=never)
        record = lock.read()
        assert record is not None
        assert record.lease_id == LEASE
        wait_until(record.died, seconds=5)
        lock.release()


def test_a_clean_end_leaves_nothing_to_supersede(tmp_path: Path) -> None:
    lock = lock_in(tmp_path)
    lock.try_lock()
    lock.write(LEASE)
    lock.release()
    lock.try_lock()
    assert lock.read() is None
    lock.release()


def test_an_unclean_end_keeps_the_record(tmp_path: Path) -> None:
    lock = lock_in(tmp_path)
    lock.try_lock()
    lock.write(LEASE)
    lock.release(clean=False)
    record = lock.read()
    assert record is not None
    assert not record.died(), "this process lives"


def test_a_waiter_never_changes_the_file(tmp_path: Path) -> None:
    with holder(tmp_path):
        lock = lock_in(tmp_path)
        before = Path(lock.path).read_bytes()
        assert lock.wait(0.2, abort=threading.Event(), peek=never) is False
        lock.write("ff" * 16)
        lock.release()
        assert Path(lock.path).read_bytes() == before


def test_an_abort_ends_the_wait_and_the_lock_is_not_kept(tmp_path: Path) -> None:
    first, second, third = lock_in(tmp_path), lock_in(tmp_path), lock_in(tmp_path)
    first.try_lock()
    abort = threading.Event()
    abort.set()
    with pytest.raises(Aborted):
        second.wait(30, abort=abort, peek=never)
    first.release()
    # The thread that was left behind gets the lock, and lets go of it.
    wait_until(lambda: not any(t.name == "neffcache-lock" for t in threading.enumerate()))
    assert third.try_lock() is True
    third.release()


def test_a_wait_ends_when_the_neff_is_there(tmp_path: Path) -> None:
    first, second = lock_in(tmp_path), lock_in(tmp_path)
    first.try_lock()
    assert second.wait(30, abort=threading.Event(), peek=lambda: True) is False
    assert second.contended
    first.release()
    wait_until(second.arrived, seconds=10)
    second.release()


def test_a_folder_that_cannot_be_made_means_no_lock_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    lock = HostLock(str(tmp_path / "file"), "default", KEY)
    assert lock.try_lock() is None
    assert lock.wait(30, abort=threading.Event(), peek=never) is False
    lock.write(LEASE)
    lock.release()


def test_a_link_in_a_shared_folder_is_not_followed(tmp_path: Path) -> None:
    lock = lock_in(tmp_path)
    os.makedirs(os.path.dirname(lock.path))
    victim = tmp_path / "victim"
    victim.write_text("precious")
    os.symlink(victim, lock.path)
    assert lock.try_lock() is None
    assert victim.read_text() == "precious"


def test_the_lock_file_is_private(tmp_path: Path) -> None:
    """It holds a lease id, which is a secret."""
    lock = lock_in(tmp_path)
    lock.try_lock()
    assert os.stat(lock.path).st_mode & 0o077 == 0
    lock.release()


def test_a_record_of_another_boot_is_not_ours_to_supersede(tmp_path: Path) -> None:
    """UC-01: files left over from before a reboot. The server would not take the word of another boot either."""
    assert LockRecord(boot_id(), 1, 0, LEASE).died(), "the pid is another process's by now"
    assert not LockRecord("another", 1, 0, LEASE).died()
    assert not LockRecord("", 1, 0, LEASE).died()


def test_garbage_in_the_file_is_no_record(tmp_path: Path) -> None:
    lock = lock_in(tmp_path)
    lock.try_lock()
    Path(lock.path).write_bytes(b'{"boot": 3')
    assert lock.read() is None
    lock.release()


def test_a_stopped_process_is_not_running_and_a_dead_one_is_gone(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        started = start_time(process.pid)
        assert is_running(process.pid, started)
        assert not is_running(process.pid, started + 1), "a reused pid"
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: not is_running(process.pid, started))
        assert not is_gone(process.pid, started)
        process.kill()
        wait_until(lambda: is_gone(process.pid, started))


def test_network_file_systems_are_told_from_local_ones(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/a / ext4 rw 0 0\nfs:/x /fsx lustre rw 0 0\nh:/y /home/my\\040nfs nfs4 rw 0 0\n")
    assert file_system_type("/fsx/cache", str(mounts)) == "lustre"
    assert file_system_type("/home/my nfs/cache", str(mounts)) == "nfs4"
    assert file_system_type("/fsxx", str(mounts)) == "ext4"
    assert is_local(str(tmp_path))


def test_no_lock_is_taken_on_a_network_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neffcache_client.host_lock.file_system_type", lambda path: "lustre")
    assert lock_in(tmp_path).try_lock() is None
