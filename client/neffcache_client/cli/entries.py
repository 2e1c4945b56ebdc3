"""`neffcache entries ls|show|rm|pin|unpin|quarantine`: what the server has."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict

from neffcache_client.api import CacheClient
from neffcache_client.cli.output import instant, pairs, say, say_json, seconds, size, table
from neffcache_client.cli.session import check_key, positive, server, the_one
from neffcache_client.cli.token import duration
from neffcache_client.errors import SettingsError
from neffcache_client.wire import Entry

_PAGE = 100
_HEAD = ("KEY", "COMPILER", "TARGET", "SIZE", "COMPILE", "HITS", "CREATED")
_SHOWN_DIGITS = 16


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `entries` to the command line."""
    parser = subparsers.add_parser(
        "entries", help="list, show or remove what the server has", description="Published NEFFs of the namespace."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ls|show|rm|pin|unpin|quarantine")
    ls = actions.add_parser("ls", help="newest first")
    ls.add_argument("--limit", type=positive, default=50, metavar="N", help="at most N (default: %(default)s)")
    show = actions.add_parser("show", help="one entry, with what its key was made of")
    rm = actions.add_parser("rm", help="remove an entry; the next rank that needs it compiles")
    pin = actions.add_parser("pin", help="keep an entry from garbage collection")
    unpin = actions.add_parser("unpin", help="let garbage collection have it again")
    quarantine = actions.add_parser(
        "quarantine", help="serve entries to nobody any more; the next rank that needs one compiles and replaces it"
    )
    quarantine.add_argument("key", nargs="?", help="the key, or enough of its first digits")
    quarantine.add_argument("--host", metavar="NAME", help="everything that this host compiled")
    quarantine.add_argument("--since", type=duration, metavar="2d", help="with --host: published within it")
    for sub in (show, rm, pin, unpin):
        sub.add_argument("key", help="the key, or enough of its first digits")
    for sub in (ls, show, rm, pin, unpin, quarantine):
        sub.add_argument("--json", action="store_true", help="for machines")


def run(args: argparse.Namespace) -> int:
    """Do the action."""
    if args.action == "quarantine" and bool(args.key) == bool(args.host):
        raise SettingsError("name one key, or a host with --host")
    actions = {"ls": _ls, "show": _show, "rm": _rm, "pin": _pin, "unpin": _pin, "quarantine": _quarantine}
    with server() as client:
        return actions[args.action](client, args)


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
        ("state", entry.state + (", pinned" if entry.pinned else "")),
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


def _pin(client: CacheClient, args: argparse.Namespace) -> int:
    key = _resolve(client, args.key)
    client.pin_entry(key, args.action == "pin")
    if args.json:
        say_json({"key": key, "pinned": args.action == "pin"})
    else:
        say(f"{args.action}ned {key}")
    return 0


def _quarantine(client: CacheClient, args: argparse.Namespace) -> int:
    keys = [_resolve(client, args.key)] if args.key else _made_by(client, args.host, args.since)
    for key in keys:
        client.quarantine_entry(key)
    if args.json:
        say_json({"quarantined": keys})
    else:
        say("\n".join(f"quarantined {key}" for key in keys) or f"nothing was compiled by {args.host}")
    return 0


def _made_by(client: CacheClient, host: str, seconds: float | None) -> list[str]:
    since = client.whoami().now - seconds if seconds is not None else 0.0
    return [
        e.key
        for e in _all_entries(client)
        if e.holder is not None and e.holder.host == host and e.created_at >= since and e.state != "quarantined"
    ]


def _resolve(client: CacheClient, text: str) -> str:
    key = check_key(text)
    return key if len(key) == 64 else the_one(key, _all_keys(client), "entry")


def _all_keys(client: CacheClient) -> Iterator[str]:
    return (e.key for e in _all_entries(client))


def _all_entries(client: CacheClient) -> Iterator[Entry]:
    after: str | None = None
    while True:
        page = client.entries(limit=_PAGE, after=after)
        yield from page.entries
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
