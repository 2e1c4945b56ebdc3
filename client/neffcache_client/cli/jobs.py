"""`neffcache jobs`: what the cache did for each job, and for each rank of one."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from neffcache_client.cli.output import instant, pairs, say, say_json, seconds, show_table, size
from neffcache_client.cli.session import positive, server
from neffcache_client.wire import JobRow

_COMPILES = ("compiled", "fallback", "uncacheable")
_HITS = ("local", "remote", "waited")


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `jobs` to the command line."""
    parser = subparsers.add_parser(
        "jobs",
        help="what the cache did for each job, or for the ranks of one",
        description="Jobs of the namespace, latest first; with NAME that job and its ranks, slowest first.",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="a job's full name")
    parser.add_argument("--limit", type=positive, default=20, help="how many to show (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="for machines")


def run(args: argparse.Namespace) -> int:
    """Print them."""
    with server() as client:
        if args.name is None:
            jobs = client.jobs(limit=args.limit)
            if args.json:
                say_json([asdict(job) for job in jobs])
            elif jobs:
                _show_jobs(jobs)
            else:
                say("no job was seen yet; NEFFCACHE_JOB names one")
            return 0
        found = client.job(args.name, limit=args.limit)
    if args.json:
        say_json(asdict(found))
        return 0
    say(f"job {found.job.job}, namespace {found.job.namespace}")
    say(pairs(_facts(found.job), "  "))
    if found.ranks:
        say()
        _show_ranks(found.ranks)
    return 0


def _show_jobs(jobs: list[JobRow]) -> None:
    head = ("JOB", "RANKS", "HOSTS", "REQUESTS", "HITS", "COMPILES", "WAITED", "COMPILED", "SAVED", "LAST SEEN")
    rows = [
        (
            job.job,
            str(job.ranks),
            str(job.hosts),
            str(_requests(job)),
            str(_sum(job, _HITS)),
            str(_sum(job, _COMPILES)),
            seconds(job.waited_seconds),
            seconds(job.spent_seconds),
            seconds(job.saved_seconds),
            instant(job.last_at),
        )
        for job in jobs
    ]
    show_table(head, rows, right=head[1:-1])


def _show_ranks(ranks: list[JobRow]) -> None:
    head = ("RANK", "HOST", "REQUESTS", "HITS", "COMPILES", "WAITED", "COMPILED", "FETCHED", "TO LAST GRAPH")
    rows = [
        (
            "-" if rank.rank is None else str(rank.rank),
            rank.host or "",
            str(_requests(rank)),
            str(_sum(rank, _HITS)),
            str(_sum(rank, _COMPILES)),
            seconds(rank.waited_seconds),
            seconds(rank.spent_seconds),
            seconds(rank.fetch_seconds),
            seconds(rank.ready_seconds),
        )
        for rank in ranks
    ]
    show_table(head, rows, right=(head[0], *head[2:]))


def _facts(job: JobRow) -> list[tuple[str, str]]:
    counts = ", ".join(f"{n} {verdict}" for verdict, n in job.verdicts.items()) or "none"
    return [
        ("ranks", f"{job.ranks} on {job.hosts} hosts"),
        ("requests", counts),
        ("compiles", str(_sum(job, _COMPILES))),
        ("bytes", size(job.bytes)),
        ("time waited", seconds(job.waited_seconds)),
        ("compile time spent", seconds(job.spent_seconds)),
        ("compile time saved", seconds(job.saved_seconds)),
        ("seen", f"{instant(job.first_at)} to {instant(job.last_at)}"),
    ]


def _requests(row: JobRow) -> int:
    return sum(n for verdict, n in row.verdicts.items() if verdict != "pushed")


def _sum(row: JobRow, verdicts: tuple[str, ...]) -> int:
    return sum(row.verdicts.get(verdict, 0) for verdict in verdicts)
