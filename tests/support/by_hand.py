"""A fleet's requests over a year, and every figure that is shown of them, added up once more in plain Python.

Nothing of the server's own sums is used for the second: only its raw events, and what each graph's compile took.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import unescape
from typing import Any

import httpx
from neffcache_server.recording.events import Event
from neffcache_server.recording.writing import write_events
from neffcache_server.state import State
from sqlalchemy import select

from support.dashboard_data import key_of

NAMESPACE = "by-hand"
COLUMNS = ("at", "key", "job", "host", "verdict", "waited_seconds", "spent_seconds", "bytes")
_HOUR, _DAY, _WEEK = 3600, 86400, 7 * 86400
_HITS = ("local", "remote", "waited")
_COMPILES = ("compiled", "fallback", "uncacheable")
_WEIGHTS = {
    "local": 50,
    "remote": 25,
    "waited": 14,
    "compiled": 5,
    "fallback": 2,
    "uncacheable": 1,
    "failed": 2,
    "pushed": 1,
}


def compile_seconds(key: str) -> float:
    """What the compile of a graph took, told by its key."""
    return 20.0 + int(key[:6], 16) % 140000 / 100


async def write_year(state: State, *, requests: int, jobs: int, graphs: int, days: int = 364, seed: int = 7) -> None:
    """Record requests of `jobs` jobs up to now, an eighth of them in the last day, in the order of their times."""
    chance = random.Random(seed)
    verdicts, weights = list(_WEIGHTS), list(_WEIGHTS.values())
    async with state.database.read() as db:
        now = float((await db.execute(select(state.database.clock.now()))).scalar_one())
    for start in range(0, requests, 500):
        batch = []
        for n in range(start, min(requests, start + 500)):
            at = now - (1 - n / requests) ** 3 * days * _DAY
            (verdict,) = chance.choices(verdicts, weights)
            batch.append(_event(at, n * jobs // requests, verdict, key_of(chance.randrange(graphs)), chance))
        async with state.database.write() as db:
            await write_events(db, state.database.dialect, batch)


def _event(at: float, job: int, verdict: str, key: str, chance: random.Random) -> Event:
    # A job runs on four of forty hosts: hosts come back, with graphs that they had before and with others.
    rank = chance.randrange(64)
    host = f"trn2-{(job * 3 + rank // 16) % 40:03}"
    event = Event(NAMESPACE, verdict, host, key=None if verdict == "uncacheable" else key, at=at, rank=rank)
    event.job = f"job-{job}" if chance.random() < 0.95 else None
    event.bytes = 0 if verdict == "failed" else 1000 + int(key[6:10], 16)
    if verdict in ("remote", "waited"):
        event.saved_seconds = compile_seconds(key)  # the server takes it back where it was no saving
    if verdict == "waited":
        event.waited_seconds = chance.uniform(1, 300)
    if verdict in _COMPILES:
        event.spent_seconds = compile_seconds(key)
    return event


@dataclass
class Sums:
    """Figures, added up by hand."""

    verdicts: Counter[str] = field(default_factory=Counter)
    saved: float = 0.0
    spent: float = 0.0
    waited: float = 0.0
    bytes: int = 0

    @property
    def requests(self) -> int:
        return self.verdicts.total() - self.verdicts["pushed"]

    @property
    def hits(self) -> int:
        return sum(self.verdicts[v] for v in _HITS)

    @property
    def compiles(self) -> int:
        return sum(self.verdicts[v] for v in _COMPILES)

    def check_stats(self, stats: dict[str, Any]) -> None:
        """The answer of /v1/stats says the same."""
        assert stats["verdicts"] == dict(self.verdicts)
        assert stats["bytes_served"] == self.bytes
        for name, value in (
            ("compile_seconds_saved", self.saved),
            ("compile_seconds_spent", self.spent),
            ("waited_seconds", self.waited),
        ):
            assert abs(stats[name] - value) <= 1e-6 * max(1.0, value), f"{name}: {stats[name]}, by hand {value}"


@dataclass
class Row:
    """A raw event, and the saving that it was: the first request of a host for a graph, when it hit."""

    at: float
    job: str | None
    verdict: str
    waited: float
    spent: float
    bytes: int
    saved: float


def savings(rows: Iterable[tuple[Any, ...]]) -> list[Row]:
    """Raw events (`COLUMNS`, in the order in which they were recorded) with their savings."""
    seen: set[tuple[str, str]] = set()
    found = []
    for at, key, job, host, verdict, waited, spent, size in rows:
        saved = 0.0
        if key is not None and verdict != "failed" and (key, host) not in seen:
            seen.add((key, host))
            if verdict in ("remote", "waited"):
                saved = compile_seconds(key)
        found.append(Row(at, job, verdict, waited, spent, size, saved))
    return found


def summed(rows: Iterable[Row]) -> Sums:
    sums = Sums()
    for row in rows:
        sums.verdicts[row.verdict] += 1
        sums.saved += row.saved
        sums.spent += row.spent
        sums.waited += row.waited
        sums.bytes += row.bytes
    return sums


def check_everything(url: str, rows: list[Row]) -> dict[str, int]:
    """What the API and the pages say in total, by period and by job equals `rows` added up; how much was compared.

    Raises AssertionError with the first figure that differs.
    """
    compared: Counter[str] = Counter()
    with httpx.Client(base_url=url, timeout=60) as client:
        stats = client.get("/v1/stats", params={"namespace": NAMESPACE}).raise_for_status().json()
        whole = summed(rows)
        assert (stats["verdicts"], stats["bytes_served"]) == (dict(whole.verdicts), whole.bytes)
        assert abs(stats["compile_seconds_saved"] - whole.saved) <= 1e-6 * whole.saved
        compared["events"] = len(rows)
        now = max(row.at for row in rows)
        periods = {
            # Whole steps, the one that runs included; sums by day (or hour) that begin in them.
            "1y": (now // _WEEK * _WEEK - 51 * _WEEK, _DAY),
            "30d": (now // _DAY * _DAY - 29 * _DAY, _DAY),
            "24h": (now // _HOUR * _HOUR - 23 * _HOUR, _HOUR),
        }
        for period, (first, step) in periods.items():
            sums = summed(row for row in rows if row.at // step * step >= first)
            page = client.get("/savings", params={"namespace": NAMESPACE, "range": period, "price": "10"})
            _check_savings(page.raise_for_status().text, sums, period)
            compared["periods"] += 1
        by_job: dict[str, list[Row]] = {}
        for row in rows:
            if row.job is not None:
                by_job.setdefault(row.job, []).append(row)
        for job, of_job in by_job.items():
            params = {"namespace": NAMESPACE, "job": job}
            summed(of_job).check_stats(client.get("/v1/stats", params=params).raise_for_status().json())
            compared["jobs"] += 1
        for job in list(by_job)[:: max(1, len(by_job) // 20)]:
            page = client.get("/jobs/show", params={"namespace": NAMESPACE, "job": job})
            _check_job(page.raise_for_status().text, summed(by_job[job]), job)
            compared["job pages"] += 1
    return dict(compared)


def _figures(page: str) -> dict[str, tuple[str, str]]:
    """Label, value and note of each tile."""
    tiles = re.findall(
        r'<div class="figure[^"]*">\s*<dt>(.*?)</dt>\s*<dd>(.*?)</dd>\s*(?:<dd class="note">(.*?)</dd>)?', page
    )
    return {unescape(label): (value, note) for label, value, note in tiles}


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} h" if seconds < 3.6e6 else f"{seconds / 3600:,.0f} h"


def _check_savings(page: str, sums: Sums, period: str) -> None:
    shown = _figures(page)
    assert shown["Hit rate"] == (f"{100 * sums.hits / sums.requests:.1f} %", f"{sums.requests:,} requests"), period
    assert shown["Compiles avoided"][0] == f"{sums.hits:,}", period
    assert f"{sums.compiles:,} compiled" in shown["Compiles avoided"][1], period
    assert shown["Compile time saved"] == (_hours(sums.saved), f"{_hours(sums.spent)} spent"), period
    assert shown["Waited for others' compiles"][0] == _hours(sums.waited), period
    money = float(shown["Money saved"][0].replace(",", ""))
    assert abs(money - sums.saved / 360) <= max(0.5, 1e-6 * money), period


def _check_job(page: str, sums: Sums, job: str) -> None:
    shown = _figures(page)
    assert shown["Compiles"][0] == f"{sums.compiles:,}", job
    if sums.saved >= 3600:
        assert shown["Compile time saved"][0] == _hours(sums.saved), job
    for verdict, words in (("local", "from the host"), ("remote", "fetched"), ("waited", "waited for")):
        if number := sums.verdicts[verdict]:
            assert f"</span>{number:,} {words}" in page, job
