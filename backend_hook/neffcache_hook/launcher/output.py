"""The compiler's stdout and stderr on their way to the caller.

The C++ caller reads stdout to its end before it looks at stderr, so a compiler that writes more than a pipe holds
to stderr would hang with it. What goes to a pipe or a file is therefore kept in temporary files until the compiler
has ended, then written in the order the caller reads: all of stdout, the end of stdout, all of stderr. What goes to
a terminal is passed on as it comes.
"""

from __future__ import annotations

import errno
import os
import select
import tempfile
import threading
from typing import Protocol

TAIL_BYTES = 64 * 1024
_CHUNK = 256 * 1024


class Sink(Protocol):
    """Takes one stream of the compiler."""

    def fileno(self) -> int:
        """The descriptor that the compiler writes to."""

    def finish(self) -> None:
        """The compiler has ended."""

    def tail(self) -> bytes:
        """The last 64 KiB that were written."""

    def deliver(self, fd: int) -> None:
        """Write everything that has not been written yet to `fd`."""


class Output:
    """Both streams of one compiler run."""

    def __init__(self, stdout: int = 1, stderr: int = 2) -> None:
        self._stdout_fd, self._stderr_fd = stdout, stderr
        self._together = _same_file(stdout, stderr)
        self._out = _sink(stdout)
        # `2>&1`: one file for both keeps the order in which the compiler wrote.
        self._err = self._out if self._together else _sink(stderr)
        self._notes: list[str] = []

    @property
    def stdout(self) -> int:
        """What the compiler gets as stdout."""
        return self._out.fileno()

    @property
    def stderr(self) -> int:
        """What the compiler gets as stderr."""
        return self._err.fileno()

    def finish(self) -> None:
        """The compiler and all its descendants have ended."""
        for sink in self._sinks():
            sink.finish()

    def tails(self) -> list[bytes]:
        """The last 64 KiB of each stream."""
        return [sink.tail() for sink in self._sinks()]

    def log_tail(self) -> str:
        """The end of what was printed, at most 64 KiB of UTF-8, stderr last; for people and for other hosts."""
        tails = self.tails()
        share = TAIL_BYTES // len(tails)
        spare = sum(max(0, share - len(t)) for t in tails)
        text = "\n".join(t[-(share + spare) :].decode("utf-8", "replace") for t in tails if t.strip())
        # Bytes that are no UTF-8 grow when replaced.
        return text.encode()[-TAIL_BYTES:].decode("utf-8", "ignore")

    def note(self, message: str) -> None:
        """Add a line of our own behind the compiler's stderr, for an end that the compiler says nothing about."""
        self._notes.append(message)

    def deliver(self) -> None:
        """Hand everything to the caller and close stdout. A caller that went away is no error."""
        self._out.deliver(self._stdout_fd)
        _close(self._stdout_fd)
        if not self._together:
            self._err.deliver(self._stderr_fd)
        for note in self._notes:
            write_all(self._stderr_fd, f"neffcache: {note}\n".encode())

    def _sinks(self) -> list[Sink]:
        return [self._out] if self._together else [self._out, self._err]


class _Spool:
    """Keeps a stream in a file without a name."""

    def __init__(self) -> None:
        self._fd = _nameless_file()

    def fileno(self) -> int:
        return self._fd

    def finish(self) -> None:
        return

    def tail(self) -> bytes:
        size = os.fstat(self._fd).st_size
        return os.pread(self._fd, TAIL_BYTES, max(0, size - TAIL_BYTES))

    def deliver(self, fd: int) -> None:
        offset = 0
        while chunk := os.pread(self._fd, _CHUNK, offset):
            if not write_all(fd, chunk):
                return
            offset += len(chunk)


class _Live:
    """Passes a stream on to a terminal as it comes, and remembers its end."""

    def __init__(self, terminal: int) -> None:
        self._read, self._write = os.pipe()
        self._terminal = os.dup(terminal)
        self._tail = bytearray()
        self._thread = threading.Thread(target=self._copy, name="neffcache-output", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._write

    def finish(self) -> None:
        _close(self._write)
        self._thread.join()

    def tail(self) -> bytes:
        return bytes(self._tail)

    def deliver(self, fd: int) -> None:
        return

    def _copy(self) -> None:
        while chunk := os.read(self._read, _CHUNK):
            write_all(self._terminal, chunk)
            self._tail += chunk
            del self._tail[:-TAIL_BYTES]


def write_all(fd: int, data: bytes) -> bool:
    """Write `data` whole, also to a descriptor that does not block. False when nobody reads any more."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            select.select([], [fd], [])
        except OSError as exc:
            if exc.errno == errno.EINTR:
                continue
            return False
    return True


def _sink(fd: int) -> Sink:
    return _Live(fd) if os.isatty(fd) else _Spool()


def _same_file(a: int, b: int) -> bool:
    try:
        return os.path.samestat(os.fstat(a), os.fstat(b))
    except OSError:
        return False


def _nameless_file() -> int:
    try:
        with tempfile.TemporaryFile(prefix="neffcache-") as f:
            return os.dup(f.fileno())
    except OSError:
        # No temporary folder can be written: memory is left, and a compiler's log is small against the compiler.
        return os.memfd_create("neffcache-output")


def _close(fd: int) -> None:
    try:
        os.close(fd)
    except OSError:
        return
