"""`neffcache demo`: watch a fleet share its compiles, and what it costs without."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from neffcache_client import records
from neffcache_client.errors import NeffcacheError

from neffcache_hook.demo.fleet import DemoFailed, Outcome, Scenario, run_fleet
from neffcache_hook.demo.report import Row, as_json, row_of, table

DEFAULT_MODELS = ("mlp", "convnet", "decoder", "decoder-train")
NO_CACHE_RANKS = 4
"""Without any cache every rank compiles everything: 64 of them would take this machine the better part of an
hour, so that baseline runs with at most this many ranks, and its row says so."""


def register(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's arguments."""
    parser = sub.add_parser(
        "demo",
        help="simulated ranks on this machine, with and without the cache",
        description="Forks ranks that lower, compile and run real models with the CPU stand-in for neuronx-cc: "
        "without a cache, with the built-in cache (one lock per host), and with neffcache cold and warm. "
        "A server is started in a temporary folder unless NEFFCACHE_URL is set.",
    )
    parser.add_argument("--ranks", type=int, default=8, metavar="N", help="ranks of the job (default: %(default)s)")
    parser.add_argument("--hosts", type=int, default=2, metavar="N", help="hosts they run on (default: %(default)s)")
    parser.add_argument(
        "--models", default=",".join(DEFAULT_MODELS), metavar="A,B", help="which models (default: %(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    parser.add_argument("--skip-baselines", action="store_true", help="only neffcache, cold and warm")
    parser.add_argument("--keep", metavar="DIR", help="work in DIR and leave everything there: logs, folders, data")


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 when every promise held."""
    # Before numpy is imported: its BLAS would start threads, which a forked rank would miss.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # SIGTERM ends ranks and server as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        models = _checked(args)
    except ValueError as exc:
        print(f"neffcache demo: {exc}", file=sys.stderr)
        return 2
    try:
        with _work_dir(args.keep) as folder:
            rows = _scenarios(args, models, folder)
    except NeffcacheError as exc:
        print(f"\nneffcache demo: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nneffcache demo: stopped; all ranks and the server were ended", file=sys.stderr)
        return 130
    return _conclude(rows, args.json)


def _checked(args: argparse.Namespace) -> tuple[str, ...]:
    from neffcache_hook.cpu.models import MODELS

    if args.ranks < 1 or args.hosts < 1:
        raise ValueError("--ranks and --hosts must be at least 1")
    if args.hosts > args.ranks:
        raise ValueError(f"--hosts {args.hosts} is more than --ranks {args.ranks}: every host has at least one rank")
    models = tuple(m for m in args.models.split(",") if m)
    if unknown := [m for m in models if m not in MODELS] or not models:
        raise ValueError(f"--models: unknown {unknown}; there are {', '.join(MODELS)}")
    return models


def _scenarios(args: argparse.Namespace, models: tuple[str, ...], folder: Path) -> list[Row]:
    from neffcache_hook.cpu.compiler import install_compiler
    from neffcache_hook.demo.rank import prepare, rank_main

    (folder / "bin").mkdir()
    install_compiler(str(folder / "bin"))
    prepare()
    progress = Progress()
    rows: list[Row] = []

    def scenario(name: str, *, ranks: int, hosts: int, url: str | None = None, built_in_cache: bool = True) -> None:
        plan = Scenario(
            name=name,
            ranks=ranks,
            hosts=hosts,
            models=models,
            folder=_fresh(folder / name.replace(" ", "-")),
            compiler_dir=folder / "bin",
            url=url,
            built_in_cache=built_in_cache,
        )
        outcome = run_fleet(plan, rank_main, progress)
        rows.append(row_of(outcome, verdicts_of(outcome)))
        if url is not None:
            _report(outcome)
        progress.done(f"{name}: {outcome.compiles} compiles, {outcome.seconds:.1f} s")

    print(f"{args.ranks} ranks on {args.hosts} hosts, models {', '.join(models)}; logs in {folder}", flush=True)
    if not args.skip_baselines:
        few = min(args.ranks, NO_CACHE_RANKS)
        scenario("no cache", ranks=few, hosts=min(args.hosts, few), built_in_cache=False)
        scenario("built-in cache", ranks=args.ranks, hosts=args.hosts)
    with _server(folder, progress) as url:
        scenario("neffcache cold", ranks=args.ranks, hosts=args.hosts, url=url)
        scenario("neffcache warm", ranks=args.ranks, hosts=args.hosts, url=url)
    return rows


def _report(outcome: Outcome) -> None:
    """Tell the server what it did not see, as each host's uploader does some time later."""
    from neffcache_client import reports
    from neffcache_client.api import CacheClient
    from neffcache_client.settings import ClientSettings

    plan = outcome.scenario
    for rank in range(plan.ranks):
        host = plan.host_of(rank)
        if rank and plan.host_of(rank - 1) == host:
            continue
        settings = ClientSettings.from_env({**os.environ, **plan.environment(rank)})
        os.environ["NEFFCACHE_HOST"] = plan.host_name(host)
        try:
            with CacheClient(settings) as client:
                reports.send(settings, client)
        finally:
            del os.environ["NEFFCACHE_HOST"]


def verdicts_of(outcome: Outcome) -> Counter[str]:
    """The launchers' verdicts, summed over the hosts' own records."""
    total: Counter[str] = Counter()
    for host in range(outcome.scenario.hosts):
        tier = outcome.scenario.host_dir(host) / "neff_cache" / "neffcache"
        total.update(r["verdict"] for r in records.read_records(str(tier)))
    return total


def _conclude(rows: list[Row], json_file: str | None) -> int:
    by_name = {r.scenario: r for r in rows}
    cold, warm = by_name["neffcache cold"], by_name["neffcache warm"]
    print("\n" + table(rows))
    worst = max(r.max_abs_diff for r in rows)
    print(f"\nLargest difference from eager PyTorch, over every output of every rank: {worst:.1e}")
    none = by_name.get("no cache")
    if none and none.ranks < cold.ranks:
        print(
            f"'no cache' ran with {none.ranks} ranks at once instead of {cold.ranks}: each rank compiles every "
            f"graph, which does not fit this machine ({os.cpu_count()} cores). Its figures are of that size; "
            "nothing is extrapolated."
        )
    print("The compiler is a stand-in (IREE for the CPU): neuronx-cc takes minutes where it takes seconds.")
    if json_file:
        Path(json_file).write_text(as_json(rows, {"cores": os.cpu_count(), "compiler": "cpu stand-in"}))
    broken = _broken_promises(cold, warm, worst)
    for promise in broken:
        print(f"neffcache demo: {promise}", file=sys.stderr)
    return 1 if broken else 0


def _broken_promises(cold: Row, warm: Row, worst: float) -> list[str]:
    broken = []
    if cold.compiles != cold.graphs:
        broken.append(f"{cold.graphs} graphs took {cold.compiles} compiles on a cold cache; 1 each was promised")
    if warm.compiles:
        broken.append(f"a warm cache still compiled {warm.compiles} times")
    if worst >= 1e-3:
        broken.append(f"outputs differ from eager by {worst}")
    return broken


@contextmanager
def _work_dir(keep: str | None) -> Iterator[Path]:
    if keep:
        Path(keep).mkdir(parents=True, exist_ok=True)
        if any(Path(keep).iterdir()):
            raise DemoFailed(f"{keep} is not empty; name a new folder")
        yield Path(keep).resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="neffcache-demo-"))
    try:
        yield folder
    except NeffcacheError:
        print(f"\nThe logs are kept in {folder}", file=sys.stderr)
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _fresh(folder: Path) -> Path:
    folder.mkdir()
    return folder


@contextmanager
def _server(folder: Path, progress: Progress) -> Iterator[str]:
    """The URL to use: NEFFCACHE_URL, or a server of our own for as long as the block lasts."""
    if url := os.environ.get("NEFFCACHE_URL"):
        yield url
        return
    port_file = folder / "server.url"
    command = [sys.executable, "-m", "neffcache_client.cli.main", "serve", "--port", "0"]
    command += ["--data-dir", str(folder / "server"), "--port-file", str(port_file)]
    env = {k: v for k, v in os.environ.items() if not k.startswith("NEFFCACHE_")}
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
    try:
        deadline = time.monotonic() + 60
        while not port_file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise DemoFailed(f"the server did not start:\n{(folder / 'server.log').read_text()[-3000:]}")
            time.sleep(0.05)
        url = port_file.read_text().strip()
        progress.done(f"server on {url}")
        yield url
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Progress:
    """One line that keeps changing on a terminal; a line every few seconds elsewhere."""

    def __init__(self, every_seconds: float = 5.0) -> None:
        self._tty = sys.stdout.isatty()
        self._every = every_seconds
        self._last = time.monotonic()

    def __call__(self, text: str) -> None:
        if self._tty:
            print(f"\r\033[K  {text}", end="", flush=True)
        elif time.monotonic() - self._last >= self._every:
            self._last = time.monotonic()
            print(f"  {text}", flush=True)

    def done(self, text: str) -> None:
        """A line that stays."""
        print(("\r\033[K" if self._tty else "") + f"  {text}", flush=True)
