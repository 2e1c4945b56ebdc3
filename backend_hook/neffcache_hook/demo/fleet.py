"""Ranks forked from one process that has imported torch, each with its host's own folders."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neffcache_client.errors import NeffcacheError

RankMain = Callable[["Scenario", int, int], dict[str, Any]]
"""What one rank does: scenario, rank, file descriptor to wait on -> its figures."""

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class DemoFailed(NeffcacheError):
    """A rank of the demo failed."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One run of the whole fleet, in a folder that nothing used before."""

    name: str
    ranks: int
    hosts: int
    models: tuple[str, ...]
    folder: Path
    compiler_dir: Path
    url: str | None = None
    built_in_cache: bool = True

    def host_of(self, rank: int) -> int:
        """Ranks fill hosts one after the other, as launchers of jobs do."""
        return rank * self.hosts // self.ranks

    def host_dir(self, host: int) -> Path:
        """The folder that stands for a host's disk."""
        return self.folder / f"host{host:02d}"

    def host_name(self, host: int) -> str:
        """What a host is called: each scenario runs on machines that nobody has seen before."""
        return f"{self.name.split()[-1]}-host{host:02d}"

    @property
    def compile_log(self) -> Path:
        """One line per run of the compiler, written by the compiler itself."""
        return self.folder / "compiles.log"

    def environment(self, rank: int) -> dict[str, str]:
        """The variables that a job's launcher would set for `rank`; an empty value means: not set."""
        host = self.host_dir(self.host_of(rank))
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "PATH": f"{self.compiler_dir}:{os.environ.get('PATH', os.defpath)}",
            "TMPDIR": str(host / "tmp"),
            "TORCH_NEURONX_NEFF_CACHE_DIR": str(host / "neff_cache"),
            "TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR": str(host / "local_cache"),
            "TORCH_NEURONX_NEFF_DISABLE_CACHE": "" if self.built_in_cache else "1",
            "NEFFCACHE_HOST": self.host_name(self.host_of(rank)),
            "NEFFCACHE_URL": self.url or "",
            "NEFFCACHE_JOB": f"demo-{self.name.replace(' ', '-')}",
            "NEFFCACHE_CPU_COMPILER_LOG": str(self.compile_log),
        }


@dataclass
class Outcome:
    """What a scenario gave."""

    scenario: Scenario
    ranks: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def compiles(self) -> int:
        """Runs of the compiler, counted by the compiler."""
        return _lines(self.scenario.compile_log)


def run_fleet(scenario: Scenario, rank_main: RankMain, progress: Callable[[str], None]) -> Outcome:
    """Fork the ranks, let them start together, wait for all. Raises DemoFailed with the rank's own log."""
    for host in range(scenario.hosts):
        (scenario.host_dir(host) / "tmp").mkdir(parents=True)
    outcome = Outcome(scenario)
    gate_read, gate_write = os.pipe()
    with _reaped() as pids:
        with _no_stop_signals():
            for rank in range(scenario.ranks):
                pid = os.fork()
                if pid == 0:
                    os.close(gate_write)
                    _child(scenario, rank, gate_read, rank_main)
                pids[pid] = rank
        os.close(gate_read)
        started = time.monotonic()
        os.close(gate_write)
        for done, _rank in enumerate(_finished(scenario, pids), start=1):
            progress(
                f"{scenario.name}: {done} of {scenario.ranks} ranks done, "
                f"{_lines(scenario.compile_log)} compiles, {time.monotonic() - started:.0f} s"
            )
        outcome.seconds = time.monotonic() - started
    outcome.ranks = [json.loads((scenario.folder / f"rank{r:03d}.json").read_text()) for r in range(scenario.ranks)]
    return outcome


def _child(scenario: Scenario, rank: int, gate: int, rank_main: RankMain) -> None:
    """The rank's whole life. Never returns into the parent's code, whatever happens."""
    code = 1
    try:
        for number in _STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
        log = os.open(scenario.folder / f"rank{rank:03d}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        for name, value in scenario.environment(rank).items():
            if value:
                os.environ[name] = value
            else:
                os.environ.pop(name, None)
        figures = rank_main(scenario, rank, gate)
        path = scenario.folder / f"rank{rank:03d}.json"
        path.with_suffix(".tmp").write_text(json.dumps(figures))
        path.with_suffix(".tmp").rename(path)
        code = 0
    except BaseException:  # the traceback belongs in the rank's log, and the parent says where that is
        import traceback

        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _finished(scenario: Scenario, pids: dict[int, int]) -> Iterator[int]:
    """Ranks as they end. Raises DemoFailed on the first that failed."""
    while pids:
        pid, status = os.wait()
        rank = pids.pop(pid, None)
        if rank is None:
            continue
        if status:
            log = (scenario.folder / f"rank{rank:03d}.log").read_text(errors="replace")
            raise DemoFailed(
                f"{scenario.name}: rank {rank} ended with {os.waitstatus_to_exitcode(status)}; "
                f"its log ends:\n{log[-3000:]}"
            )
        yield rank


@contextmanager
def _no_stop_signals() -> Iterator[None]:
    """Hold Ctrl-C back. Raised inside one of Python's hooks around a fork, it would be printed and forgotten."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)


@contextmanager
def _reaped() -> Iterator[dict[int, int]]:
    """Pids that are killed and waited for when the block is left early, Ctrl-C included."""
    pids: dict[int, int] = {}
    try:
        yield pids
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)


def _lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0
