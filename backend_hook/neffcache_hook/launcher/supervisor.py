"""Runs the compiler so that nothing of it outlives its cause.

A program: `supervisor.py LIFELINE RESULT FOLDER -- COMPILER ARG…`. It has its own session, is a child subreaper, and
holds the read end of a pipe from the launcher (LIFELINE). When that pipe ends, because the launcher died or wants to
stop, every descendant is killed, also those that made a session of their own. Parent-death signals do not do this:
they miss grandchildren, and fire when the thread that forked ends. FOLDER, where the compiler writes, is then
removed: nobody else is left to do it. Lines of JSON go to RESULT:

    {"pid": 12, "rss": 1048576}                                  while it runs
    {"exit": 0, "wall": 1.5, "cpu": 1.2, "peak": 1048576}        once, last; or
    {"error": 2, "text": "No such file or directory"}            the compiler could not be started
    {"stopped": true}                                            all was killed because the lifeline ended

Standard library only, started with `-IS`: its start is on the way of every compile.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import signal
import sys
import time

if __name__ == "__main__":
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    # The same module, found as a file: the package is not on the path of `-IS`.
    from process_tree import (  # type: ignore[import-not-found]
        become_subreaper,
        descendants,
        end_descendants,
        resident_bytes,
    )
else:
    from neffcache_hook.launcher.process_tree import (
        become_subreaper,
        descendants,
        end_descendants,
        resident_bytes,
    )

FIRST_SAMPLES_SECONDS = 0.2
LATER_SAMPLES_SECONDS = 0.5
_FIRST = 10.0
GIVE_UP_SECONDS = 30.0
"""A process that hangs in the kernel ignores even SIGKILL: the job does not wait for it for longer."""


class Supervisor:
    """One compiler, from its start to the end of its last descendant."""

    def __init__(self, lifeline: int, result: int, folder: str) -> None:
        self._lifeline = lifeline
        self._result = result
        self._folder = folder
        self._started = time.monotonic()
        self._pid = 0
        self._status: int | None = None
        self._peak = 0

    def run(self, command: list[str]) -> None:
        """Start `command`, watch it, say how it ended."""
        try:
            self._pid = start(command)
        except OSError as exc:
            self._tell(f'{{"error": {exc.errno}, "text": "{exc.strerror}"}}')
            return
        ended = self._watch()
        end_descendants(give_up_after=GIVE_UP_SECONDS)
        if not ended:
            self._remove_folder()
            self._tell('{"stopped": true}')
            return
        assert self._status is not None
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        self._peak = max(self._peak, usage.ru_maxrss * 1024)
        self._tell(
            f'{{"exit": {shell_code(self._status)}, "wall": {time.monotonic() - self._started:.3f}, '
            f'"cpu": {usage.ru_utime + usage.ru_stime:.3f}, "peak": {self._peak}}}'
        )

    def _remove_folder(self) -> None:
        import shutil

        shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(self) -> bool:
        """True when the compiler ended, False when the lifeline did."""
        poll = select.poll()
        poll.register(self._lifeline, select.POLLIN)
        fd = _pidfd(self._pid)
        if fd is not None:
            poll.register(fd, select.POLLIN)
        while True:
            if self._reap():
                return True
            self._sample()
            early = time.monotonic() - self._started < _FIRST
            pause = FIRST_SAMPLES_SECONDS if early else LATER_SAMPLES_SECONDS
            events = poll.poll((pause if fd is not None else 0.05) * 1000)
            if any(ready == self._lifeline for ready, _ in events):
                return False

    def _reap(self) -> bool:
        """Take every ended child, orphans included. True when the compiler itself was among them."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid == self._pid:
                self._status = status
        return self._status is not None

    def _sample(self) -> None:
        now = resident_bytes(list(descendants(os.getpid())))
        self._peak = max(self._peak, now)
        self._tell(f'{{"pid": {self._pid}, "rss": {now}}}')

    def _tell(self, line: str) -> None:
        try:
            os.write(self._result, line.encode() + b"\n")
        except OSError:
            return  # the launcher is gone; the lifeline tells so too


def start(command: list[str]) -> int:
    """Start the compiler as a caller's execvp would. Raises OSError."""
    options = {"setsigdef": [signal.SIGPIPE, signal.SIGXFSZ]}
    try:
        return os.posix_spawn(command[0], command, os.environ, **options)  # type: ignore[arg-type]
    except OSError as exc:
        if exc.errno != errno.ENOEXEC:
            raise
    return os.posix_spawn("/bin/sh", ["/bin/sh", *command], os.environ, **options)  # type: ignore[arg-type]


def shell_code(status: int) -> int:
    """Exit code as a shell gives it: 128+N for signal N."""
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def main(arguments: list[str]) -> None:
    """The program."""
    lifeline, result = int(arguments[0]), int(arguments[1])
    for fd in (lifeline, result):
        os.set_inheritable(fd, False)
    become_subreaper()
    Supervisor(lifeline, result, arguments[2]).run(arguments[4:])


if __name__ == "__main__":
    main(sys.argv[1:])
