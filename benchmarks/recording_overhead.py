"""What recording costs: hits a second that a server answers with it and without, in interleaved rounds of one run.

    python benchmarks/recording_overhead.py [--rounds 10] [--seconds 2] [--json FILE]

Two servers of the same code, one with NEFFCACHE_SERVER_RECORDING=0, each asked for 16 published keys by 32 open
connections that pretend to be 640 ranks of 80 hosts. The writing that lags behind is inside the measurement. The
issue asks for a ratio of at least 0.9.
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

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.neffs import make_neff
from support.server import running_server

LIMIT = 0.9
CONNECTIONS = 32
KEYS = [hashlib.sha256(f"key {n}".encode()).hexdigest() for n in range(16)]


def main() -> int:
    """Measure and print; exit 1 below the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rates: dict[str, list[float]] = {"on": [], "off": []}
    with (
        tempfile.TemporaryDirectory(prefix="neffcache-bench-") as folder,
        running_server(Path(folder) / "on") as on,
        running_server(Path(folder) / "off", env={"NEFFCACHE_SERVER_RECORDING": "0"}) as off,
    ):
        servers = {"on": on, "off": off}
        for server in servers.values():
            publish(server.url)
            asyncio.run(rate(server.port, 0.5))
        for number in range(args.rounds):
            # In turns of changing order, so that whatever else this machine does hits both alike.
            for name in ("on", "off") if number % 2 else ("off", "on"):
                rates[name].append(asyncio.run(rate(servers[name].port, args.seconds)))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratio = statistics.median(a / b for a, b in zip(rates["on"], rates["off"], strict=True))
    for name, value in medians.items():
        print(f"recording {name:4}{value:>9.0f} hits/s")
    print(f"ratio {ratio:.3f}, at least {LIMIT}: {'ok' if ratio >= LIMIT else 'TOO SLOW'}")
    if args.json:
        args.json.write_text(json.dumps({"hits_per_second": medians, "ratio": ratio}, indent=2) + "\n")
    return 0 if ratio >= LIMIT else 1


def publish(url: str) -> None:
    """Put an artifact under every key."""
    data = make_neff()
    sha256 = hashlib.sha256(data).hexdigest()
    with httpx.Client(base_url=f"{url}/v1/ns/default/", timeout=30) as client:
        for number, key in enumerate(KEYS):
            lease = f"{number:032x}"
            holder = {"host": "maker", "boot": "b", "pid": 1}
            client.post(f"keys/{key}/acquire", json={"lease_id": lease, "holder": holder}).raise_for_status()
            client.put(f"blobs/{sha256}", content=data, headers={"neffcache-lease": lease}).raise_for_status()
            body = {"sha256": sha256, "size": len(data), "compile_seconds": 60.0}
            client.post(f"leases/{lease}/publish", json=body).raise_for_status()


async def rate(port: int, seconds: float) -> float:
    """Hits a second over all connections."""
    until = time.monotonic() + seconds
    counts = await asyncio.gather(*(ask(port, n, until) for n in range(CONNECTIONS)))
    return sum(counts) / seconds


async def ask(port: int, number: int, until: float) -> int:
    """One connection: hits until the time is up. Bare sockets, since the client shares the processors."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    requests = [_request(number * 20 + turn, KEYS[(number + turn) % len(KEYS)]) for turn in range(20)]
    done = 0
    while time.monotonic() < until:
        writer.write(requests[done % 20])
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        body = await reader.readexactly(length)
        assert b'"state":"hit"' in body, body
        done += 1
    writer.close()
    return done


def _request(rank: int, key: str) -> bytes:
    holder = {"host": f"host{rank // 8}", "boot": "b", "pid": rank, "rank": rank, "job": "bench"}
    body = json.dumps({"lease_id": f"{rank + 1000:032x}", "holder": holder}).encode()
    head = f"POST /v1/ns/default/keys/{key}/acquire HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body


if __name__ == "__main__":
    sys.exit(main())
