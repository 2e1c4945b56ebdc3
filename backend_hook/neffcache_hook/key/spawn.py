"""Runs the worker and gives up on it when it misbehaves: then the graph is hashed raw."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time

from neffcache_hook.key.index import is_description

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SECONDS = 120.0
"""A graph that takes longer to read is hashed raw: slower hosts then miss, which is safe."""


def canonicalise(fd: int, raw_digest: str) -> dict[str, Any]:
    """What `ir.canonicalise` says of the open file `fd`, found out in a process of its own.

    Raises OSError when the file no longer holds what `raw_digest` says.
    """
    why = "the worker ended without an answer"
    found: Any = None
    try:
        found = json.loads(_ask(fd, "canonicalise"))
    except OSError as exc:
        why = f"the worker could not be started: {exc}"
    except ValueError:
        pass
    if not is_description(found):
        found = _raw(fd, why)
    if found.pop("raw", None) != raw_digest:
        raise OSError("the file changed while it was read")
    return dict(found)


def summarise(fd: int) -> str | None:
    """The summary of the graph in the open file `fd` (see `summary`), or None. Never raises."""
    try:
        os.lseek(fd, 0, os.SEEK_SET)
        found = json.loads(_ask(fd, "summarise"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, str) else None


def _raw(fd: int, why: str) -> dict[str, Any]:
    from neffcache_hook.key import ir

    os.lseek(fd, 0, os.SEEK_SET)
    with open(fd, "rb", closefd=False) as file:
        return ir.raw(file.read(), why, keep=False)


def _ask(fd: int, task: str) -> bytes:
    if not sys.executable:
        raise OSError("no interpreter")
    worker = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker.py")
    argv = [sys.executable, "-I", "-S", "-B", worker, task, *(os.path.abspath(entry) for entry in sys.path)]
    reading, writing = os.pipe()
    pid = 0
    try:
        actions = [
            (os.POSIX_SPAWN_DUP2, fd, 0),
            (os.POSIX_SPAWN_DUP2, writing, 1),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        ]
        pid = os.posix_spawn(sys.executable, argv, os.environ, file_actions=actions)
        os.close(writing)
        writing = -1
        return _read(reading)
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)
        if pid:
            _reap(pid)


def _read(fd: int) -> bytes:
    deadline = time.monotonic() + SECONDS
    chunks: list[bytes] = []
    poll = select.poll()
    poll.register(fd, select.POLLIN | select.POLLHUP)
    while (left := deadline - time.monotonic()) > 0:
        if not poll.poll(left * 1000):
            break
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            return b"".join(chunks)
        chunks.append(chunk)
    return b""


def _reap(pid: int) -> None:
    """The answer is in or given up: nothing that the worker still does is of use."""
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except OSError:
        pass
