"""Several serving processes behind one listening socket, for one host with several processors."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)
_RESTART_SECONDS = 1.0
_JOIN_SECONDS = 2.0

Run = Callable[[Callable[[], None], int], int]
"""Serves in a child; takes what to call when ready and a descriptor that ends when the parent does."""


class Workers:
    """Keeps `count` children running until a signal comes. One that dies is replaced."""

    def __init__(self, count: int, run: Run, ready: Callable[[], None]) -> None:
        """`ready` is called when every child is. To be used before any thread is started: it forks."""
        self._count = count
        self._run = run
        self._ready = ready
        self._children: set[int] = set()
        self._stopping = False
        # Children hold the reading end; it ends when this process does, however it does.
        self._lifeline, self._life = os.pipe()

    def serve(self) -> int:
        """Run until SIGTERM or SIGINT; returns the exit code."""
        for thread in threading.enumerate():
            # A fork copies a lock that another thread holds, held for ever.
            if thread is not threading.current_thread():
                thread.join(_JOIN_SECONDS)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        waiting = [self._start() for _ in range(self._count)]
        for descriptor in waiting:
            came = self._read(descriptor)
            os.close(descriptor)
            if not came and not self._stopping:
                # It has said why on stderr; the others would not do better.
                self._stop()
                self._reap()
                return 1
        if not self._stopping:
            self._ready()
        self._reap()
        return 0

    def _start(self) -> int:
        """A new child; returns a descriptor that has a byte when it serves, and ends when it died before."""
        reading, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            self._child(reading, writing)
        os.close(writing)
        self._children.add(pid)
        if self._stopping:
            # The signal came while it was being made, and told only those that were there.
            os.kill(pid, signal.SIGTERM)
        return reading

    def _child(self, reading: int, writing: int) -> None:
        code = 1
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            os.close(reading)
            os.close(self._life)
            code = self._run(lambda: _say(writing), self._lifeline)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        while self._children:
            try:
                pid, status = os.wait()
            except ChildProcessError:
                return
            if pid not in self._children:
                continue
            self._children.discard(pid)
            if self._stopping:
                continue
            _log.warning("worker %d ended with %d; starting another", pid, os.waitstatus_to_exitcode(status))
            # Not at once: one that cannot start would be started a thousand times a second.
            time.sleep(_RESTART_SECONDS)
            if not self._stopping:
                os.close(self._start())

    def _read(self, descriptor: int) -> bytes:
        return os.read(descriptor, 1)

    def _on_signal(self, _number: int, _frame: Any) -> None:
        self._stop()

    def _stop(self) -> None:
        self._stopping = True
        for pid in self._children:
            try:
                os.kill(pid, signal.SIGTERM)
            except ProcessLookupError:
                continue


def _say(descriptor: int) -> None:
    try:
        os.write(descriptor, b".")
    except BrokenPipeError:
        return
    finally:
        os.close(descriptor)
