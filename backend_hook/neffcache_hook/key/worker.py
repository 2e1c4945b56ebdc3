"""The process that reads a graph from stdin and writes one JSON value to stdout: what its canonical form is, or,
asked to `summarise`, what it consists of.

A process of its own because MLIR's bindings take time and memory that a launcher on its way to a hit must not
spend, print notices of their own when they end, and may abort on a damaged file. Whatever happens here, the
launcher goes on with the raw digest.
"""

from __future__ import annotations

import os
import sys

SUMMARISE = "summarise"


def main(argv: list[str]) -> None:
    """`argv` holds the task and the launcher's import path. Leaves without running anybody's exit handlers."""
    sys.path[:] = argv[1:]
    import json
    import resource

    from neffcache_hook.key import ir

    # MLIR aborts on some damaged bytecode; that is expected here and must leave no core file in the user's folder.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Bindings write to fd 1 and 2 when they please; the answer goes where nobody else can write.
    answer_fd = os.dup(1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    with open(0, "rb", closefd=False) as file:
        data = file.read()
    encoded = json.dumps(_summary(data) if argv[0] == SUMMARISE else ir.canonicalise(data)).encode()
    while encoded:
        encoded = encoded[os.write(answer_fd, encoded) :]
    os._exit(0)


def _summary(data: bytes) -> str | None:
    from neffcache_hook.key import summary

    try:
        return summary.summarise(data)
    except Exception:
        # Each parser has its own errors, and a miss can do without.
        return None


if __name__ == "__main__":
    main(sys.argv[1:])
