"""What a rank feels of garbage collection: hits while 100,000 entries go, against hits at rest, in one run.

    python benchmarks/gc_hits.py [--entries 100000] [--json FILE]

A row per database. `rest` and `collecting` are the 50th and 99th percentile and the longest of single acquires that
hit, in milliseconds; then how long the collection took. The bytes are in a folder; their objects are not there, which
is as much work for the database and less for the disk.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from neffcache_client.wire import PublishRequest
from neffcache_server.app import open_state
from neffcache_server.database.models import blobs, entries
from neffcache_server.gc.collector import Collector
from neffcache_server.gc.policy import Policy
from neffcache_server.settings import ServerSettings
from neffcache_server.state import State
from sqlalchemy import insert
from support.cache_state import acquire, lease_id, migrated, neff, upload
from support.postgres import running_postgres

KEY = "f" * 64
_AT_REST = 2000


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="neffcache-bench-") as folder, running_postgres() as postgres:
        embedded = migrated(ServerSettings(data_dir=Path(folder) / "sqlite"))
        shared = ServerSettings(data_dir=Path(folder) / "pg", database_url=postgres.url(postgres.take()))
        for name, settings in (("SQLite", embedded), ("PostgreSQL", shared)):
            rows.append({"database": name, **asyncio.run(measure(settings, args.entries))})
    print(
        f"{'':<11} {'rest p50':>9} {'p99':>7} {'max':>7}  {'collecting p50':>14} {'p99':>7} {'max':>7}  {'took':>7}"
    )
    for row in rows:
        rest, busy = row["rest"], row["collecting"]
        numbers = f"{rest['p50']:>9.2f} {rest['p99']:>7.2f} {rest['max']:>7.1f}  "
        numbers += f"{busy['p50']:>14.2f} {busy['p99']:>7.2f} {busy['max']:>7.1f}  {row['seconds']:>6.1f}s"
        print(f"{row['database']:<11} {numbers}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))
    return 0


async def measure(settings: ServerSettings, number: int) -> dict[str, Any]:
    """Figures of one database."""
    state = open_state(settings)
    try:
        await state.leases.start()
        await publish(state)
        await fill(state, number)
        numbers = iter(range(2, 1 << 40))
        rest = [await hit(state, next(numbers)) for _ in range(_AT_REST)]
        began = time.monotonic()
        policy = Policy(compilers=("9.*",), grace_seconds=0.0)
        collecting = asyncio.create_task(Collector(state.database, state.store, policy).run())
        busy = []
        while not collecting.done():
            busy.append(await hit(state, next(numbers)))
            await asyncio.sleep(0.001)
        report = await collecting
        assert report.entries["compiler"].number == report.blobs.number == number
        seconds = time.monotonic() - began
        return {"rest": figures(rest), "collecting": figures(busy), "seconds": seconds, "entries": number}
    finally:
        state.leases.stop()
        await state.database.close()


async def publish(state: State) -> None:
    assert (await acquire(state, KEY, 1)).state == "leased"
    data = neff("served")
    sha256 = await upload(state, 1, data)
    request = PublishRequest(sha256=sha256, size=len(data), compile_seconds=1.0)
    await state.publishing.publish("default", lease_id(1), request)


async def fill(state: State, number: int) -> None:
    """Entries of a compiler 9.0."""
    digests = [hashlib.sha256(str(n).encode()).hexdigest() for n in range(number)]
    entry = {"namespace": "default", "state": "present", "size": 1000, "compiler_version": "9.0", "created_at": 1.0}
    blob = {"namespace": "default", "size": 1000, "stored_at": 1.0}
    for start in range(0, number, 2000):
        part = digests[start : start + 2000]
        async with state.database.write() as db:
            await db.execute(insert(entries), [{**entry, "key": d, "sha256": d} for d in part])
            await db.execute(insert(blobs), [{**blob, "sha256": d} for d in part])


async def hit(state: State, number: int) -> float:
    """Milliseconds of one hit."""
    began = time.perf_counter()
    assert (await acquire(state, KEY, number)).state == "hit"
    return (time.perf_counter() - began) * 1000


def figures(times: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times, n=100)
    return {"p50": cuts[49], "p99": cuts[98], "max": max(times)}


if __name__ == "__main__":
    sys.exit(main())
