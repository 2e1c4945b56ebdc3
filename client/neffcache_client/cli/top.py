"""`neffcache top`: who compiles and who waits, over and over."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict

from neffcache_client.api import CacheClient
from neffcache_client.cli.output import instant, say, say_json, seconds, show_table, size
from neffcache_client.cli.session import server
from neffcache_client.errors import CacheUnavailable
from neffcache_client.wire import Live, LiveLease

_CLEAR = "\x1b[H\x1b[J"


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `top` to the command line."""
    parser = subparsers.add_parser(
        "top",
        help="who compiles and who waits, now",
        description="Compiles under way in the namespace, renewed until Ctrl-C; once where stdout is no terminal.",
    )
    parser.add_argument("--interval", type=_seconds, default=2.0, metavar="S", help="seconds between looks")
    parser.add_argument("--once", action="store_true", help="one look")
    parser.add_argument("--json", action="store_true", help="one look, for machines")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no number of seconds")
    return value


def run(args: argparse.Namespace) -> int:
    """Show the state once or until Ctrl-C."""
    with server() as client:
        if args.json:
            say_json(asdict(client.live()))
        elif args.once or not sys.stdout.isatty():
            show(client.live(), client.url)
        else:
            _follow(client, max(0.2, args.interval))
    return 0


def _follow(client: CacheClient, interval: float) -> None:
    while True:
        try:
            live, trouble = client.live(), ""
        except CacheUnavailable as exc:
            live, trouble = None, str(exc)
        sys.stdout.write(_CLEAR)
        if live is None:
            say(f"{trouble}; trying again")
        else:
            show(live, client.url)
        sys.stdout.flush()
        time.sleep(interval)


def show(live: Live, url: str) -> None:
    """One look."""
    minute = ", ".join(f"{n} {verdict}" for verdict, n in sorted(live.last_minute.items())) or "none"
    say(f"{url}  {instant(live.now)}")
    say(f"compiling {len(live.leases)}, waiting {live.waiters}, failures in force {live.failures}")
    say(f"requests in the last minute: {minute}")
    if live.leases:
        say()
        head = ("KEY", "HOST", "RANK", "JOB", "RUNNING", "USUAL", "WAITING", "DOING", "MEMORY", "HEARTBEAT")
        show_table(head, [_row(lease) for lease in live.leases], right=("RANK", *head[4:7], *head[8:]))


def _row(lease: LiveLease) -> tuple[str, ...]:
    heard = f"{lease.heartbeat_age_seconds:.0f} s ago"
    return (
        lease.key[:12],
        lease.holder.host,
        "-" if lease.holder.rank is None else str(lease.holder.rank),
        lease.holder.job or "-",
        seconds(lease.age_seconds),
        seconds(lease.usual_seconds),
        str(lease.waiters),
        lease.phase or "starting",
        size(lease.rss_bytes),
        f"{heard}, stuck" if lease.stuck else heard,
    )
