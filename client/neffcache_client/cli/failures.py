"""`neffcache failures ls|clear`: compile failures that the server answers with at present."""

from __future__ import annotations

import argparse
import time
from typing import Any

from neffcache_client.api import CacheClient
from neffcache_client.cli.output import instant, say, say_json, seconds, table
from neffcache_client.cli.session import check_key, server, the_one
from neffcache_client.errors import SettingsError

_HEAD = ("KEY", "KIND", "CODE", "EXIT", "HOST", "FIRST SEEN", "FOR ANOTHER")


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `failures` to the command line."""
    parser = subparsers.add_parser(
        "failures",
        help="list or clear stored compile failures",
        description="A deterministic failure is answered to every rank for ten minutes, an exhausted one for one.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ls|clear")
    ls = actions.add_parser("ls", help="failures in force")
    ls.add_argument("--log", action="store_true", help="with the end of each compiler's output")
    clear = actions.add_parser("clear", help="forget a failure; the next rank compiles")
    clear.add_argument("key", nargs="?", help="the key, or enough of its first digits")
    clear.add_argument("--all", action="store_true", help="every failure of the namespace")
    for sub in (ls, clear):
        sub.add_argument("--json", action="store_true", help="for machines")


def run(args: argparse.Namespace) -> int:
    """Do the action."""
    if args.action == "clear" and bool(args.key) == args.all:
        raise SettingsError("name one key, or --all")
    with server() as client:
        return {"ls": _ls, "clear": _clear}[args.action](client, args)


def _ls(client: CacheClient, args: argparse.Namespace) -> int:
    failures = client.failures()
    if args.json:
        say_json({"failures": failures})
        return 0
    if not failures:
        say(f"no failures in namespace {client.namespace}")
        return 0
    say(table(_HEAD, [_row(f) for f in failures], right=("EXIT", "FOR ANOTHER")))
    if args.log:
        for failure in failures:
            say(f"\n{failure.get('key')}\n{str(failure.get('log_tail', '')).rstrip()}")
    return 0


def _clear(client: CacheClient, args: argparse.Namespace) -> int:
    keys = [str(f.get("key")) for f in client.failures()]
    if not args.all:
        keys = [the_one(check_key(args.key), iter(keys), "failure")]
    for key in keys:
        client.clear_failure(key)
    if args.json:
        say_json({"cleared": keys})
    elif not keys:
        say(f"no failures in namespace {client.namespace}")
    else:
        say("\n".join(f"cleared {key}" for key in keys))
    return 0


def _row(failure: dict[str, Any]) -> tuple[str, ...]:
    until = float(failure.get("until") or 0.0)
    return (
        str(failure.get("key", ""))[:16],
        str(failure.get("kind", "-")),
        str(failure.get("code") or "-"),
        str(failure.get("exit_code", "-")),
        str(failure.get("host") or "-"),
        instant(failure.get("first_seen_at")),
        seconds(max(0.0, until - time.time())),
    )
