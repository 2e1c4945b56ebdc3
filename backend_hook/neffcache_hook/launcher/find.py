"""Finding the real compiler behind the launcher, and becoming it.

On the path of a local hit: imports nothing but `os`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

NAME = "neuronx-cc"
MARKER = b"neffcache-launcher-marker"
"""In the first kilobyte of every launcher of every release; must never change.

Launchers are told from compilers by this and not by their path: two installs, or a shim that was copied into an
image, would otherwise take each other for the compiler and call one another for ever.
"""

INNER = "NEFFCACHE_INNER"
_MARKER_WITHIN = 1024
_SIGPIPE, _SIGXFSZ, _SIG_DFL = 13, 25, 0


def is_launcher(path: str) -> bool:
    """True when the file carries the launcher's marker. Raises OSError when it cannot be read."""
    with open(path, "rb") as f:
        return MARKER in f.read(_MARKER_WITHIN)


def real_compiler(path_variable: str, own: str | None = None) -> str | None:
    """Absolute path of the first `neuronx-cc` on PATH that is no launcher; None when there is none.

    `own` is the program that asks: were its marker lost (a copy that was stripped of comments), it would otherwise
    find itself and become itself for ever.
    """
    for folder in path_variable.split(os.pathsep):
        candidate = os.path.join(folder or os.curdir, NAME)
        if not (os.path.isfile(candidate) and os.access(candidate, os.X_OK)):
            continue
        try:
            if is_launcher(candidate) or (own is not None and os.path.samefile(candidate, own)):
                continue
        except OSError:
            # Executable but not readable: no shim of ours, those are made readable.
            pass
        return os.path.abspath(candidate)
    return None


def inner_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the real compiler: the caller's, and the word that launchers inside pass through."""
    return {**environ, INNER: "1"}


def become(compiler: str, arguments: list[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by the real compiler. Exits 126 or 127 with one line, as a shell does, if that fails."""
    import _signal  # type: ignore[import-not-found]  # built in, unknown to typeshed

    # Python starts with SIGPIPE and SIGXFSZ ignored, and exec keeps that: the compiler would see EPIPE where it
    # used to be ended. The `signal` module would cost 3 ms of imports for the same call.
    _signal.signal(_SIGPIPE, _SIG_DFL)
    _signal.signal(_SIGXFSZ, _SIG_DFL)
    env = inner_environment(environ)
    try:
        try:
            os.execve(compiler, [compiler, *arguments], env)
        except OSError as exc:
            if exc.errno != 8:  # ENOEXEC: a script without `#!`, which execvp gives to the shell
                raise
            os.execve("/bin/sh", ["/bin/sh", compiler, *arguments], env)
    except OSError as exc:
        os.write(2, f"{NAME}: {compiler}: {exc.strerror}\n".encode())
        os._exit(127 if exc.errno == 2 else 126)
