"""Ranks of one simulated host in a process of their own, for tests that kill or count processes.

As a program: `python -m support.rank_process FOLDER URL RANKS COMPILE_SECONDS KEY`. Each rank is a thread with its
own node cache; every compile appends a line to FOLDER/../compiles. Prints `compiling` when a compile begins and one
JSON object with verdicts, exit codes and digests at the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]


def start(
    folder: Path, url: str, *, ranks: int = 1, seconds: float = 0.0, key: str = "ab" * 32
) -> subprocess.Popen[str]:
    """Start one. Read its first line to know that it compiles."""
    return subprocess.Popen(
        [sys.executable, "-m", "support.rank_process", str(folder), url, str(ranks), str(seconds), key],
        cwd=TESTS,
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Its report."""
    out, _ = process.communicate(timeout=120)
    report: dict[str, Any] = json.loads(out.splitlines()[-1])
    return report


def compiles(folder: Path) -> int:
    """How many compiles the hosts under `folder` ran."""
    path = folder / "compiles"
    return len(path.read_text().splitlines()) if path.exists() else 0


def main() -> None:
    from neffcache_client.heartbeat import LeaseView
    from neffcache_client.results import Patience

    from support.node import Node

    folder, url, ranks, seconds, key = (
        Path(sys.argv[1]),
        sys.argv[2],
        int(sys.argv[3]),
        float(sys.argv[4]),
        sys.argv[5],
    )
    verdicts: list[tuple[str, str | None, int, str]] = []

    def compiling(view: LeaseView) -> None:
        fd = os.open(folder.parent / "compiles", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(fd, f"{folder.name}\n".encode())
        os.close(fd)
        print("compiling", flush=True)
        threading.Event().wait(seconds)

    def rank(n: int) -> None:
        node = Node(folder, url, patience=Patience(), RANK=str(n))
        node.private_stem = f"private-{n}"
        node.on_compile = compiling
        got = node.obtain(key, output=f"out{n}.neff")
        data = node.output(f"out{n}.neff").read_bytes()
        verdicts.append((got.verdict, got.reason, got.exit_code, hashlib.sha256(data).hexdigest()))

    threads = [threading.Thread(target=rank, args=(n,)) for n in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = ("verdict", "reason", "exit_code", "sha256")
    print(json.dumps({"ranks": [dict(zip(names, v, strict=True)) for v in verdicts]}), flush=True)


if __name__ == "__main__":
    main()
