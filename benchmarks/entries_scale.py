"""What a large cache costs a look-up: a million entries against a thousand, on SQLite and PostgreSQL.

    python benchmarks/entries_scale.py [--entries 1000000] [--runs 2000] [--database postgresql]
        [--shared-buffers 1GB] [--json FILE]

A row per database and call: the median of an acquire that hits and of a look-up of 100 keys, in milliseconds, with
few and with many entries, asked in turns, and their ratio. The keys asked for lie all over the table, which was
analysed after it was filled and, on PostgreSQL, vacuumed, as its autovacuum would. The design asks for at most 1.2.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from neffcache_client.wire import LookupRequest
from neffcache_server.app import open_state
from neffcache_server.database.models import blobs, entries
from neffcache_server.leases.endpoints import lookup
from neffcache_server.settings import ServerSettings
from neffcache_server.state import State
from sqlalchemy import insert, text
from support.cache_state import acquire, migrated
from support.postgres import running_postgres

FEW = 1000
_LOOKUP_KEYS = 100


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), help="only this one")
    parser.add_argument("--shared-buffers", default="128MB", help="PostgreSQL's own cache; 128MB is its default")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="neffcache-bench-") as folder:
        if args.database != "postgresql":
            pair = [migrated(ServerSettings(data_dir=Path(folder) / f"sqlite-{n}")) for n in ("few", "many")]
            rows += named("SQLite", pair, args)
        if args.database != "sqlite":
            with running_postgres(shared_buffers=args.shared_buffers) as postgres:
                urls = [postgres.url(postgres.take()) for _ in range(2)]
                pair = [ServerSettings(data_dir=Path(folder) / "pg", database_url=url) for url in urls]
                rows += named(f"PostgreSQL, {args.shared_buffers}", pair, args)
    print(f"| database | call | {FEW:,} entries, ms | {args.entries:,} entries, ms | ratio |")
    print("| --- | --- | ---: | ---: | ---: |")
    for row in rows:
        print(f"| {row['database']} | {row['call']} | {row['few']:.2f} | {row['many']:.2f} | {row['ratio']:.2f} |")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))
    return 0


def named(name: str, pair: list[ServerSettings], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the table."""
    return [{"database": name, **row} for row in asyncio.run(measure(pair, args.entries, args.runs))]


async def measure(pair: list[ServerSettings], number: int, runs: int) -> list[dict[str, Any]]:
    """Figures of one kind of database: one with few entries and one with many, asked in turns."""
    states = [open_state(settings) for settings in pair]
    digests = [hashlib.sha256(str(n).encode()).hexdigest() for n in range(number)]
    try:
        callers = []
        for state, some in zip(states, (digests[:FEW], digests), strict=True):
            await state.leases.start()
            await fill(state, some)
            callers.append(calls(state, some))
        rows = []
        for name, times in (("acquire, hit", runs), (f"look-up of {_LOOKUP_KEYS} keys", runs // 4)):
            few, many = await medians([caller[name] for caller in callers], times)
            rows.append({"call": name, "few": few, "many": many, "ratio": many / few})
        return rows
    finally:
        for state in states:
            state.leases.stop()
            await state.database.close()


def calls(state: State, digests: list[str]) -> dict[str, Callable[[], Awaitable[None]]]:
    """Either call, for keys from all over the table."""
    rng = random.Random(1)
    numbers = iter(range(1 << 20, 1 << 40))

    async def hit() -> None:
        assert (await acquire(state, rng.choice(digests), next(numbers))).state == "hit"

    async def look() -> None:
        keys = rng.sample(digests, _LOOKUP_KEYS)
        answer = await lookup("default", LookupRequest(keys=keys), state)
        assert len(answer.present) == _LOOKUP_KEYS

    return {"acquire, hit": hit, f"look-up of {_LOOKUP_KEYS} keys": look}


async def medians(callers: list[Callable[[], Awaitable[None]]], runs: int) -> list[float]:
    """Median milliseconds of each, in turns, so that both see the same machine."""
    times: list[list[float]] = [[] for _ in callers]
    for turn in range(runs + runs // 10):
        for call, taken in zip(callers, times, strict=True):
            began = time.perf_counter()
            await call()
            if turn >= runs // 10:
                taken.append((time.perf_counter() - began) * 1000)
    return [statistics.median(taken) for taken in times]


async def fill(state: State, digests: list[str]) -> None:
    """Present entries, each with a blob of its own."""
    entry = {"namespace": "default", "state": "present", "size": 1000, "compiler_version": "9.0", "created_at": 1.0}
    blob = {"namespace": "default", "size": 1000, "stored_at": 1.0}
    for start in range(0, len(digests), 5000):
        part = digests[start : start + 5000]
        async with state.database.write() as db:
            await db.execute(insert(entries), [{**entry, "key": d, "sha256": d} for d in part])
            await db.execute(insert(blobs), [{**blob, "sha256": d} for d in part])
    if state.database.dialect == "sqlite":
        async with state.database.write() as db:
            await db.execute(text("ANALYZE"))
        return
    # Outside of any transaction.
    connection = await state.database.connect_driver()
    try:
        await connection.execute("SET statement_timeout = 0")
        await connection.execute("VACUUM ANALYZE", timeout=600)
    finally:
        await connection.close()


if __name__ == "__main__":
    sys.exit(main())
