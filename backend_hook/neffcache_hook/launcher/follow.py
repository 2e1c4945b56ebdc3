"""Waiting for this host's leader without loading what talks to the server.

Of 64 ranks that ask for one graph at once, one per host goes on to the server. Would the others load the HTTP client
only to wait, they would take the processors from the leaders, the server and the compiler for seconds. Light
imports: on the path of a local hit.
"""

from __future__ import annotations

import fcntl
import os
import select
import time

from neffcache_client.host_lock import HostLock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from neffcache_hook.launcher.main import Caller

SECONDS = 10.0
"""At least this long; then the node cache goes on waiting, and asks the server past a leader that is stuck."""
_SPREAD_SECONDS = 10
_FIRST_LOOK, _LAST_LOOK = 0.01, 0.1


class CallerGone(Exception):
    """Nobody wants the result any more."""


def follow(lock: HostLock, caller: Caller, arrived: Callable[[], bool]) -> bool:
    """True as soon as `arrived()` is; False when nobody leads (any more) or the time is up.

    Takes the lock for no longer than it takes to see that it is free, and never writes its record: a leader that
    died has its lease in it. Raises CallerGone.
    """
    # The processes of a rank group would otherwise all lose their patience at once.
    deadline = time.monotonic() + SECONDS + os.getpid() % _SPREAD_SECONDS
    poll = select.poll()
    if caller.fd >= 0:
        poll.register(caller.fd, select.POLLIN)
    pause = _FIRST_LOOK
    while _is_held(lock.path):
        if arrived():
            return True
        if poll.poll(pause * 1000) or caller.gone():
            raise CallerGone
        if time.monotonic() > deadline:
            return False
        pause = min(pause * 1.5, _LAST_LOOK)
    return arrived()


def _is_held(path: str) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        # Shared, so that many may look at once.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False
