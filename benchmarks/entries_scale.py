"""What a large cache costs a look-up: a million entries against a thousand, on SQLite and PostgreSQL, in one run.

    python benchmarks/entries_scale.py [--entries 1000000] [--runs 2000] [--database postgresql]
        [--shared-buffers 1GB] [--json FILE]

A row per database and call: the median of an acquire that hits and of a look-up of 100 keys, in milliseconds, with
few and with many entries, and their ratio. The keys asked for lie all over the table. Tables are analysed and, on
PostgreSQL, vacuumed after they were filled, as its autovacuum would. The design asks for at most 1.2.
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
            embedded = migrated(ServerSettings(data_dir=Path(folder) / "sqlite"))
            rows += named("SQLite", embedded, args)
        if args.database != "sqlite":
            with running_postgres(shared_buffers=args.shared_buffers) as postgres:
                url = postgres.url(postgres.take())
                shared = ServerSettings(data_dir=Path(folder) / "pg", database_url=url)
                rows += named(f"PostgreSQL, {args.shared_buffers}", shared, args)
    print(f"| database | call | {FEW:,} entries, ms | {args.entries:,} entries, ms | ratio |")
    print("| --- | --- | ---: | ---: | ---: |")
    for row in rows:
        print(f"| {row['database']} | {row['call']} | {row['few']:.2f} | {row['many']:.2f} | {row['ratio']:.2f} |")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))
    return 0


def named(name: str, settings: ServerSettings, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the table."""
    return [{"database": name, **row} for row in asyncio.run(measure(settings, args.entries, args.runs))]


async def measure(settings: ServerSettings, number: int, runs: int) -> list[dict[str, Any]]:
    """Figures of one database: first with few entries, then with all."""
    state = open_state(settings)
    try:
        await state.leases.start()
        digests = [hashlib.sha256(str(n).encode()).hexdigest() for n in range(number)]
        await fill(state, digests[:FEW])
        few = await both(state, digests[:FEW], runs)
        await fill(state, digests[FEW:])
        many = await both(state, digests, runs)
        return [{"call": c, "few": few[c], "many": many[c], "ratio": many[c] / few[c]} for c in few]
    finally:
        state.leases.stop()
        await state.database.close()


async def both(state: State, digests: list[str], runs: int) -> dict[str, float]:
    """Median milliseconds of either call."""
    rng = random.Random(1)
    numbers = iter(range(1 << 20, 1 << 40))

    async def hit() -> None:
        assert (await acquire(state, rng.choice(digests), next(numbers))).state == "hit"

    async def look() -> None:
        keys = rng.sample(digests, _LOOKUP_KEYS)
        answer = await lookup("default", LookupRequest(keys=keys), state)
        assert len(answer.present) == _LOOKUP_KEYS

    return {
        "acquire, hit": await median(hit, runs),
        f"look-up of {_LOOKUP_KEYS} keys": await median(look, runs // 4),
    }


async def median(call: Callable[[], Awaitable[None]], runs: int) -> float:
    for _ in range(runs // 10):
        await call()
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        await call()
        times.append((time.perf_counter() - began) * 1000)
    return statistics.median(times)


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
