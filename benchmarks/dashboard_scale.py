"""How long the dashboard's pages take on a large database, and how large they are.

    python benchmarks/dashboard_scale.py [--entries 100000] [--jobs 1000] [--requests 200000] [--json FILE]

A year of daily figures, a month of hourly ones in two namespaces, 64 ranks with timelines. Each page is asked for
five times and then painted by Chromium. Columns: median response, first paint, bytes of the page, bytes with style
sheet and scripts. The issue asks for a first paint under 1 s and 300 KB.

A third namespace has a year of single requests by as many jobs. Every figure that the API and the pages show of them
(total, by period, by job) is compared with the raw events, added up in plain Python by tests/support/by_hand.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sqlite3
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from neffcache_server.app import open_state
from support.by_hand import COLUMNS, NAMESPACE, check_everything, savings, write_year
from support.cache_state import server_settings
from support.dashboard_data import fill, key_of
from support.server import running_server

SECONDS, KILOBYTES = 1.0, 300
PAGES = {
    "now": "/",
    "savings, 24 hours": "/savings?range=24h",
    "savings, 30 days": "/savings?range=30d",
    "savings, a year": "/savings?range=1y",
    "graphs": "/graphs",
    "graphs by hits": "/graphs?sort=hits",
    "graphs, last page": "/graphs?page=200",
    "graphs, search": "/graphs?q=trn1",
    "graph": f"/graphs/default/{key_of(3)}",
    "jobs": "/jobs",
    "job": "/jobs/show?namespace=default&job=mixtral-8x7b-sft-4711",
    "storage": "/storage",
    "health": "/health",
}
_ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
_PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"


def main() -> int:
    """Measure and print; exit 1 when a page is beyond the limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="neffcache-bench-") as name:
        fill(Path(name) / "data", graphs=args.entries, many_jobs=args.jobs)
        asyncio.run(record(Path(name) / "data", args.requests, args.jobs))
        raw = raw_events(Path(name) / "data")
        with running_server(Path(name)) as server:
            report = {page: {"seconds": respond(server.url + path)} for page, path in PAGES.items()}
            paint(server.url, report)
            compared = check_everything(server.url, savings(raw))
    print(f"{'page':20}{'response':>10}{'first paint':>13}{'page':>10}{'with assets':>13}")
    good = True
    for page, r in report.items():
        ok = r["paint_seconds"] < SECONDS and r["bytes_in_all"] < KILOBYTES * 1000
        good &= ok
        print(
            f"{page:20}{r['seconds'] * 1e3:>7.0f} ms{r['paint_seconds'] * 1e3:>10.0f} ms"
            f"{r['bytes'] / 1000:>7.0f} KB{r['bytes_in_all'] / 1000:>10.0f} KB{'' if ok else '  TOO MUCH'}"
        )
    print(
        f"figures added up by hand from {compared['events']:,} raw events are those of the API in total and for "
        f"{compared['jobs']:,} jobs, and those of the pages for {compared['periods']} periods "
        f"and {compared['job pages']} jobs"
    )
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if good else 1


async def record(folder: Path, requests: int, jobs: int) -> None:
    """A year of single requests, written by the server's own recording."""
    state = open_state(server_settings(folder))
    try:
        await write_year(state, requests=requests, jobs=jobs, graphs=3000)
    finally:
        await state.database.close()


def raw_events(folder: Path) -> list[tuple[Any, ...]]:
    """Single requests as they stand in the database, before the server forgets those older than a few days."""
    connection = sqlite3.connect(folder / "neffcache.sqlite3")
    try:
        columns = ", ".join(COLUMNS)
        return connection.execute(
            f"SELECT {columns} FROM events WHERE namespace = ? ORDER BY id", (NAMESPACE,)
        ).fetchall()
    finally:
        connection.close()


def respond(url: str) -> float:
    """Median of five responses."""
    took = []
    with httpx.Client(timeout=60) as client:
        for _ in range(5):
            began = time.perf_counter()
            client.get(url).raise_for_status()
            took.append(time.perf_counter() - began)
    return statistics.median(took)


def paint(url: str, report: dict[str, Any]) -> None:
    """First paints in a fresh browser context each, nothing cached."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=_ARGUMENTS)
        for name, path in PAGES.items():
            context = browser.new_context(viewport={"width": 1280, "height": 800})
            page = context.new_page()
            answers: list[Any] = []
            page.on("response", lambda answer, answers=answers: answers.append(answer))
            page.goto(url + path, wait_until="load")
            page.wait_for_function(f"() => {_PAINT} > 0")
            sizes = [len(answer.body()) for answer in list(answers) if "/v1/events" not in answer.url]
            report[name] |= {
                "paint_seconds": page.evaluate(_PAINT) / 1e3,
                "bytes": sizes[0],
                "bytes_in_all": sum(sizes),
            }
            context.close()
        browser.close()


if __name__ == "__main__":
    sys.exit(main())
