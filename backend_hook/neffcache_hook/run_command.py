"""`neffcache run -- CMD`: run a program with the launcher in front of the compiler."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from neffcache_client.errors import SettingsError
from neffcache_client.settings import flag

if TYPE_CHECKING:
    from neffcache_hook.launcher.activate import Activation

CANNOT_EXECUTE = 126
NOT_FOUND = 127


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `run` to the command line."""
    parser = subparsers.add_parser(
        "run",
        help="run a program with the compile cache in front of neuronx-cc",
        description="Runs CMD with PATH and TORCH_NEURONX_NEFF_CACHE_DIR pointed at neffcache. "
        "NEFFCACHE_URL names the server; without it CMD runs as it is.",
        usage="neffcache run [--] CMD [ARG ...]",
    )
    parser.add_argument("command", metavar="CMD", nargs=argparse.REMAINDER, help="the program and its arguments")


def run(args: argparse.Namespace) -> int:
    """Become the program. Returns only when it could not be started, or when NEFFCACHE_STRICT forbids it."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        _say("nothing to run; usage: neffcache run -- CMD [ARG ...]")
        return 2
    environ = dict(os.environ)
    problem = _problem(environ)
    if problem:
        if flag(environ, "NEFFCACHE_STRICT"):
            _say(f"{problem} (NEFFCACHE_STRICT=1, so nothing was run)")
            return 1
        _say(f"{problem}; running without the cache")
    sys.stdout.flush()
    try:
        os.execvpe(command[0], command, environ)
    except ValueError as exc:
        _say(f"{command[0]!r} is no program: {exc}")
        return NOT_FOUND
    except OSError as exc:
        _say(f"{command[0]}: {exc.strerror}")
        return NOT_FOUND if isinstance(exc, FileNotFoundError) else CANNOT_EXECUTE


def _problem(environ: dict[str, str]) -> str | None:
    """Why the cache will not be used, None when it will or the user switched it off."""
    from neffcache_hook.launcher.activate import activate

    before = dict(environ)
    try:
        done: Activation = activate(environ)
    except (SettingsError, OSError) as exc:
        environ.clear()
        environ.update(before)
        return str(exc)
    return None if done.active else done.problem or done.note


def _say(message: str) -> None:
    print(f"neffcache: {message}", file=sys.stderr)  # noqa: T201  the command line's own voice
