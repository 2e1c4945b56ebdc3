"""A server's database filled as if a fleet had used it for a year, written by the server's own recording."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from neffcache_server.app import open_state
from neffcache_server.database.models import COUNT_COLUMNS, counters, differences, entries, failures, jobs, rollups
from neffcache_server.recording.events import Event
from neffcache_server.recording.writing import add_run, write_events
from sqlalchemy import insert, select

from support.cache_state import migrated, server_settings

VERSIONS = ("2.24.8799.0+5a1f2c88", "2.23.6484.0+3b612583", "2.22.1204.0+9d0e71aa")
HOSTILE = '<img src=x onerror="window.hacked=1">'
_DAY = 86400


def key_of(number: int) -> str:
    """The key of the graph of that number."""
    return hashlib.sha256(f"graph {number}".encode()).hexdigest()


def fill(folder: Path, *, graphs: int = 60, many_jobs: int = 24, days: int = 365, seed: int = 1) -> None:
    """Make and fill the embedded database in `folder` (a server's data folder)."""
    # In a thread: the browser's driver has an event loop of its own in this one.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: asyncio.run(_fill(folder, graphs, many_jobs, days, random.Random(seed)))).result()


async def _fill(folder: Path, graphs: int, many_jobs: int, days: int, chance: random.Random) -> None:
    state = open_state(migrated(server_settings(folder)))
    try:
        async with state.database.write() as db:
            now = float((await db.execute(select(state.database.clock.now()))).scalar_one())
            rows = [_entry(n, now, days, chance) for n in range(graphs)]
            for start in range(0, len(rows), 5000):
                await db.execute(insert(entries), rows[start : start + 5000])
            await db.execute(insert(counters), [{"namespace": n, "hits": 1} for n in ("default", "research")])
            await db.execute(insert(rollups), list(_rollups(now, days, chance)))
            await db.execute(insert(jobs), [_job(n, now, chance) for n in range(many_jobs)])
            await db.execute(insert(failures), _failure(now))
            await db.execute(insert(differences), _difference(now))
        for events, runs in (_cold_job(now, chance), _warm_job(now, chance), _hostile_job(now)):
            async with state.database.write() as db:
                for start in range(0, len(events), 500):
                    await write_events(db, "sqlite", events[start : start + 500])
                for job, host, rank, values in runs:
                    await add_run(db, "sqlite", "default", job, host, rank, values)
    finally:
        await state.database.close()


def _entry(n: int, now: float, days: int, chance: random.Random) -> dict[str, Any]:
    created = now - chance.random() ** 2 * days * _DAY
    used = chance.random() < 0.85
    hostile = n == 3
    factors = {
        "recipe": 1,
        "ir": {"kind": "mlir", "canonicaliser": "mlir-bytecode-1", "digest": key_of(n + 10**6)},
        "compiler": {"version": VERSIONS[n % 3], "digest": key_of(n % 3), "kind": "wheel"},
        "target": "trn2",
        "lnc": "2",
        "options": {
            "known": [
                ["auto-cast", "none"],
                ["model-type", HOSTILE if hostile else "transformer"],
                ["optlevel", "1"],
            ],
            "unknown": [],
            "environment": [],
        },
        "files": [],
        "env": {"NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"},
    }
    return {
        "namespace": "default" if n % 4 else "research",
        "key": key_of(n),
        "state": "present" if n % 29 != 7 else "missing",
        "sha256": key_of(n + 2 * 10**6),
        "size": int(10 ** chance.uniform(6.2, 8.4)),
        "compiler_version": VERSIONS[0 if n % 5 else chance.randrange(3)],
        "target": "trn2" if n % 6 else "trn1",
        "compile_seconds": chance.uniform(20, 1400),
        "cpu_seconds": chance.uniform(60, 6000),
        "peak_rss_bytes": int(chance.uniform(4, 40) * 2**30),
        "created_at": created,
        "host": f"trn2-{n % 8:03}",
        "boot": "b",
        "pid": 1000 + n,
        "rank": n % 64,
        "job": HOSTILE if hostile else f"llama-70b-pretrain-{n % 9}",
        "hits": int(chance.paretovariate(0.8)) if used else 0,
        "last_hit_at": min(now, created + chance.random() * (now - created)) if used else None,
        "factors": json.dumps(factors) if n < 1000 else None,
    }


def _rollups(now: float, days: int, chance: random.Random) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    today = int(now // _DAY) * _DAY
    total: dict[tuple[str, str, str], dict[str, Any]] = {}
    for namespace, scale in (("default", 1.0), ("research", 0.25)):
        for back in range(days):
            busy = scale * (0.3 if (today // _DAY - back) % 7 in (2, 3) else 1.0) * (1.4 - back / days)
            hours = range(24) if back < 3 else ()
            _add(rows, total, "day", today - back * _DAY, namespace, busy, chance)
            for hour in hours:
                if (start := today - back * _DAY + hour * 3600) <= now:
                    _add(rows, total, "hour", start, namespace, busy / 24, chance)
    return rows + list(total.values())


def _add(
    rows: list[dict[str, Any]],
    total: dict[Any, Any],
    period: str,
    start: int,
    namespace: str,
    busy: float,
    chance: Any,
) -> None:
    shape = (
        ("local", "", 900),
        ("remote", "", 420),
        ("waited", "", 260),
        ("compiled", "", 28),
        ("failed", "deterministic", 5),
    )
    for verdict, reason, usual in (*shape, ("fallback", "unreachable", 3), ("uncacheable", "no_target", 2)):
        number = int(usual * busy * chance.uniform(0.7, 1.3))
        if not number:
            continue
        compiles = verdict in ("compiled", "fallback", "uncacheable")
        row = {
            "period": period,
            "starts_at": start,
            "namespace": namespace,
            "verdict": verdict,
            "reason": reason,
            "number": number,
            "waited_seconds": number * 210.0 if verdict == "waited" else 0.0,
            "spent_seconds": number * 320.0 if compiles else 0.0,
            "saved_seconds": number * 45.0 if verdict in ("remote", "waited") else 0.0,
            "bytes": number * 40_000_000,
        }
        rows.append(row)
        if period == "day":
            sums = total.setdefault((namespace, verdict, reason), {**row, "period": "total", "starts_at": 0} | _ZERO)
            for name in _ZERO:
                sums[name] += row[name]


_ZERO = {"number": 0, "waited_seconds": 0.0, "spent_seconds": 0.0, "saved_seconds": 0.0, "bytes": 0}


def _job(n: int, now: float, chance: random.Random) -> dict[str, Any]:
    ranks = chance.choice((8, 64, 64, 128, 512))
    first = now - (n + 1) * 0.9 * _DAY * chance.uniform(0.2, 1)
    counts = dict.fromkeys(COUNT_COLUMNS.values(), 0)
    counts |= {"remote_hits": ranks // 2, "local_hits": ranks * 8, "waits": ranks // 4, "compiles": n % 15}
    return {
        "namespace": "default",
        "job": f"llama-70b-pretrain-{n}",
        "first_at": first,
        "last_at": first + chance.uniform(60, 3600),
        "hosts": max(1, ranks // 16),
        "ranks": ranks,
        **counts,
        "bytes": ranks * 40_000_000,
        "waited_seconds": ranks * 90.0,
        "spent_seconds": counts["compiles"] * 300.0,
        "saved_seconds": ranks * 60.0,
    }


def _failure(now: float) -> dict[str, Any]:
    return {
        "namespace": "default",
        "key": key_of(77_777),
        "transient_count": 0,
        "last_failure_at": now - 40,
        "kind": "deterministic",
        "exit_code": 70,
        "code": "NCC_EOOM001",
        "log_tail": "[NCC_EOOM001] DRAM usage exceeds the limit\n" + HOSTILE + "\n",
        "host": "trn2-003",
        "first_seen_at": now - 40,
        "until": now + 3600,
    }


def _difference(now: float) -> dict[str, Any]:
    return {
        "namespace": "default",
        "key": key_of(5),
        "stored_sha256": key_of(1),
        "offered_sha256": key_of(2),
        "members": json.dumps(["sg00/pe.bin", "sg00/act.bin"]),
        "host": "trn2-001",
        "compiler_version": VERSIONS[0],
        "seen_at": now - 7200,
    }


Runs = list[tuple[str, str, int, dict[str, Any]]]


def _cold_job(now: float, chance: random.Random) -> tuple[list[Event], Runs]:
    """64 ranks on 8 hosts, 6 graphs: one rank compiles each, the first of every host waits, the others find it."""
    job, events, runs = "mixtral-8x7b-sft-4711", [], []
    start = now - 5400
    waited: dict[int, float] = dict.fromkeys(range(64), 0.0)
    for graph in range(6):
        seconds = chance.uniform(90, 420)
        leader = graph * 8 % 64
        for rank in range(64):
            event = Event("default", "waited", f"trn2-{rank // 8:03}", key=key_of(graph), job=job, rank=rank)
            event.at = start + seconds + chance.uniform(0.1, 1.5)
            if rank == leader:
                event.verdict, event.spent_seconds = "compiled", seconds
            else:
                event.waited_seconds = seconds - chance.uniform(0, 20)
                event.source = "server" if rank % 8 == 0 else "client"
                event.saved_seconds = seconds
                waited[rank] += event.waited_seconds
            event.bytes = 38_000_000
            events.append(event)
        start += seconds + 6
    for rank in range(64):
        ready = start - (now - 5400) + chance.uniform(20, 40)
        runs.append((job, f"trn2-{rank // 8:03}", rank, {"at": start, "ready_seconds": ready, "fetch_seconds": 3.1}))
    return events, runs


def _warm_job(now: float, chance: random.Random) -> tuple[list[Event], Runs]:
    job, events, runs = "mixtral-8x7b-sft-4712", [], []
    for rank in range(64):
        host = f"trn2-{rank // 8 + 20:03}"
        for graph in range(6):
            event = Event(
                "default", "remote" if rank % 8 == 0 else "local", host, key=key_of(graph), job=job, rank=rank
            )
            event.at = now - 1200 + graph * 4 + chance.random()
            event.saved_seconds, event.bytes = 240.0, 38_000_000
            events.append(event)
        runs.append((job, host, rank, {"at": now - 1170, "ready_seconds": 31.0, "fetch_seconds": 2.0}))
    return events, runs


def _hostile_job(now: float) -> tuple[list[Event], Runs]:
    event = Event("default", "remote", HOSTILE, key=key_of(3), job=HOSTILE, rank=0)
    event.at, event.saved_seconds = now - 300, 60.0
    return [event], []
