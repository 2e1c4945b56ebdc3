"""`neffcache push`: upload what was compiled while the server was away."""

from __future__ import annotations

import argparse
import sys

from neffcache_client import reports
from neffcache_client.api import CacheClient
from neffcache_client.cli.output import say, say_json
from neffcache_client.cli.session import server_settings
from neffcache_client.errors import NeffcacheError
from neffcache_client.settings import ClientSettings
from neffcache_client.spool import Spool
from neffcache_client.uploader import PushReport, drain


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `push` to the command line."""
    parser = subparsers.add_parser(
        "push",
        help="upload what was compiled while the server was away",
        description="Uploads the spool of the local folder. Exit code 0: it is empty now; 1: something stays.",
    )
    parser.add_argument("--json", action="store_true", help="for machines")


def run(args: argparse.Namespace) -> int:
    """Empty the spool; 0 when it is empty."""
    settings = server_settings()
    waiting = len(Spool(settings.tier_dir))
    with CacheClient(settings) as client:
        report = drain(settings, client, say=_quiet if args.json else say)
        reported = 0 if report.unavailable else _send_reports(settings, client)
    left = len(Spool(settings.tier_dir))
    if args.json:
        say_json({**report.as_dict(), "left": left, "reported": reported})
    else:
        say(_sentence(report, waiting, left))
        for reason in report.kept:
            say(f"kept {reason}")
        if report.unavailable:
            sys.stderr.write(f"neffcache: {report.unavailable}; nothing was lost, push again later\n")
    return 1 if left else 0


def _sentence(report: PushReport, waiting: int, left: int) -> str:
    if not waiting:
        return "nothing waits for upload"
    parts = [f"{report.published} published", f"{report.already_present} already on the server"]
    if report.nondeterministic:
        parts.append(f"{report.nondeterministic} differ from what the server has, which stays")
    if report.damaged:
        parts.append(f"{report.damaged} damaged and thrown away")
    return f"{waiting} waited for upload: {', '.join(parts)}, {left} left"


def _send_reports(settings: ClientSettings, client: CacheClient) -> int:
    """Statistics that are not told yet go along; they are not worth an error."""
    try:
        return reports.send(settings, client)
    except NeffcacheError:
        return 0


def _quiet(text: str) -> None:
    return
