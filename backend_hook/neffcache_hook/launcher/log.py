"""The launcher's own log: what it has to say never mixes with the compiler's output.

On the path of a local hit: nothing is opened before the first line is written.
"""

from __future__ import annotations

import os
import sys
import time

MAX_BYTES = 8 << 20
"""A log larger than this is moved to `<name>.1` (replacing it) before the next line."""


class Log:
    """Appends lines to a file, or to stderr when the user asked for that. Never raises."""

    def __init__(self, tier_dir: str, target: str | None) -> None:
        self._target = target
        self._tier_dir = tier_dir
        self._warned: set[str] = set()

    @property
    def to_stderr(self) -> bool:
        """True when the user wants the messages on the terminal."""
        return self._target == "stderr"

    @property
    def path(self) -> str:
        """Where the lines go."""
        return self._target or os.path.join(self._tier_dir, "log", f"{os.uname().nodename}.log")

    def __call__(self, message: str) -> None:
        """Write one line (inner line ends stay, indented)."""
        body = message.rstrip().replace("\n", "\n    ")
        if self.to_stderr:
            _write(2, f"neffcache: {body}\n")
            return
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        rank = next((f" rank {os.environ[n]}" for n in ("RANK", "SLURM_PROCID") if os.environ.get(n)), "")
        try:
            fd = self._open()
        except OSError:
            return
        _write(fd, f"{stamp} [{os.getpid()}{rank}] {body}\n")
        os.close(fd)

    def once(self, message: str) -> None:
        """Write a line unless this process has written the same one."""
        if message not in self._warned:
            self._warned.add(message)
            self(message)

    def exception(self, what: str) -> None:
        """Write `what` and the traceback of the exception being handled."""
        import traceback

        self(f"{what}\n{traceback.format_exc()}")

    def _open(self) -> int:
        path = self.path
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        try:
            fd = os.open(path, flags, 0o644)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            fd = os.open(path, flags, 0o644)
        if os.fstat(fd).st_size > MAX_BYTES:
            # Two processes may both rename; the second then moves a nearly empty file. Losing old lines is the
            # price of not having a lock on the way to a compile.
            os.close(fd)
            os.replace(path, path + ".1")
            fd = os.open(path, flags, 0o644)
        return fd


def complain(message: str) -> None:
    """One line on stderr, for what a user has to know and no log can be relied on to tell."""
    _write(2, f"neffcache: {message}\n")


def _write(fd: int, text: str) -> None:
    try:
        os.write(fd, text.encode(sys.getfilesystemencoding(), "replace"))
    except OSError:
        return
