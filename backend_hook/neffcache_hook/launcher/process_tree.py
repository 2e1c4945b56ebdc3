"""A process's descendants: finding, measuring and ending them.

Used by the supervisor, which is started without the package on its path, so it knows only the standard library
and no module of this project.
"""

from __future__ import annotations

import os
import signal
import time

_PR_SET_CHILD_SUBREAPER = 36
_PAGE = os.sysconf("SC_PAGE_SIZE")


def become_subreaper() -> bool:
    """Make orphans among this process's descendants its children. False where the system cannot."""
    try:
        import ctypes

        return bool(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
    except (ImportError, OSError, AttributeError):
        return False


def descendants(root: int) -> dict[int, int]:
    """{pid: parent} of every process below `root`, parents before children, zombies included."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            parent = parent_of(int(name))
            if parent:
                children.setdefault(parent, []).append(int(name))
    found: dict[int, int] = {}
    queue = [root]
    while queue:
        parent = queue.pop()
        for pid in children.get(parent, ()):
            if pid not in found:
                found[pid] = parent
                queue.append(pid)
    return found


def parent_of(pid: int) -> int | None:
    """The parent of `pid`, None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            # The command's name is in brackets and may itself hold brackets and blanks.
            return int(f.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None


def resident_bytes(pids: list[int]) -> int:
    """Memory of a tree: private pages of each process, and the largest of what they share, once.

    PSS would be exact, but reading it holds the address-space lock of a compiler of 100 GB for long.
    """
    private = shared = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/statm", "rb") as f:
                fields = f.read().split()
        except OSError:
            continue
        private += int(fields[1]) - int(fields[2])
        shared = max(shared, int(fields[2]))
    return (private + shared) * _PAGE


def end_descendants(*, spare: frozenset[int] = frozenset(), give_up_after: float | None = None) -> bool:
    """Kill everything below this process, except `spare` and what is below them, until nothing is left.

    New processes may be born while others are killed, so it looks again until there are none. The caller must be
    a subreaper, or a grandchild whose parent died escapes. Reaps what it ends. False when `give_up_after` seconds
    were not enough.
    """
    me = os.getpid()
    deadline = None if give_up_after is None else time.monotonic() + give_up_after
    pause = 0.001
    while True:
        tree = descendants(me)
        for pid in [p for p in tree if p in spare]:
            for below in [pid, *descendants(pid)]:
                tree.pop(below, None)
        if not tree:
            return True
        for pid, parent in tree.items():
            _kill(pid, parent)
        _reap(list(tree))
        if deadline is not None and time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 2, 0.05)


def _kill(pid: int, parent: int) -> None:
    """SIGKILL to `pid` if it is still the child that was seen, never to a stranger that got its number."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except OSError:
        _kill_by_number(pid)  # a kernel before 5.3, or no descriptor left
        return
    try:
        if parent_of(pid) in (parent, os.getpid()):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
    except OSError:
        return
    finally:
        os.close(fd)


def _kill_by_number(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return


def _reap(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            continue
