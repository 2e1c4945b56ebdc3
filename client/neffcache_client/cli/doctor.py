"""`neffcache doctor`: would a rank that started here use the cache?"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict

from neffcache_client.checkup.finding import Finding, warn
from neffcache_client.checkup.host import check_folders, read_settings
from neffcache_client.cli.output import say, say_json
from neffcache_client.settings import ClientSettings


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `doctor` to the command line."""
    parser = subparsers.add_parser(
        "doctor",
        help="find out whether a rank started here would use the cache",
        description="Looks at settings, launcher, compiler, server, token and store as a rank would. Exit code 0: "
        "healthy; 1: something needs doing.",
    )
    parser.add_argument("--server", action="store_true", help="only settings and server, where there is no compiler")
    parser.add_argument("--json", action="store_true", help="for machines")


def run(args: argparse.Namespace) -> int:
    """Look at everything; 0 when nothing FAILs."""
    findings = []
    for finding in _examine(args.server):
        findings.append(finding)
        if not args.json:
            _print(finding)
    failed = sum(f.status == "FAIL" for f in findings)
    if args.json:
        say_json({"healthy": not failed, "findings": [asdict(f) for f in findings]})
    else:
        say("healthy" if not failed else f"{failed} to be put right")
    return 1 if failed else 0


def _examine(server_only: bool) -> Iterator[Finding]:
    settings, findings = read_settings(os.environ)
    yield from findings
    if settings is None:
        return
    yield from check_folders(settings, os.environ)
    if not server_only:
        yield from _hook(settings)
    if settings.url:
        from neffcache_client.checkup.server import check_server

        yield from check_server(settings)


def _hook(settings: ClientSettings) -> Iterable[Finding]:
    if importlib.util.find_spec("neffcache_hook") is None:
        return [warn("launcher", "neffcache_hook is not installed here", "install neffcache anew")]
    from neffcache_hook.checkup import check_hook

    return check_hook(settings, os.environ)


def _print(finding: Finding) -> None:
    say(f"{finding.status:<5} {finding.name:<15} {finding.text}")
    if finding.todo:
        say(f"{'':<5} {'':<15} -> {finding.todo}")
