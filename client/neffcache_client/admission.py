"""Which compiles may run on this host now, by their number and by the memory they will take.

    <lock_dir>/neffcache/compiles/<pid>-<random>    one per compile that runs or wants to, locked by its process

Decisions are made one at a time under a lock of their own. A compile that is alone is always let in, however much it
may take, so nothing waits for ever for room that this host will never have. Where no file can be kept there is no
admission. Those who know that they take long go first; whoever has waited for five minutes goes before them.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING

from neffcache_client import memory
from neffcache_client.history import Expected
from neffcache_client.host_lock import open_private
from neffcache_client.identity import is_running, start_time
from neffcache_client.local_tier import remove_quietly

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator

_RECORD_BYTES = 256
_LOCK_SECONDS = 1.0
_LOOK_AGAIN_SECONDS = 1.0
_LONG_WAIT_SECONDS = 300.0


class _Record:
    """One compile of this host as its file tells it."""

    __slots__ = ("pid", "rss", "running", "seconds", "since", "start", "want")

    def __init__(self, pid: int, start: int) -> None:
        self.pid = pid
        self.start = start
        self.running = False
        self.want: int | None = None
        """Bytes that it is expected to take at most."""
        self.rss = 0
        self.seconds: float | None = None
        self.since = time.monotonic()

    def pack(self) -> bytes:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(fields).encode().ljust(_RECORD_BYTES - 1) + b"\n"

    @classmethod
    def unpack(cls, raw: bytes) -> _Record:
        """Raises ValueError."""
        try:
            fields = json.loads(raw)
            record = cls(int(fields["pid"]), int(fields["start"]))
            for name in cls.__slots__:
                setattr(record, name, fields[name])
        except (KeyError, TypeError) as exc:
            raise ValueError("no record") from exc
        return record

    def order(self) -> tuple[bool, float, float]:
        return not self.waits_long, -(self.seconds or 0.0), self.since

    @property
    def waits_long(self) -> bool:
        return time.monotonic() - self.since > _LONG_WAIT_SECONDS


class Ticket:
    """One process's wish to compile. `enter` until it is True, `note` the memory meanwhile, `leave` at the end."""

    def __init__(self, lock_dir: str, limit: int | None, free: Callable[[], int | None] = memory.free_bytes) -> None:
        """`limit`: compiles at once, None for any number."""
        self._folder = os.path.join(lock_dir, "neffcache", "compiles")
        self._limit = limit
        self._free = free
        self._path = ""
        self._fd: int | None = None
        self._mine = _Record(os.getpid(), start_time())
        self._looked_at = 0.0
        self._seen = 0

    @property
    def running(self) -> bool:
        """It was let in and has not left."""
        return self._mine.running

    @property
    def queued(self) -> bool:
        """It was refused and stands in the queue."""
        return self._fd is not None and not self._mine.running

    def enter(self, expected: Expected) -> bool:
        """May this compile begin? False puts it into the queue."""
        if self._mine.running:
            return True
        self._mine.want, self._mine.seconds = expected
        with self._one_at_a_time() as alone:
            if not alone or not self._stand():
                # Better too many compiles than none.
                self._mine.running = True
                return True
            self._mine.running = self._my_turn()
            self._write()
        self._looked_at, self._seen = time.monotonic(), self._state()
        return self._mine.running

    def worth_a_try(self) -> bool:
        """Cheap: True when somebody came or went since the last `enter`, or it was a while ago."""
        return self._state() != self._seen or time.monotonic() - self._looked_at > _LOOK_AGAIN_SECONDS

    def note(self, rss: int) -> None:
        """What the compile takes at present: so much of its estimate is no longer to be kept free."""
        self._mine.rss = rss
        self._write()

    def leave(self) -> None:
        """The compile has ended, or is not wanted any more."""
        self._mine.running = False
        if self._fd is not None:
            remove_quietly(self._path)
            os.close(self._fd)
            self._fd = None

    def _my_turn(self) -> bool:
        others = self._others()
        running = [other for other in others if other.running]
        queue = [other for other in others if not other.running]
        for first in sorted([*queue, self._mine], key=_Record.order):
            if self._fits(first, running):
                return first is self._mine
            if first.waits_long:
                return False
        return False

    def _fits(self, record: _Record, running: list[_Record]) -> bool:
        if not running:
            return True
        if self._limit is not None and len(running) >= self._limit:
            return False
        free = self._free() if record.want is not None else None
        if free is None or record.want is None:
            return True
        promised = sum(max(0, other.want - other.rss) for other in running if other.want is not None)
        return record.want <= free - promised

    def _others(self) -> list[_Record]:
        """The living, without those that are stopped: they may never go on, and shall stop nobody else."""
        found = []
        for name in self._names():
            path = os.path.join(self._folder, name)
            record = None if path == self._path else _read(path)
            if record is not None and is_running(record.pid, record.start):
                found.append(record)
        return found

    def _stand(self) -> bool:
        """Have a file of one's own; False when there can be none."""
        if self._fd is None:
            self._path = os.path.join(self._folder, f"{os.getpid()}-{os.urandom(6).hex()}")
            self._fd = open_private(self._path)
            if self._fd is not None:
                self._mine.since = time.monotonic()
                fcntl.flock(self._fd, fcntl.LOCK_EX)
                self._write()
        return self._fd is not None

    def _write(self) -> None:
        if self._fd is None:
            return
        try:
            os.pwrite(self._fd, self._mine.pack(), 0)
        except OSError:
            return

    def _names(self) -> list[str]:
        try:
            return os.listdir(self._folder)
        except OSError:
            return []

    def _state(self) -> int:
        try:
            return os.stat(self._folder).st_mtime_ns
        except OSError:
            return 0

    @contextmanager
    def _one_at_a_time(self) -> Iterator[bool]:
        """False when there can be no lock, or its holder is stuck."""
        fd = open_private(self._folder + ".lock")
        if fd is None:
            yield False
            return
        try:
            yield _locked(fd)
        finally:
            os.close(fd)


def wait_for_turn(ticket: Ticket, expected: Expected, abort: threading.Event) -> bool:
    """Return when the compile may begin; False when `abort` was set first."""
    while not ticket.enter(expected):
        while not ticket.worth_a_try():
            if abort.wait(0.1):
                ticket.leave()
                return False
    return not abort.is_set()


def _locked(fd: int) -> bool:
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        except OSError:
            return False


def _read(path: str) -> _Record | None:
    """The record of a living process; the file of a dead one is removed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _Record.unpack(os.pread(fd, _RECORD_BYTES, 0))
        remove_quietly(path)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
    return None
