"""One leader per key and host: whoever holds the flock asks the server, the others wait for the local tier.

The lock is an optimisation. The server's lease decides who compiles, so a lock that cannot be had (folder not
writable, network file system) or that is held by a stopped process is done without.

The file holds one fixed-size record, written by the holder before it asks the server and blanked after a clean end:

    {"boot": ..., "pid": ..., "start": ..., "lease": ...}

A lock that is free while its record is filled in means that the leader died, and names the lease to supersede. The
file is never truncated or unlinked: a waiter that did either would split the lock in two. Light imports.
"""

from __future__ import annotations

import fcntl
import json
import os
import time

from neffcache_client.errors import Aborted
from neffcache_client.identity import boot_id, is_gone, is_running, start_time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from collections.abc import Callable
    from typing import Any

    from neffcache_client.lock_waiter import LockWaiter

_RECORD_BYTES = 512
_DYING_SECONDS = 1.0
# flock on these is a lie, a round trip to a lock daemon that may be absent, or both.
_NETWORK = (
    *("9p", "afs", "beegfs", "ceph", "cifs", "fuse.ceph", "fuse.glusterfs", "fuse.s3fs", "fuse.sshfs", "glusterfs"),
    *("gpfs", "lustre", "nfs", "nfs4", "panfs", "smb2", "smb3", "smbfs", "wekafs"),
)


class LockRecord:
    """Who held the lock last, and the lease it had."""

    __slots__ = ("boot", "lease_id", "pid", "start")

    def __init__(self, boot: str, pid: int, start: int, lease_id: str) -> None:
        self.boot = boot
        self.pid = pid
        self.start = start
        self.lease_id = lease_id

    def died(self) -> bool:
        """True when the holder ran under this boot and has ended. Only then may its lease be superseded."""
        return bool(self.boot) and self.boot == boot_id() and is_gone(self.pid, self.start)

    def ours(self) -> bool:
        """True when this process wrote it."""
        return self.pid == os.getpid() and self.start == start_time()

    def runs(self) -> bool:
        """True when the holder is known to be alive and not stopped, so that waiting for it makes sense."""
        return bool(self.boot) and self.boot == boot_id() and is_running(self.pid, self.start)


class HostLock:
    """The flock of one key on this host. Use `wait`, then `write`, then `release`."""

    __slots__ = ("_fd", "_waiter", "path")

    def __init__(self, lock_dir: str, namespace: str, key: str) -> None:
        self.path = os.path.join(lock_dir, "neffcache", f"{namespace}-{key}.lock")
        self._fd: int | None = None
        self._waiter: LockWaiter | None = None

    @property
    def held(self) -> bool:
        """This object holds the lock."""
        return self._fd is not None

    def try_lock(self) -> bool | None:
        """Take the lock if it is free. None: there can be no lock here, go on without."""
        fd = open_private(self.path)
        if fd is None:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        except OSError:
            os.close(fd)
            return None
        self._fd = fd
        return True

    def wait(self, seconds: float, *, abort: threading.Event, peek: Callable[[], bool]) -> bool:
        """Wait until the lock is held; False after `seconds`, when `peek` is true, or without a usable lock.

        Raises Aborted. The kernel wakes this process the moment the holder lets go; `peek` and `abort` are looked
        at every 100 ms. After False the request for the lock stands: another `wait` continues it.
        """
        from neffcache_client.lock_waiter import LockWaiter

        if self._waiter is None:
            locked = self.held or self.try_lock()
            fd = None if locked or locked is None else open_private(self.path)
            if fd is None:
                return bool(locked)
            self._waiter = LockWaiter(self.path, fd)
        deadline = time.monotonic() + seconds
        while True:
            fd = self._waiter.wait(0.1)
            if abort.is_set():
                self._fd = fd
                self.release(clean=False)
                raise Aborted
            if fd is not None or self._waiter.failed:
                self._waiter = None
                self._fd = fd
                return self.held
            if peek() or time.monotonic() >= deadline:
                return False

    def arrived(self) -> bool:
        """True when the lock came to a request that a `wait` left standing. Costs nothing, waits for nothing."""
        if self._waiter is not None and (fd := self._waiter.wait(0)) is not None:
            self._waiter = None
            self._fd = fd
            return True
        return False

    @property
    def contended(self) -> bool:
        """Another process holds the lock and this one's request for it stands."""
        return self._fd is None and self._waiter is not None

    def read(self) -> LockRecord | None:
        """What the file says, None when it says nothing that can be trusted. Needs no lock."""
        fd = self._fd
        try:
            if fd is not None:
                return _parse(os.pread(fd, _RECORD_BYTES, 0))
            with open(self.path, "rb") as f:
                return _parse(f.read(_RECORD_BYTES))
        except OSError:
            return None

    def write(self, lease_id: str) -> None:
        """Note this process and its lease, before the server is asked. Nothing happens without the lock."""
        fields = {"boot": boot_id(), "pid": os.getpid(), "start": start_time(), "lease": lease_id}
        self._put(json.dumps(fields).encode())

    def release(self, *, clean: bool = True) -> None:
        """Let go. A clean end blanks the record; after another one the next leader shall see it."""
        if self._waiter is not None:
            self._waiter.abandon()
            self._waiter = None
        if self._fd is not None:
            if clean:
                self._put(b"")
            os.close(self._fd)
            self._fd = None

    def _put(self, record: bytes) -> None:
        # One write of a fixed size, and no truncation: a death in between leaves the old record or the new one.
        if self._fd is None:
            return
        try:
            os.pwrite(self._fd, record.ljust(_RECORD_BYTES - 1) + b"\n", 0)
        except OSError:
            # A full disk costs the next leader a TTL, this job nothing.
            return


def lease_of_the_dead(lock: HostLock, abort: threading.Event) -> str | None:
    """The lease that the last holder of a lock that we hold had, if it died with it. Raises Aborted."""
    record = lock.read()
    if record is None or not record.lease_id or record.ours():
        return None
    # The kernel drops a dying process's locks before the process is gone: look again for a moment.
    deadline = time.monotonic() + _DYING_SECONDS
    while not record.died():
        if time.monotonic() > deadline:
            return None
        if abort.wait(0.05):
            raise Aborted
    return record.lease_id


def file_system_type(path: str, mounts: str = "/proc/self/mounts") -> str:
    """Type of the file system that holds `path`, empty when unknown."""
    real = os.path.realpath(path)
    best, kind = "", ""
    try:
        with open(mounts, encoding="utf-8", errors="surrogateescape") as f:
            for line in f:
                fields = line.split(" ")
                where = fields[1].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
                inside = real == where or real.startswith(where.rstrip("/") + "/")
                # The last of equal mounts covers the earlier ones.
                if inside and len(where) >= len(best):
                    best, kind = where, fields[2]
    except (OSError, IndexError):
        return ""
    return kind


def is_local(path: str) -> bool:
    """True unless `path` is known to be on a network file system."""
    return file_system_type(path) not in _NETWORK


def open_private(path: str) -> int | None:
    """A descriptor for a small state file beside the locks, made if absent; None when there can be none.

    Only for its owner, since it may hold a lease id, and never through a link that someone laid in a shared /tmp.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    folder = os.path.dirname(path)
    try:
        os.makedirs(folder, exist_ok=True)
        if not is_local(folder):
            return None
        return os.open(path, flags, 0o600)
    except OSError:
        return None


def _parse(raw: bytes) -> LockRecord | None:
    try:
        fields: Any = json.loads(raw)
        return LockRecord(str(fields["boot"]), int(fields["pid"]), int(fields["start"]), str(fields["lease"]))
    except (ValueError, KeyError, TypeError):
        return None
