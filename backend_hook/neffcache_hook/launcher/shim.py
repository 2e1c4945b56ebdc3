"""The program that ranks find as `neuronx-cc`: a few lines of Python in a folder of its own.

The folder belongs to this user alone. A folder that another user made or may write to would let that user run
programs as us, so every candidate is checked before it goes on PATH, and what lies in it is compared byte for byte.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys

from neffcache_hook.launcher.find import MARKER, NAME

MAX_SHEBANG = 127
"""Bytes of a `#!` line that every kernel reads."""

_BODY = """# {marker}: made by neffcache, safe to delete; `neffcache run` and `import torch` make it again.
import sys
sys.path += {paths!r}
try:
    from neffcache_hook.launcher.main import main
except BaseException as fault:
    # neffcache was removed or broken after this was made: the compiler must still be found.
    import os
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        program = os.path.join(folder or os.curdir, "{name}")
        if os.path.isfile(program) and os.access(program, os.X_OK):
            with open(program, "rb") as f:
                launcher = b"{marker}" in f.read(1024)
            if not launcher:
                os.execv(program, [program, *sys.argv[1:]])
    os.write(2, b"neffcache: the launcher is broken (%s) and there is no {name} behind it\\n" % repr(fault).encode())
    os._exit(127)
main(sys.argv[1:], sys.path[-{count}:])
"""


class ShimUnusable(Exception):
    """No launcher can be made that this user may execute; says why for each place that was tried."""


def make_shim(environ: object = None) -> str:
    """The folder that holds the launcher, made if need be. Raises ShimUnusable.

    The same interpreter and install give the same folder, so 64 ranks share one.
    """
    env = os.environ if environ is None else environ
    program = shim_text(sys.executable, package_dirs()).encode()
    name = hashlib.sha256(program).hexdigest()[:16]
    problems = []
    for base in _bases(env):  # type: ignore[arg-type]
        try:
            return _install(base, name, program)
        except OSError as exc:
            problems.append(f"{base}: {exc.strerror or exc}")
    raise ShimUnusable("the launcher cannot be put anywhere: " + "; ".join(problems))


def shim_text(python: str, paths: list[str]) -> str:
    """The launcher's source.

    `-I` keeps PYTHON* variables and the current folder out, `-S` saves the time of `site` until a miss.
    """
    body = _BODY.format(marker=MARKER.decode(), name=NAME, paths=paths, count=len(paths))
    line = f"#!{python} -IS"
    if len(line) <= MAX_SHEBANG and not any(c.isspace() for c in python):
        return f"{line}\n{body}"
    # The kernel cuts a long `#!` line and splits it at blanks. To a shell the second line is a command, to Python
    # a string: '''exec' 'python' … '''
    quoted = python.replace("'", "'\"'\"'")
    return f"#!/bin/sh\n'''exec' '{quoted}' -IS \"$0\" \"$@\"\n' '''\n{body}"


def package_dirs() -> list[str]:
    """Folders the launcher imports from: those of our own packages first, then this interpreter's site-packages."""
    import neffcache_client

    import neffcache_hook

    own = [os.path.dirname(next(iter(p.__path__))) for p in (neffcache_client, neffcache_hook)]
    sites = [p for p in sys.path if os.path.basename(p) in ("site-packages", "dist-packages") and os.path.isabs(p)]
    return list(dict.fromkeys([*own, *sites]))


def _bases(env: dict[str, str]) -> list[str]:
    uid = os.geteuid()
    temporary = env.get("TMPDIR") or "/tmp"
    places = [os.path.join(temporary, f"neffcache-launcher-{uid}")]
    if env.get("XDG_RUNTIME_DIR"):
        places.append(os.path.join(env["XDG_RUNTIME_DIR"], "neffcache-launcher"))
    places += [f"/var/tmp/neffcache-launcher-{uid}", f"/dev/shm/neffcache-launcher-{uid}"]
    if env.get("HOME"):
        places.append(os.path.join(env["HOME"], ".cache", "neffcache-launcher"))
    return list(dict.fromkeys(places))


def _install(base: str, name: str, program: bytes) -> str:
    """Make or find the launcher under `base`. Raises OSError when it cannot be there, or not be trusted there."""
    _own_folder(base)
    folder = os.path.join(base, name)
    _own_folder(folder)
    path = os.path.join(folder, NAME)
    if _content(path) != program:
        _write(path, program)
    # access(2) knows of noexec mounts.
    if not os.access(path, os.X_OK):
        raise OSError(13, "programs cannot be executed there (mounted noexec?)")
    return folder


def _own_folder(path: str) -> None:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    seen = os.lstat(path)
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.geteuid():
        raise OSError(1, "belongs to somebody else, so it cannot be trusted")
    if seen.st_mode & 0o022:
        raise OSError(1, "others may write to it, so it cannot be trusted")


def _content(path: str) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as f:
        seen = os.fstat(fd)
        trusted = seen.st_uid == os.geteuid() and not seen.st_mode & 0o022 and seen.st_mode & 0o100
        return f.read() if trusted else None


def _write(path: str, program: bytes) -> None:
    """By rename: a rank that starts at this moment must not execute half a program."""
    temporary = f"{path}.{os.getpid()}.{os.urandom(4).hex()}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o700)
    try:
        os.write(fd, program)
        os.fchmod(fd, 0o755)
    finally:
        os.close(fd)
    os.replace(temporary, path)
