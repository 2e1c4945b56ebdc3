"""`neffcache gc`: collect now, on the database and the store themselves."""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from neffcache_client.cli.output import say, say_json, size
from neffcache_client.cli.token import duration
from neffcache_client.errors import SettingsError
from neffcache_client.settings import parse_bytes
from neffcache_client.wire import check_namespace

if TYPE_CHECKING:
    from neffcache_server.gc.policy import Policy, Removed, Report
    from neffcache_server.settings import ServerSettings

_REASONS = {
    "compiler": "made by a compiler that is named",
    "age": "too old",
    "unused": "not used for too long",
    "size": "the namespace is too large",
}


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `gc` to the command line."""
    parser = subparsers.add_parser(
        "gc",
        help="remove old entries and bytes that nothing refers to",
        description="Works on the server's database and store with its settings (NEFFCACHE_SERVER_GC_…), also while "
        "servers run; they do the same by themselves. Bytes are deleted a grace after their last entry.",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would go")
    parser.add_argument("--namespace", type=_namespace, metavar="NAME", help="only entries of this namespace")
    parser.add_argument("--max-bytes", type=_bytes, metavar="50G", help="per namespace; least recently used go first")
    parser.add_argument("--unused", type=duration, metavar="30d", help="without a hit for this long")
    parser.add_argument("--older", type=duration, metavar="90d", help="published before that")
    parser.add_argument("--compiler", action="append", metavar="2.19.*", help="made by these; may be repeated")
    parser.add_argument("--history", type=duration, metavar="180d", help="of keys without an artifact, not asked for")
    parser.add_argument("--grace", type=duration, metavar="2h", help="leave what was stored or used within it")
    parser.add_argument(
        "--all-orphans", action="store_true", help="delete unknown objects even when they are most of what there is"
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--data-dir", type=Path, help="folder of the embedded database and blob store")
    parser.add_argument("--database-url", help="another database than SQLite in the data folder")
    parser.add_argument("--storage-url", help="another store than a folder in the data folder")


def run(args: argparse.Namespace) -> int:
    """Collect. Returns the exit code."""
    from neffcache_server.cli import guarded

    return guarded(args, lambda settings: _collect(args, settings))


def _collect(args: argparse.Namespace, settings: ServerSettings) -> int:
    from neffcache_server.database.migrate import is_current
    from neffcache_server.gc.policy import policy_of
    from neffcache_server.problems import ServerProblem, SetupError

    if not is_current(settings.effective_database_url):
        raise SetupError("the database is not at this version's schema: run `neffcache db upgrade` first")
    policy = _policy(args, policy_of(settings))
    report, fault = asyncio.run(_run(args, settings, policy))
    if args.json:
        say_json(asdict(report))
    else:
        _print(report)
    if isinstance(fault, ServerProblem):
        sys.stderr.write(f"neffcache: {fault.detail}; what was done until then stays done\n")
    return 1 if fault else 0


def _policy(args: argparse.Namespace, policy: Policy) -> Policy:
    given = {
        "max_bytes": args.max_bytes,
        "unused_seconds": args.unused,
        "age_seconds": args.older,
        "compilers": tuple(args.compiler) if args.compiler else None,
        "history_seconds": args.history,
        "grace_seconds": args.grace,
    }
    return replace(policy, **{name: value for name, value in given.items() if value is not None})


async def _run(args: argparse.Namespace, settings: ServerSettings, policy: Policy) -> tuple[Report, Exception | None]:
    from neffcache_server.database.engine import open_database
    from neffcache_server.gc.collector import Collector
    from neffcache_server.problems import ServerProblem
    from neffcache_server.storage.open import open_store

    database = open_database(settings)
    collector = Collector(
        database,
        open_store(settings),
        policy,
        dry_run=args.dry_run,
        namespace=args.namespace,
        all_orphans=args.all_orphans,
    )
    try:
        return await collector.run(), None
    except ServerProblem as exc:
        return collector.report, exc
    finally:
        await database.close()


def _print(report: Report) -> None:
    verb = "would remove" if report.dry_run else "removed"
    lines = [(f"{n.number} entries", n, _REASONS[reason]) for reason, n in report.entries.items()]
    for name, removed, why in (
        ("blobs", report.blobs, "nothing refers to them"),
        ("objects", report.orphans, "unknown to the database"),
        ("staging files", report.abandoned, "uploads that ended nowhere"),
    ):
        if removed.number:
            lines.append((f"{removed.number} {name}", removed, why))
    for what, removed, why in lines:
        say(f"{verb} {what}, {_size(removed)}: {why}")
    if report.keys:
        say(f"{verb} the history of {report.keys} keys: without an artifact, and not asked for in a long time")
    if not lines and not report.keys:
        say("nothing to remove")
    if report.waiting.number:
        say(f"{report.waiting.number} blobs, {_size(report.waiting)}, go when their grace has passed")
    if report.spared_orphans:
        say(
            f"{report.spared_orphans} objects are unknown to the database, most of what the store holds: is it the "
            "right database? They stay; --all-orphans deletes them"
        )


def _size(removed: Removed) -> str:
    return size(removed.bytes)


def _namespace(text: str) -> str:
    try:
        return check_namespace(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text, "--max-bytes")
    except SettingsError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None
