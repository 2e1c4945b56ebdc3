"""A fleet under a killer: 64 clients, 200 graphs, and every second something dies.

    python benchmarks/soak.py [--seconds 600] [--json FILE]

A client is a process with a node cache; eight of them share a host's folders. Graphs appear one after the other, as
in a job that goes on, and clients mostly ask for the newest. Compilers only wait and write, and every compile of a
graph makes another file with the same program in it. Once a second the killer takes a client (SIGKILL), the server
(SIGKILL and a restart, or SIGSTOP for a while) or a blob in the store (removed, or a byte of it flipped).

Counted: wrong programs, failed requests, published artifacts that are lost, and compiles beyond one per graph and
kill, whether under a lease or without one while the server could not be used. Exit code 1 when a promise is broken.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from neffcache_client.errors import NeffcacheError  # noqa: E402
from neffcache_client.neff import extract_members, pack_neff  # noqa: E402
from support.server import ServerProcess, running_server  # noqa: E402

HOSTS = 8
TTL = 5.0
SLOW_SECONDS = 15.0
SERVER = {"NEFFCACHE_SERVER_TTL_SECONDS": str(TTL), "NEFFCACHE_SERVER_PROVISIONAL_SECONDS": "3"}
COMPILE_SECONDS = (0.2, 2.0)
THINK_SECONDS = (0.5, 4.0)
NEWEST = 12
VERSION = "2.23.6484.0+3b612583"
LOCAL_BYTES = 30 * 22_000


@dataclass
class Figures:
    """What a soak came to."""

    seconds: float = 0.0
    clients: int = 0
    graphs: int = 0
    requests: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    kills: dict[str, int] = field(default_factory=dict)
    leased_compiles: int = 0
    other_compiles: int = 0
    wrong_bytes: int = 0
    failed_requests: int = 0
    artifacts_published: int = 0
    artifacts_lost: int = 0
    longest_request_seconds: float = 0.0
    slow: list[dict[str, Any]] = field(default_factory=list)
    """Requests of more than SLOW_SECONDS, with what the client said meanwhile."""
    trouble: list[str] = field(default_factory=list)

    @property
    def kept(self) -> bool:
        """Every promise was."""
        broken = self.wrong_bytes + self.failed_requests + self.artifacts_lost
        compiles = self.leased_compiles + self.other_compiles
        return not broken and self.requests > 0 and compiles <= self.graphs + sum(self.kills.values())


def key_of(graph: int) -> str:
    return hashlib.sha256(f"graph {graph}".encode()).hexdigest()


def program_of(key: str) -> bytes:
    """What every compile of that key comes to."""
    return hashlib.shake_256(key.encode()).digest(20_000)


def append(path: Path, **fields: Any) -> None:
    """A line that no other process tears."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(fd, json.dumps(fields).encode() + b"\n")
    os.close(fd)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# A client


class Client:
    """Asks for graphs until the file `stop` is there."""

    def __init__(self, folder: Path, url: str, number: int, graphs: int, seconds: float) -> None:
        self.folder, self.number, self.graphs, self.seconds = folder, number, graphs, seconds
        host = folder / f"host{number % HOSTS}"
        host.mkdir(parents=True, exist_ok=True)
        self.private = host / f"client{number}-{os.getpid()}"
        self.private.mkdir()
        os.environ["NEFFCACHE_HOST"] = host.name
        self.env = {
            "NEFFCACHE_URL": url,
            "NEFFCACHE_JOB": "soak",
            "RANK": str(number),
            "NEFFCACHE_LOCAL_MAX_BYTES": str(LOCAL_BYTES),
            "TORCH_NEURONX_NEFF_CACHE_DIR": str(host / "cache"),
            "TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR": str(host / "locks"),
        }
        self.log: list[str] = []

    def run(self) -> None:
        began = float((self.folder / "began").read_text())
        while not (self.folder / "stop").exists():
            shown = int((time.time() - began) / self.seconds * self.graphs) + 1
            shown = min(shown, self.graphs)
            oldest = max(0, shown - NEWEST) if random.random() < 0.8 else 0
            self.ask(key_of(random.randrange(oldest, shown)))
            time.sleep(random.uniform(*THINK_SECONDS))

    def ask(self, key: str) -> None:
        from neffcache_client.node_cache import NodeCache
        from neffcache_client.settings import ClientSettings

        self.key, self.log = key, []
        output = self.private / "out.neff"
        output.unlink(missing_ok=True)
        cache = NodeCache(ClientSettings.from_env(self.env), log=self.log.append, abort=threading.Event())
        began = time.monotonic()
        outcome: dict[str, Any] = {}
        try:
            got = cache.obtain(
                key, {}, output=str(output), compile=self.compile, expect_version=VERSION, expect_target="trn2"
            )
            right = extract_members(output, ["program"])["program"] == program_of(key) if got.exit_code == 0 else None
            outcome = {"verdict": got.verdict, "reason": got.reason, "exit": got.exit_code, "right": right}
        except (NeffcacheError, OSError) as exc:
            outcome = {"verdict": "raised", "reason": repr(exc), "exit": 1, "right": None}
        seconds = time.monotonic() - began
        if seconds > SLOW_SECONDS:
            outcome["log"] = self.log
        append(self.folder / "requests", key=key, seconds=seconds, **outcome)

    def compile(self, view: Any) -> Any:
        from neffcache_client.node_cache import CompileResult

        leased = any("compiling it here" in line for line in self.log)
        append(self.folder / "compiles", key=self.key, leased=leased, at=time.time())
        seconds = random.uniform(*COMPILE_SECONDS)
        time.sleep(seconds)
        members = {
            "info.json": json.dumps({"tool_version": VERSION, "name": "file.neff", "num_tpb": 1}).encode(),
            "kelf-0.json": b'{"target": "cayman"}',
            "program": program_of(self.key),
        }
        private = self.private / "compiled.neff"
        private.write_bytes(pack_neff(members, uuid=os.urandom(16)))
        return CompileResult(exit_code=0, kind="ok", output=str(private), seconds=seconds)


# The killer


class Soak:
    """All of it."""

    def __init__(self, folder: Path, *, seconds: float, clients: int, graphs: int, seed: int) -> None:
        self.folder, self.seconds, self.clients, self.graphs = folder, seconds, clients, graphs
        self.random = random.Random(seed)
        self.kills: Counter[str] = Counter()
        self.spoiled: set[str] = set()
        self.running: list[subprocess.Popen[bytes]] = []

    def run(self) -> Figures:
        with running_server(self.folder / "server", env=SERVER) as server:
            (self.folder / "began").write_text(str(time.time()))
            self.running = [self.start(server.url, n) for n in range(self.clients)]
            ends = time.monotonic() + self.seconds
            while time.monotonic() < ends:
                next_kill = time.monotonic() + 1.0
                self.strike(server)
                time.sleep(max(0.0, next_kill - time.monotonic()))
            (self.folder / "stop").touch()
            crashed = [client.wait(180) for client in self.running]
            figures = self.count(server)
        figures.trouble += [f"client {n} ended with {code}" for n, code in enumerate(crashed) if code]
        figures.failed_requests += sum(code != 0 for code in crashed)
        return figures

    def start(self, url: str, number: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(Path(__file__).resolve()), "--client", str(number), "--url", url]
        command += ["--folder", str(self.folder), "--graphs", str(self.graphs), "--seconds", str(self.seconds)]
        with (self.folder / "clients.log").open("ab") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def strike(self, server: ServerProcess) -> None:
        what = self.random.choices(
            ("client", "server killed", "server stopped", "blob removed", "blob damaged"), (78, 3, 3, 8, 8)
        )[0]
        if what == "client":
            number = self.random.randrange(self.clients)
            self.running[number].kill()
            self.running[number].wait()
            self.running[number] = self.start(server.url, number)
        elif what == "server killed":
            server.kill()
            time.sleep(self.random.uniform(0.0, 2.0))
            server.start()
        elif what == "server stopped":
            server.pause()
            time.sleep(self.random.uniform(0.5, 1.5 * TTL))
            server.resume()
        elif not self.spoil(server, what):
            return
        self.kills[what] += 1

    def spoil(self, server: ServerProcess, what: str) -> bool:
        blobs = [p for p in (server.data_dir / "blobs" / "default").glob("??/*") if p.is_file()]
        if not blobs:
            return False
        blob = self.random.choice(blobs)
        self.spoiled.add(blob.name)
        try:
            if what == "blob removed":
                blob.unlink()
            else:
                data = bytearray(blob.read_bytes())
                data[self.random.randrange(1024, len(data))] ^= 1
                blob.write_bytes(data)
        except OSError:
            return False
        return True

    def count(self, server: ServerProcess) -> Figures:
        requests, compiles = lines(self.folder / "requests"), lines(self.folder / "compiles")
        asked = {r["key"] for r in requests} | {c["key"] for c in compiles}
        bad = [r for r in requests if r["exit"] != 0]
        published = {r["key"] for r in requests if r["verdict"] == "compiled" and r["reason"] is None}
        leased = sum(c["leased"] for c in compiles)
        lost, wrong = self.lost(server, published)
        return Figures(
            seconds=self.seconds,
            clients=self.clients,
            graphs=len(asked),
            requests=len(requests),
            verdicts=dict(Counter(r["verdict"] for r in requests)),
            reasons=dict(Counter(str(r["reason"]) for r in requests if r["reason"])),
            kills=dict(self.kills),
            leased_compiles=leased,
            other_compiles=len(compiles) - leased,
            wrong_bytes=sum(r["right"] is False for r in requests) + wrong,
            failed_requests=len(bad),
            artifacts_published=len(published),
            artifacts_lost=lost,
            longest_request_seconds=round(max((r["seconds"] for r in requests), default=0.0), 1),
            slow=[{n: r[n] for n in ("seconds", "verdict", "reason", "log")} for r in requests if "log" in r][:20],
            trouble=[f"{r['key'][:12]}: {r['verdict']} {r['reason']}" for r in bad[:20]],
        )

    def lost(self, server: ServerProcess, published: set[str]) -> tuple[int, int]:
        """(published artifacts that are gone though nobody took their blob, wrong ones) as a late host finds them."""
        from neffcache_client.node_cache import NodeCache
        from neffcache_client.settings import ClientSettings

        late = self.folder / "late"
        env = {
            "NEFFCACHE_URL": server.url,
            "NEFFCACHE_MODE": "require",
            "TORCH_NEURONX_NEFF_CACHE_DIR": str(late / "cache"),
            "TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR": str(late / "locks"),
        }
        cache = NodeCache(ClientSettings.from_env(env), log=lambda line: None, abort=threading.Event())
        lost = wrong = 0
        for key in sorted(published):
            served = self.serving(server, key)
            got = cache.obtain(
                key,
                {},
                output=str(self.folder / "late.neff"),
                compile=lambda view: None,  # type: ignore[arg-type,return-value]  # `require` compiles nothing
                expect_version=VERSION,
                expect_target="trn2",
            )
            if got.exit_code != 0:
                lost += served is None or served not in self.spoiled
            else:
                wrong += extract_members(self.folder / "late.neff", ["program"])["program"] != program_of(key)
        return lost, wrong

    def serving(self, server: ServerProcess, key: str) -> str | None:
        """The digest that the key has, served or withdrawn."""
        import httpx

        answer = httpx.get(f"{server.url}/v1/ns/default/entries/{key}", timeout=30)
        return str(answer.json()["sha256"]) if answer.status_code == 200 else None


def soak(folder: Path, *, seconds: float, clients: int = 64, graphs: int = 200, seed: int = 1) -> Figures:
    """Run one in `folder`."""
    return Soak(folder, seconds=seconds, clients=clients, graphs=graphs, seed=seed).run()


def main() -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--graphs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    for inner in ("--client", "--url", "--folder"):
        parser.add_argument(inner, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client is not None:
        Client(Path(args.folder), args.url, int(args.client), args.graphs, args.seconds).run()
        return 0
    with tempfile.TemporaryDirectory(prefix="neffcache-soak-", ignore_cleanup_errors=True) as folder:
        figures = soak(Path(folder), seconds=args.seconds, clients=args.clients, graphs=args.graphs, seed=args.seed)
    text = json.dumps({**asdict(figures), "kept": figures.kept}, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    return 0 if figures.kept else 1


if __name__ == "__main__":
    sys.exit(main())
