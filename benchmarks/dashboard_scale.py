"""How long the dashboard's pages take on a large database, and how large they are.

    python benchmarks/dashboard_scale.py [--entries 100000] [--jobs 1000] [--json FILE]

A year of daily figures, a month of hourly ones in two namespaces, 64 ranks with timelines. Each page is asked for
five times and then painted by Chromium. Columns: median response, first paint, bytes of the page, bytes with style
sheet and scripts. The issue asks for a first paint under 1 s and 300 KB.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

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
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="neffcache-bench-") as name:
        fill(Path(name) / "data", graphs=args.entries, many_jobs=args.jobs)
        with running_server(Path(name)) as server:
            report = {page: {"seconds": respond(server.url + path)} for page, path in PAGES.items()}
            paint(server.url, report)
    print(f"{'page':20}{'response':>10}{'first paint':>13}{'page':>10}{'with assets':>13}")
    good = True
    for page, r in report.items():
        ok = r["paint_seconds"] < SECONDS and r["bytes_in_all"] < KILOBYTES * 1000
        good &= ok
        print(
            f"{page:20}{r['seconds'] * 1e3:>7.0f} ms{r['paint_seconds'] * 1e3:>10.0f} ms"
            f"{r['bytes'] / 1000:>7.0f} KB{r['bytes_in_all'] / 1000:>10.0f} KB{'' if ok else '  TOO MUCH'}"
        )
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if good else 1


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
