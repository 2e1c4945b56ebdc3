"""What the auto-load adds to `import torch`, with and without NEFFCACHE_URL.

    python benchmarks/import_torch.py [--runs 15] [--json FILE]

The entry point's own time is taken inside the process: torch's loader is made to note the clock around it, by
wrapping `EntryPoint.load`. Whole-process times of `import torch` are printed beside it; they vary by more than the
auto-load costs, so the limits (1 ms without a URL, 30 ms with one) hold for the former.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.compilers import FakeCompiler, environment

LIMITS = {"without NEFFCACHE_URL": 1.0, "with NEFFCACHE_URL": 30.0}

PROGRAM = """
import importlib.metadata as m, os, time
load = m.EntryPoint.load
spent = []
def timed_load(self):
    if self.group != "torch.backends" or self.name != "neffcache":
        return load(self)
    started = time.perf_counter()
    hook = load(self)
    spent.append(time.perf_counter() - started)
    def timed_hook():
        started = time.perf_counter()
        hook()
        spent.append(time.perf_counter() - started)
    return timed_hook
m.EntryPoint.load = timed_load
import torch
print(sum(spent), len(spent), "neffcache-launcher" in os.environ["PATH"])
"""


def main() -> int:
    """Measure and print; exit 1 beyond a limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="neffcache-bench-") as folder:
        report = measure(Path(folder), args.runs)
    print(f"{'import torch':24}{'auto-load adds':>16}{'p90':>10}{'limit':>8}{'whole process':>16}")
    for name, r in report.items():
        added = f"{r['added_ms']:>13.3f} ms{r['p90_ms']:>7.2f} ms"
        print(f"{name:24}{added}{LIMITS[name]:>5.0f} ms{r['whole_ms']:>13.0f} ms")
    if args.json:
        args.json.write_text(json.dumps(report, indent=2))
    return 0 if all(r["added_ms"] < LIMITS[name] for name, r in report.items()) else 1


def measure(root: Path, runs: int) -> dict[str, dict[str, float]]:
    """Medians by row, the two interleaved."""
    compiler = FakeCompiler(root / "compiler")
    bare = environment(compiler.folder, cache=root)
    envs = {"without NEFFCACHE_URL": bare, "with NEFFCACHE_URL": {**bare, "NEFFCACHE_URL": "http://127.0.0.1:9"}}
    added: dict[str, list[float]] = {name: [] for name in envs}
    whole: dict[str, list[float]] = {name: [] for name in envs}
    for turn in range(runs + 1):
        for name, env in envs.items():
            started = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-c", PROGRAM], env=env, check=True, capture_output=True, text=True
            )
            seconds = time.perf_counter() - started
            spent, calls, active = done.stdout.split()
            assert calls == "2", "torch did not load the entry point: is neffcache installed?"
            assert (active == "True") == ("NEFFCACHE_URL" in env)
            if turn:  # the first fills the caches, as the first rank of a host does
                added[name].append(float(spent) * 1e3)
                whole[name].append(seconds * 1e3)
    return {
        name: {
            "added_ms": statistics.median(added[name]),
            "p90_ms": statistics.quantiles(added[name], n=10)[8],
            "whole_ms": statistics.median(whole[name]),
        }
        for name in envs
    }


if __name__ == "__main__":
    os.environ.pop("NEFFCACHE_URL", None)
    sys.exit(main())
