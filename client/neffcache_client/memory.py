"""How much memory this process may still take: the smaller of the host's and its control groups' headroom."""

from __future__ import annotations

import os


def free_bytes(proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> int | None:
    """Bytes that can be had without swapping or being killed; None when nothing tells."""
    known = [n for n in (_available(proc), _headroom_v2(proc, cgroups), _headroom_v1(proc, cgroups)) if n is not None]
    return min(known) if known else None


def _available(proc: str) -> int | None:
    for line in _text(os.path.join(proc, "meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _headroom_v2(proc: str, cgroups: str) -> int | None:
    path = _group(proc, "")
    return None if path is None else _tightest(cgroups, path, "memory.max", "memory.current", "inactive_file")


def _headroom_v1(proc: str, cgroups: str) -> int | None:
    path = _group(proc, "memory")
    if path is None:
        return None
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return _tightest(os.path.join(cgroups, "memory"), path, *names)


def _group(proc: str, controller: str) -> str | None:
    """This process's group of that controller; the unified hierarchy has none."""
    for line in _text(os.path.join(proc, "self", "cgroup")).splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3 and controller in fields[1].split(","):
            return fields[2].strip("/")
    return None


def _tightest(root: str, path: str, limit: str, usage: str, cache: str) -> int | None:
    """The least headroom on the way up: a limit of any group above kills as well.

    In a container the path may be the host's and not exist here; then the root is the container's own group.
    """
    least: int | None = None
    while True:
        left = _headroom(os.path.join(root, path), limit, usage, cache)
        if left is not None:
            least = left if least is None else min(least, left)
        if not path:
            return least
        path = os.path.dirname(path)


def _headroom(folder: str, limit: str, usage: str, cache: str) -> int | None:
    try:
        most = int(_text(os.path.join(folder, limit)))
        used = int(_text(os.path.join(folder, usage)))
    except ValueError:
        return None  # absent, or "max"
    # Files that were read once count as used, and go as soon as somebody needs the room.
    for line in _text(os.path.join(folder, "memory.stat")).splitlines():
        name, _, value = line.partition(" ")
        if name == cache:
            used -= int(value)
    return max(0, most - used)


def _text(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as f:
            return f.read()
    except OSError:
        return ""
