"""The real server with something that breaks inside: `python faulty_server.py SPEC serve …`.

SPEC is `module:Class.method:when:what:count`: before or after the `count`th call, `kill` the process or raise
an `error` of the store. `count` of 0 is every call.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from functools import wraps
from typing import Any


def break_at(spec: str) -> None:
    """Wrap the method that SPEC names."""
    module, path, when, what, count = spec.split(":")
    owner, name = path.split(".")
    kind = getattr(importlib.import_module(module), owner)
    method = getattr(kind, name)
    calls = 0

    def strike() -> None:
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        from neffcache_server.problems import StorageUnavailable

        raise StorageUnavailable("the store failed, said the test")

    @wraps(method)
    async def broken(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        now = count in ("0", str(calls))
        if now and when == "before":
            strike()
        result = await method(*args, **kwargs)
        if now and when == "after":
            strike()
        return result

    setattr(kind, name, broken)


if __name__ == "__main__":
    from neffcache_server.__main__ import main

    break_at(sys.argv.pop(1))
    sys.exit(main())
