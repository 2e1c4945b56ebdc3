"""Waits for a flock in a thread, so that the kernel wakes the waiter and an abort need not wait for the kernel."""

from __future__ import annotations

import fcntl
import os
import threading


class LockWaiter:
    """One blocking flock on `path`, given up by `abandon`.

    A thread in flock(2) cannot be called back. So an abandoned one stays behind, and lets go of the lock at once
    should it ever get it; it is a daemon and ends with the process at the latest.
    """

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self.failed = False
        self._fd: int | None = fd
        self._state = threading.Condition()
        self._locked = False
        self._abandoned = False
        threading.Thread(target=self._run, args=(fd,), name="neffcache-lock", daemon=True).start()

    def wait(self, seconds: float) -> int | None:
        """The locked descriptor, which is the caller's from now on, or None after `seconds`."""
        with self._state:
            self._state.wait_for(lambda: self._locked or self.failed, seconds)
            if not self._locked:
                return None
            fd, self._fd = self._fd, None
            self._locked = False
            return fd

    def abandon(self) -> None:
        """Stop caring. The descriptor is closed by whichever side has it."""
        with self._state:
            self._abandoned = True
            if self._locked and self._fd is not None:
                os.close(self._fd)
                self._fd = None
                self._locked = False

    def _run(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError:
            os.close(fd)
            with self._state:
                self.failed = True
                self._state.notify_all()
            return
        with self._state:
            if self._abandoned:
                os.close(fd)
                return
            self._locked = True
            self._state.notify_all()
