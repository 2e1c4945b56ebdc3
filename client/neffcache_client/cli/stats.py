"""`neffcache stats`: what the cache did, seen from the server and from this host's local folder."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import asdict
from typing import Any

from neffcache_client.cli.output import instant, pairs, say, say_json, seconds, show_table, size
from neffcache_client.cli.session import server_settings
from neffcache_client.errors import SettingsError
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
    parser.add_argument("--job", metavar="NAME", help="count this job only, at the server and here")
    parser.add_argument(
        "--since",
        metavar="AGO",
        help="count from then on, such as 90m, 24h or 7d (at the server, from the full hour)",
    )
    parser.add_argument(
        "--zero", action="store_true", help="from now on count from now when --since is not given; nothing is deleted"
    )
    parser.add_argument("--json", action="store_true", help="for machines")


def run(args: argparse.Namespace) -> int:
    """Print the figures."""
    settings = ClientSettings.from_env() if args.local else server_settings()
    if args.zero:
        return _zero(settings)
    ago = _ago(args.since) if args.since else _since_zero(settings)
    remote = None if args.local else _remote(settings, args.job, ago)
    summary = summarise(settings.tier_dir, args.job, None if ago is None else time.time() - ago)
    spooled = len(Spool(settings.tier_dir))
    usage = LocalTier(settings.tier_dir).usage()
    if args.json:
        say_json(_document(settings, remote, summary, spooled, usage))
        return 0
    if remote is not None:
        say(f"server {settings.url}, namespace {settings.namespace}{_limits(args.job, remote.since)}")
        say(pairs(_remote_rows(remote), "  "))
        say()
    since = None if ago is None else time.time() - ago
    say(f"local folder {settings.tier_dir}{_limits(args.job, since)}")
    say(pairs(_local_rows(summary, spooled, usage), "  "))
    if rows := _verdict_rows(summary):
        say()
        show_table(("VERDICT", "COUNT", "MEANING"), rows, right=("COUNT",))
    return 0


def _limits(job: str | None, since: float | None) -> str:
    return (f", job {job}" if job else "") + (f", since {instant(since)}" if since else "")


def _ago(text: str) -> float:
    """`7d` in seconds. Raises SettingsError."""
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}.get(text[-1:], 0.0)
    try:
        value = float(text[:-1]) * unit
    except ValueError:
        value = 0.0
    if not 0 < value < 1e10:
        raise SettingsError(f"--since {text!r}: expected a time such as 90m, 24h or 7d")
    return value


def _zero_path(settings: ClientSettings) -> str:
    return os.path.join(settings.tier_dir, "stats-zero")


def _zero(settings: ClientSettings) -> int:
    try:
        os.makedirs(settings.tier_dir, exist_ok=True)
        with open(_zero_path(settings), "w", encoding="utf-8") as f:
            f.write(f"{time.time():.3f}\n")
    except OSError as exc:
        raise SettingsError(f"{_zero_path(settings)} cannot be written: {exc.strerror}") from exc
    say("counting from now; --since counts from further back")
    return 0


def _since_zero(settings: ClientSettings) -> float | None:
    try:
        with open(_zero_path(settings), encoding="utf-8") as f:
            return max(0.0, time.time() - float(f.read()))
    except (OSError, ValueError):
        return None


def _remote(settings: ClientSettings, job: str | None, ago: float | None) -> Stats:
    from neffcache_client.api import CacheClient

    with CacheClient(settings) as client:
        # A job is a span of time of its own, so the start of counting does not cut it.
        if job is not None:
            return client.stats_of(job=job)
        return client.stats() if ago is None else client.stats_of(since_seconds=ago)


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
        ("requests", ", ".join(f"{n} {v}" for v, n in stats.verdicts.items()) or "-"),
        ("time waited", seconds(stats.waited_seconds)),
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
