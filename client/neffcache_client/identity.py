"""Who this process is: host, boot, pid and start time, enough to tell whether a process named in a file still lives.

A pid alone is not an identity: pids are reused within hours on a busy host, and a file may outlive the boot it was
written in. Light imports: on the path of a local hit.
"""

from __future__ import annotations

import os

_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def host_name() -> str:
    """NEFFCACHE_HOST, or the name that the kernel says; at most 200 characters, fit to be part of a file's name."""
    return (os.environ.get("NEFFCACHE_HOST") or os.uname().nodename).replace("/", "_")[:200] or "unknown"


def boot_id() -> str:
    """Changes with every boot of this host; empty where the kernel does not tell."""
    try:
        with open(_BOOT_ID, encoding="ascii") as f:
            return f.read().strip()
    except OSError:
        return ""


def process_state(pid: int) -> tuple[str, int] | None:
    """(state letter, start time in clock ticks since boot) of a process, None when there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            # The command's name is in brackets and may hold blanks and brackets itself.
            rest = f.read().rpartition(b")")[2].split()
        return rest[0].decode(), int(rest[19])
    except (OSError, IndexError, ValueError):
        return None


def start_time(pid: int | None = None) -> int:
    """Start of a process (default: this one) in clock ticks since boot, 0 when unknown."""
    state = process_state(os.getpid() if pid is None else pid)
    return state[1] if state else 0


def is_gone(pid: int, started: int) -> bool:
    """True when the process with this pid and start time has ended (a zombie has)."""
    state = process_state(pid)
    return state is None or state[0] in "ZX" or state[1] != started


def is_running(pid: int, started: int) -> bool:
    """True when that process exists and is not stopped. A stopped process may never go on."""
    state = process_state(pid)
    return state is not None and state[1] == started and state[0] not in "ZXTt"
