"""`neffcache entries ls|show|rm`: what the server has."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict

from neffcache_client.api import CacheClient
from neffcache_client.cli.output import instant, pairs, say, say_json, seconds, size, table
from neffcache_client.cli.session import check_key, server, the_one
from neffcache_client.wire import Entry

_PAGE = 100
_HEAD = ("KEY", "COMPILER", "TARGET", "SIZE", "COMPILE", "HITS", "CREATED")
_SHOWN_DIGITS = 16


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `entries` to the command line."""
    parser = subparsers.add_parser(
        "entries", help="list, show or remove what the server has", description="Published NEFFs of the namespace."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ls|show|rm")
    ls = actions.add_parser("ls", help="newest first")
    ls.add_argument("--limit", type=_positive, default=50, metavar="N", help="at most N (default: %(default)s)")
    show = actions.add_parser("show", help="one entry, with what its key was made of")
    rm = actions.add_parser("rm", help="remove an entry; the next rank that needs it compiles")
    for sub in (show, rm):
        sub.add_argument("key", help="the key, or enough of its first digits")
    for sub in (ls, show, rm):
        sub.add_argument("--json", action="store_true", help="for machines")


def run(args: argparse.Namespace) -> int:
    """Do the action."""
    with server() as client:
        return {"ls": _ls, "show": _show, "rm": _rm}[args.action](client, args)


def _ls(client: CacheClient, args: argparse.Namespace) -> int:
    entries: list[Entry] = []
    total = 0
    after: str | None = None
    while len(entries) < args.limit:
        page = client.entries(limit=min(_PAGE, args.limit - len(entries)), after=after)
        entries += page.entries
        total, after = page.total, page.next
        if after is None or not page.entries:
            break
    if args.json:
        say_json({"entries": [asdict(e) for e in entries], "total": total})
        return 0
    if not entries:
        say(f"no entries in namespace {client.namespace}")
        return 0
    say(table(_HEAD, [_row(e) for e in entries], right=("SIZE", "COMPILE", "HITS")))
    if total > len(entries):
        say(f"{len(entries)} of {total}; --limit shows more")
    return 0


def _show(client: CacheClient, args: argparse.Namespace) -> int:
    entry = client.entry(_resolve(client, args.key))
    if args.json:
        say_json(asdict(entry))
        return 0
    holder = entry.holder
    rows = [
        ("key", entry.key),
        ("state", entry.state),
        ("compiler version", entry.compiler_version or "-"),
        ("target", entry.target or "-"),
        ("size", f"{size(entry.size)} ({entry.size} bytes)"),
        ("sha256", entry.sha256),
        ("compile time", seconds(entry.compile_seconds)),
        ("peak memory", size(entry.peak_rss_bytes)),
        ("compiled by", f"pid {holder.pid} on {holder.host}" + (f", job {holder.job}" if holder.job else ""))
        if holder
        else ("compiled by", "-"),
        ("created", instant(entry.created_at)),
        ("hits", str(entry.hits)),
        ("last hit", instant(entry.last_hit_at)),
    ]
    say(pairs(rows))
    if entry.factors:
        say("factors")
        say(pairs([(name, _value(entry.factors[name])) for name in sorted(entry.factors)], "  "))
    return 0


def _rm(client: CacheClient, args: argparse.Namespace) -> int:
    key = _resolve(client, args.key)
    client.delete_entry(key)
    if args.json:
        say_json({"removed": key})
    else:
        say(f"removed {key}")
    return 0


def _resolve(client: CacheClient, text: str) -> str:
    key = check_key(text)
    return key if len(key) == 64 else the_one(key, _all_keys(client), "entry")


def _all_keys(client: CacheClient) -> Iterator[str]:
    after: str | None = None
    while True:
        page = client.entries(limit=_PAGE, after=after)
        yield from (e.key for e in page.entries)
        after = page.next
        if after is None:
            return


def _row(e: Entry) -> tuple[str, ...]:
    return (
        e.key[:_SHOWN_DIGITS],
        e.compiler_version or "-",
        e.target or "-",
        size(e.size),
        seconds(e.compile_seconds),
        str(e.hits),
        instant(e.created_at),
    )


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value
