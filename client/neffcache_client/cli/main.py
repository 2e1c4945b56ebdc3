"""`neffcache`: one command for people, with sub-commands that are imported when they are called.

Exit codes: 0 done, 1 it could not be done, 2 the question or the set-up is wrong, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from dataclasses import dataclass
from typing import Any

from neffcache_client.errors import NeffcacheError, RequestRefused, SettingsError
from neffcache_client.local_tier import describe


@dataclass(slots=True, frozen=True)
class Command:
    """Where a sub-command lives. `extra` names what has to be installed for it."""

    module: str
    help: str
    register: str = "register"
    run: str = "run"
    extra: str | None = None


COMMANDS: dict[str, Command] = {
    "run": Command("neffcache_hook.run_command", "run a program with the compile cache in front of neuronx-cc"),
    "stats": Command("neffcache_client.cli.stats", "hits, waits, compiles and time saved"),
    "top": Command("neffcache_client.cli.top", "who compiles and who waits, now"),
    "jobs": Command("neffcache_client.cli.jobs", "what the cache did for each job"),
    "entries": Command("neffcache_client.cli.entries", "list, show or remove what the server has"),
    "failures": Command("neffcache_client.cli.failures", "list or clear stored compile failures"),
    "explain": Command("neffcache_client.cli.explain", "why a graph was not in the cache"),
    "doctor": Command("neffcache_client.cli.doctor", "find out whether a rank started here would use the cache"),
    "token": Command("neffcache_client.cli.token", "make, list and revoke tokens"),
    "push": Command("neffcache_client.cli.push", "upload what was compiled while the server was away"),
    "serve": Command(
        "neffcache_server.cli", "run the cache server", register="register_serve", run="run_serve", extra="server"
    ),
    "db": Command(
        "neffcache_server.cli",
        "look after the server's database",
        register="register_db",
        run="run_db",
        extra="server",
    ),
    "gc": Command(
        "neffcache_server.gc.command", "remove old entries and bytes that nothing refers to", extra="server"
    ),
    "demo": Command(
        "neffcache_hook.demo.command", "simulated ranks on this machine, with and without the cache", extra="demo"
    ),
}


def main(argv: list[str] | None = None) -> int:
    """The `neffcache` command. Returns its exit code; errors are one sentence on stderr."""
    argv = sys.argv[1:] if argv is None else argv
    name = next((a for a in argv if not a.startswith("-")), None)
    try:
        return _dispatch(name, argv)
    except SettingsError as exc:
        return _complain(str(exc), 2)
    except RequestRefused as exc:
        return _complain(f"the cache server refused: {exc}", 1)
    except NeffcacheError as exc:
        return _complain(str(exc), 1)
    except KeyboardInterrupt:
        return _complain("stopped", 130)
    except BrokenPipeError:
        # The reader (`head`) has seen enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as exc:
        return _complain(describe(exc), 1)


def _dispatch(name: str | None, argv: list[str]) -> int:
    parser = _parser()
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command_name")
    module: Any = None
    for command_name, command in COMMANDS.items():
        if command_name != name:
            subparsers.add_parser(command_name, help=command.help, add_help=False)
            continue
        try:
            module = importlib.import_module(command.module)
        except ModuleNotFoundError as exc:
            return _not_installed(command_name, command, exc)
        getattr(module, command.register)(subparsers)
    args = parser.parse_args(argv)
    if name is None or module is None:
        parser.print_help()
        return 2
    return int(getattr(module, COMMANDS[name].run)(args))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="neffcache",
        description="Distributed NEFF compilation cache for AWS Trainium. NEFFCACHE_URL names the server.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        from importlib.metadata import version

        print(f"neffcache {version('neffcache')}")
        parser.exit()


def _not_installed(name: str, command: Command, exc: ModuleNotFoundError) -> int:
    if command.extra is None:
        raise exc
    return _complain(
        f"`neffcache {name}` needs {exc.name}; install it with: pip install 'neffcache[{command.extra}]'", 2
    )


def _complain(message: str, code: int) -> int:
    print(f"neffcache: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
