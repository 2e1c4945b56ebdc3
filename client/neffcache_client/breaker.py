"""Remembers for all processes of a host that the server could not be used, so that only one of them pays to find out.

Each launcher is a new process, so the state is a small file per host, user, server, namespace and token:

    closed     no file, or an empty record: everybody asks
    open       until an instant: everybody skips the server at once
    half-open  the instant has passed: exactly one process asks (it holds the file's flock), the others skip

It opens for a few seconds at first, since most outages are restarts, and twice as long after each probe that fails.

Instants are of CLOCK_BOOTTIME and bound to the boot id, so neither a set clock nor a reboot keeps a breaker open.
Where no file can be kept the breaker lives in the process alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import time

from neffcache_client.host_lock import open_private
from neffcache_client.identity import boot_id

FIRST_SECONDS = 4.0
OPEN_SECONDS = 30.0
"""At most, give or take the jitter."""
_JITTER = 0.2
_RECORD_BYTES = 1024


class Breaker:
    """Ask `allow` before a first contact, then tell it `succeeded` or `failed`."""

    def __init__(self, lock_dir: str, identity: str) -> None:
        """`identity` is whatever makes one server another: URL, namespace, token. It is kept as a digest only."""
        digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self.path = os.path.join(lock_dir, "neffcache", f"breaker-{digest}")
        self._probe_fd: int | None = None
        self._open_until = 0.0
        self._seconds = 0.0
        self._why = ""

    @property
    def why(self) -> str:
        """What was wrong when it opened."""
        return self._why

    def allow(self) -> bool:
        """May this process ask the server? True makes it the prober when the breaker is half-open."""
        self._load()
        if self._open_until == 0.0:
            return True
        if _now() < self._open_until:
            return False
        return self._become_prober()

    def succeeded(self) -> None:
        """The server answered: close for everybody."""
        if self._open_until or self._probe_fd is not None:
            self._save(0.0, 0.0, "")
        self._end_probe()

    def failed(self, why: str) -> None:
        """The server could not be used: open for everybody, give or take 20 % so that hosts spread out."""
        # By what this process saw before it asked: many that fail at the same time are one failure.
        seconds = min(OPEN_SECONDS, 2 * self._seconds or FIRST_SECONDS)
        self._save(_now() + seconds * random.uniform(1 - _JITTER, 1 + _JITTER), seconds, why)
        self._end_probe()

    def given_up(self) -> None:
        """The question was not answered either way (an abort): let the next process probe."""
        self._end_probe()

    def _become_prober(self) -> bool:
        fd = open_private(self.path)
        if fd is None:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        except OSError:
            # No locks here. Rather many probes than none for ever.
            os.close(fd)
            return True
        # The last prober may have finished between our look and our lock.
        self._load()
        if _now() < self._open_until:
            os.close(fd)
            return False
        self._probe_fd = fd
        return True

    def _end_probe(self) -> None:
        if self._probe_fd is not None:
            os.close(self._probe_fd)
            self._probe_fd = None

    def _load(self) -> None:
        try:
            with open(self.path, "rb") as f:
                fields = json.loads(f.read(_RECORD_BYTES) or b"{}")
            until = float(fields.get("until", 0.0)) if fields.get("boot") == boot_id() else 0.0
            seconds = float(fields.get("seconds", 0.0)) if until else 0.0
            why = str(fields.get("why", ""))
        except OSError:
            return
        except (ValueError, TypeError, AttributeError):
            until, seconds, why = 0.0, 0.0, ""
        # Whatever the file says, nobody stays away for longer than one full interval.
        self._open_until = min(until, _now() + OPEN_SECONDS * (1 + _JITTER))
        self._seconds = max(0.0, seconds)
        self._why = why

    def _save(self, until: float, seconds: float, why: str) -> None:
        self._open_until, self._seconds, self._why = until, seconds, why
        fd = self._probe_fd if self._probe_fd is not None else open_private(self.path)
        if fd is None:
            return
        record = json.dumps({"boot": boot_id(), "until": until, "seconds": seconds, "why": why[:120]}).encode()
        try:
            os.pwrite(fd, record.ljust(_RECORD_BYTES - 1) + b"\n", 0)
        except OSError:
            return
        finally:
            if fd is not self._probe_fd:
                os.close(fd)


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
