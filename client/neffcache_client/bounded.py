"""Calls that may hang, bounded: run in a daemon thread and left behind when time is up or the job is over.

A look-up in DNS, a connect or a read may sit in the kernel far longer than any time-out handed to a library. The
thread that makes the call cannot be stopped, but nobody has to wait for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from neffcache_client.errors import Aborted

T = TypeVar("T")
_LOOK_SECONDS = 0.1


class TimeIsUp(Exception):
    """The call did not end in time and was left behind."""


class Interrupted(Exception):
    """Something happened that matters more than the call, which was left behind."""


class _Call(Generic[T]):
    def __init__(self, call: Callable[[], T], late: Callable[[T], None] | None) -> None:
        self.done = threading.Event()
        self.result: T
        self.error: BaseException | None = None
        self._call = call
        self._late = late
        self._lock = threading.Lock()
        self._abandoned = False

    def run(self) -> None:
        try:
            result = self._call()
        except BaseException as exc:
            self.error = exc
            self.done.set()
            return
        with self._lock:
            self.result = result
            self.done.set()
            late = self._late if self._abandoned else None
        if late is not None:
            late(result)

    def abandon(self) -> bool:
        """True when the call had not ended; its result then goes to `late`."""
        with self._lock:
            self._abandoned = True
            return not self.done.is_set()


def bounded(
    call: Callable[[], T],
    *,
    seconds: float | None,
    abort: threading.Event | None,
    late: Callable[[T], None] | None = None,
    interrupt: Callable[[], bool] | None = None,
    more: Callable[[], float] | None = None,
) -> T:
    """The result of `call`, or what it raises.

    `more` may add to `seconds` once they are over.

    Raises TimeIsUp after that, and within 100 ms Aborted for `abort` and Interrupted for a true `interrupt`. A
    result that comes after that is handed to `late` in the left-behind thread, for undoing what it means.
    """
    task = _Call(call, late)
    threading.Thread(target=task.run, name="neffcache-call", daemon=True).start()
    deadline = None if seconds is None else time.monotonic() + seconds
    while not task.done.is_set():
        left = _LOOK_SECONDS if deadline is None else min(_LOOK_SECONDS, deadline - time.monotonic())
        if left <= 0 and deadline is not None and more is not None:
            deadline, more = deadline + more(), None
            continue
        reason: Exception | None = None
        if abort is not None and abort.is_set():
            reason = Aborted()
        elif left <= 0:
            reason = TimeIsUp()
        elif interrupt is not None and interrupt():
            reason = Interrupted()
        if reason is not None and task.abandon():
            raise reason
        task.done.wait(max(left, 0.0))
    if task.error is not None:
        raise task.error
    return task.result
