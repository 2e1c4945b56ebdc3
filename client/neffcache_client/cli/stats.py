"""`neffcache stats`: what the cache did, seen from the server and from this host's local folder."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from neffcache_client.cli.output import pairs, say, say_json, seconds, size, table
from neffcache_client.cli.session import server_settings
from neffcache_client.local_tier import LocalTier
from neffcache_client.records import VERDICTS, Summary, summarise
from neffcache_client.settings import ClientSettings
from neffcache_client.spool import Spool
from neffcache_client.wire import Stats

_MEANING = {
    "local": "found in the local folder",
    "remote": "fetched from the server",
    "waited": "compiled by another process meanwhile",
    "compiled": "compiled here, for everybody",
    "failed": "no NEFF",
    "fallback": "compiled here because the cache could not be used",
    "uncacheable": "compiled here, this kind is never cached",
}


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `stats` to the command line."""
    parser = subparsers.add_parser(
        "stats",
        help="hits, waits, compiles and time saved",
        description="Figures of the server's namespace since its database was made, and of the compiles that "
        "processes using this host's local folder asked for.",
    )
    parser.add_argument("--local", action="store_true", help="only the local folder; asks no server")
    parser.add_argument("--job", metavar="NAME", help="count local records of this job only")
    parser.add_argument("--json", action="store_true", help="for machines")


def run(args: argparse.Namespace) -> int:
    """Print the figures."""
    settings = ClientSettings.from_env() if args.local else server_settings()
    remote = None if args.local else _remote(settings)
    summary = summarise(settings.tier_dir, args.job)
    spooled = len(Spool(settings.tier_dir))
    usage = LocalTier(settings.tier_dir).usage()
    if args.json:
        say_json(_document(settings, remote, summary, spooled, usage))
        return 0
    if remote is not None:
        say(f"server {settings.url}, namespace {settings.namespace}")
        say(pairs(_remote_rows(remote), "  "))
        say()
    say(f"local folder {settings.tier_dir}" + (f", job {args.job}" if args.job else ""))
    say(pairs(_local_rows(summary, spooled, usage), "  "))
    if rows := _verdict_rows(summary):
        say()
        say(table(("VERDICT", "COUNT", "MEANING"), rows, right=("COUNT",)))
    return 0


def _remote(settings: ClientSettings) -> Stats:
    from neffcache_client.api import CacheClient

    with CacheClient(settings) as client:
        return client.stats()


def _document(
    settings: ClientSettings,
    remote: Stats | None,
    summary: Summary,
    spooled: int,
    usage: list[tuple[str, int, float]],
) -> dict[str, Any]:
    local = {
        **summary.as_dict(),
        "folder": settings.tier_dir,
        "spooled": spooled,
        "artifacts": len(usage),
        "artifact_bytes": sum(s for _, s, _ in usage),
    }
    return {"local": local} if remote is None else {"local": local, "server": asdict(remote)}


def _remote_rows(stats: Stats) -> list[tuple[str, str]]:
    return [
        ("entries", f"{stats.entries} ({size(stats.bytes)})"),
        ("hits", str(stats.hits)),
        ("misses", str(stats.misses)),
        ("waits", str(stats.waits)),
        ("published", str(stats.publishes)),
        ("failures", str(stats.failures)),
        ("nondeterministic", str(stats.nondeterministic)),
        ("compiling now", str(stats.live_leases)),
        ("compile time spent", seconds(stats.compile_seconds_spent)),
        ("compile time saved", seconds(stats.compile_seconds_saved)),
    ]


def _local_rows(summary: Summary, spooled: int, usage: list[tuple[str, int, float]]) -> list[tuple[str, str]]:
    return [
        ("artifacts", f"{len(usage)} ({size(sum(s for _, s, _ in usage))})"),
        ("waiting for upload", f"{spooled}" + (" (neffcache push)" if spooled else "")),
        ("requests", str(sum(summary.verdicts.values()))),
        ("bytes served", size(summary.bytes)),
        ("damaged copies", str(summary.corrupt)),
        ("time waited", seconds(summary.waited_seconds)),
        ("compile time spent", seconds(summary.compile_seconds)),
        ("compile time saved", seconds(summary.saved_seconds)),
    ]


def _verdict_rows(summary: Summary) -> list[tuple[str, str, str]]:
    rows: list[tuple[str, str, str]] = []
    known = [v for v in VERDICTS if v in summary.verdicts]
    for verdict in known + sorted(set(summary.verdicts) - set(known)):
        rows.append((verdict, str(summary.verdicts[verdict]), _MEANING.get(verdict, "")))
        rows += [("", str(n), reason) for reason, n in sorted(summary.reasons.get(verdict, {}).items())]
    return rows
