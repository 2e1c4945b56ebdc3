"""What each page shows, read from SQL."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from neffcache_client.wire import JobRow

from neffcache_server.dashboard import charts
from neffcache_server.dashboard.queries import Group, Queries
from neffcache_server.database.engine import ReadConnection
from neffcache_server.recording.history import Figures
from neffcache_server.settings import ServerSettings
from neffcache_server.state import State

_HOUR, _DAY = 3600, 86400
RANGES = {
    # name: (words, hourly or daily sums, seconds back, seconds a step)
    "24h": ("24 hours", "hour", _DAY, _HOUR),
    "7d": ("7 days", "hour", 7 * _DAY, 6 * _HOUR),
    "30d": ("30 days", "day", 30 * _DAY, _DAY),
    "1y": ("a year", "day", 364 * _DAY, 7 * _DAY),
}
_EVENTS_DRAWN = 4000
RANKS_SHOWN = 200


async def savings(state: State, db: ReadConnection, namespace: str | None, period: str) -> dict[str, Any]:
    """Figures over time, and who saved most."""
    now = await state.history.now(db)
    _, sums, back, step = RANGES[period]
    # Whole steps, the one that runs included.
    first = int(now // step) * step - back + step
    found = await state.history.series(db, namespace, sums, first, step)
    starts = range(first, int(now) + 1, step)
    label = charts.hour_label if step < _DAY else charts.day_label
    series = [(label(start), found.get(start, Figures())) for start in starts]
    total = _total([f for _, f in series])
    return {
        "now": now,
        "series": series,
        "total": total,
        "jobs": await state.history.jobs(db, namespace, order="saved_seconds", limit=10, since=float(first)),
        "by_namespace": await state.history.by_namespace(db, float(first), sums) if namespace is None else {},
    }


def _total(parts: Sequence[Figures]) -> Figures:
    total = Figures()
    for part in parts:
        for verdict, count in part.verdicts.items():
            total.verdicts[verdict] = total.verdicts.get(verdict, 0) + count
        for place, count in part.reasons.items():
            total.reasons[place] = total.reasons.get(place, 0) + count
        for name in ("waited_seconds", "spent_seconds", "saved_seconds", "bytes"):
            setattr(total, name, getattr(total, name) + getattr(part, name))
    return total


async def job(state: State, db: ReadConnection, row: JobRow) -> dict[str, Any]:
    """A job's ranks and its timeline."""
    ranks = await state.history.ranks(db, row.namespace, row.job, RANKS_SHOWN)
    events = await state.history.job_events(db, row.namespace, row.job, _EVENTS_DRAWN)
    lanes, segments = _lanes(events)
    parts = [r for r in ranks if r.ready_seconds]
    slowest = max((r.ready_seconds or 0.0 for r in parts), default=None)
    return {
        "now": await state.history.now(db),
        "job": row,
        "ranks": ranks,
        "lanes": lanes,
        "segments": segments,
        "many_lanes": len({(e.host, e.rank) for e in events}) > charts.MAX_LANES,
        "many_events": len(events) == _EVENTS_DRAWN,
        "slowest": slowest,
        "rests": {(r.host, r.rank): _rest(r) for r in ranks},
    }


def _rest(rank: JobRow) -> float | None:
    """Of a rank's time to its last graph, what was neither waiting, nor compiling, nor fetching."""
    if rank.ready_seconds is None:
        return None
    return max(0.0, rank.ready_seconds - rank.waited_seconds - rank.spent_seconds - (rank.fetch_seconds or 0.0))


def _lanes(events: Sequence[Any]) -> tuple[list[str], list[charts.Segment]]:
    """Lines of the timeline (those that took longest, in order of rank) and what lies on them."""
    took: Counter[tuple[str, int | None]] = Counter()
    for e in events:
        took[e.host, e.rank] += e.waited_seconds + e.spent_seconds + 1e-6
    chosen = [place for place, _ in took.most_common(charts.MAX_LANES)]
    chosen.sort(key=lambda place: (place[1] is None, place[1] or 0, place[0]))
    number = {place: i for i, place in enumerate(chosen)}
    begin = min((e.at - e.waited_seconds - e.spent_seconds for e in events), default=0.0)
    segments = []
    for e in events:
        if (lane := number.get((e.host, e.rank))) is not None and e.verdict in charts.STACK:
            start = e.at - e.waited_seconds - e.spent_seconds - begin
            segments.append(charts.Segment(lane, e.verdict, start, e.at - begin))
    names = [f"rank {rank} · {host}" if rank is not None else host for host, rank in chosen]
    return names, segments


@dataclass(slots=True)
class Rule:
    """A rule of garbage collection: what it would remove now, and what besides within a week."""

    text: str
    now: Group
    soon: Group


async def forecast(
    queries: Queries, db: ReadConnection, namespace: str | None, settings: ServerSettings, now: float
) -> list[Rule]:
    """What the rules that are set take, apart from the bound on bytes."""
    rules = []
    for seconds, published, text in (
        (settings.gc_unused_seconds, False, "not used"),
        (settings.gc_age_seconds, True, "stored longer ago than that"),
    ):
        if seconds:
            first = await queries.older(db, namespace, now - seconds, published=published)
            later = await queries.older(db, namespace, now - seconds + 7 * _DAY, published=published)
            soon = Group(name="", number=later.number - first.number, bytes=later.bytes - first.bytes)
            rules.append(Rule(f"{text}, {seconds / _DAY:g} days", first, soon))
    return rules


async def health(state: State, db: ReadConnection, namespace: str | None) -> dict[str, Any]:
    """Whether everything works, and what went wrong in the last day."""
    began = time.monotonic()
    now = await state.history.now(db)
    answered = time.monotonic() - began
    day = await state.history.figures(db, namespace, now - _DAY)
    store_trouble = None
    began = time.monotonic()
    try:
        await state.store.check()
    except Exception as exc:  # whatever a store says when it cannot be used, the page shows it
        store_trouble = str(exc) or type(exc).__name__
    return {
        "now": now,
        "database_seconds": answered,
        "store_seconds": time.monotonic() - began,
        "store_trouble": store_trouble,
        "backlog": state.recorder.waiting,
        "dropped": state.recorder.dropped,
        "day": day,
        "reasons": sorted(day.reasons.items(), key=lambda item: -item[1]),
        "published": day.verdicts.get("compiled", 0),
    }
