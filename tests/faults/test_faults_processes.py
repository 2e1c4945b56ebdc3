"""Ranks, launchers, compilers and hosts that die, stop or misbehave. Rows of docs/failure-modes.md."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from neffcache_client.api import CacheClient
from neffcache_client.errors import Aborted
from neffcache_client.heartbeat import LeaseView
from neffcache_client.node_cache import CompileResult
from support.backends import Embedded
from support.compilers import Behaviour, FakeCompiler
from support.launchers import Host, Started
from support.node import KEY, QUICK, Node
from support.server import ServerProcess, running_server
from support.waiting import wait_until

TTL = 3.0
SHORT = {"NEFFCACHE_SERVER_TTL_SECONDS": str(TTL), "NEFFCACHE_SERVER_PROVISIONAL_SECONDS": str(TTL)}
PATIENT = replace(QUICK, first_answer=10.0, publish=60.0, outage=60.0, leader=TTL)
NCC_CODES = ["NCC_EOOM001", "NCC_EOOM002", "NCC_EXTP003", "NCC_EXSP001", "NCC_EARG001", "NCC_EVRF051", "NCC_EVRF059"]
RANKS = 64

pytestmark = pytest.mark.usefixtures("backend")


@pytest.fixture(scope="module")
def server(backend: Embedded, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("server"), env=SHORT) as server:
        yield server


@pytest.fixture
def space(request: pytest.FixtureRequest) -> dict[str, str]:
    """A namespace of the test's own."""
    return {"NEFFCACHE_NAMESPACE": f"ns-{abs(hash(request.node.nodeid)):x}"}


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def launcher_of(compiler_pid: int) -> int:
    """compiler -> supervisor -> launcher"""
    return parent(parent(compiler_pid))


def catches(pid: int, number: int) -> bool:
    """Whether that process has a handler for the signal, as a launcher has once it runs."""
    (caught,) = (
        line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt:")
    )
    return bool(int(caught, 16) >> (number - 1) & 1)


# Holders


def test_holder_killed_five_times_under_sixty_four_launchers(
    tmp_path: Path, server: ServerProcess, space: dict[str, str]
) -> None:
    """UC-01: six compiles, sixty-four ranks with the same bytes, and no wait longer than a TTL and a second per kill.

    Of 69 launchers on 8 hosts the five that hold the lease are killed, each while it compiles.
    """
    gate = tmp_path / "gate"
    compiler = FakeCompiler(tmp_path / "compilers", gate=gate)
    hosts = [Host(tmp_path / f"h{n}", compiler, server.url, NEFFCACHE_HOST=f"h{n}", **space) for n in range(8)]
    ranks = [hosts[n % 8].start() for n in range(RANKS + 5)]
    waits = []
    for kill in range(1, 6):
        wait_until(lambda kill=kill: compiler.started == kill, seconds=90)
        holder = launcher_of(compiler.pids[-1])
        assert holder in {rank.process.pid for rank in ranks}
        os.kill(holder, signal.SIGKILL)
        killed_at = time.monotonic()
        wait_until(lambda kill=kill: compiler.started == kill + 1, seconds=90)
        waits.append(time.monotonic() - killed_at)
    gate.touch()
    results = [rank.finish() for rank in ranks]
    killed = [r for r in results if r.exit_code == -signal.SIGKILL]
    served = [r for r in results if r.exit_code == 0]
    assert (len(killed), len(served), compiler.runs) == (5, RANKS, 6)
    assert [r.output for r in killed] == [None] * 5
    assert len({r.output for r in served}) == 1
    # Generous: a launcher starts within a second on an idle machine, and this one may be busy.
    assert max(waits) < TTL + 1 + 20


def test_host_gone(tmp_path: Path, server: ServerProcess, space: dict[str, str]) -> None:
    """UC-01: every process of the host at once; another host goes on after the TTL."""
    gate = tmp_path / "gate"
    compiler = FakeCompiler(tmp_path / "compilers", gate=gate)
    gone, other = (Host(tmp_path / name, compiler, server.url, **space) for name in ("gone", "other"))
    dying = [gone.start() for _ in range(3)]
    wait_until(lambda: compiler.started == 1)
    waiter = other.start()
    wait_until(lambda: "waiting for" in other.log())
    for one in dying:
        one.process.kill()
    wait_until(lambda: compiler.started == 2, seconds=60)
    gate.touch()
    assert waiter.finish().exit_code == 0
    assert compiler.runs == 2
    assert {one.finish().output for one in dying} == {None}


def test_holder_stopped_past_its_ttl(tmp_path: Path, server: ServerProcess, space: dict[str, str]) -> None:
    """UC-01: another host compiles and publishes; the old holder wakes up, keeps its own result, changes nothing."""
    gates = [tmp_path / "a-gate", tmp_path / "b-gate"]
    compiler = FakeCompiler(tmp_path / "compilers")
    first, second = (Behaviour(tmp_path / n, gate=gate) for n, gate in zip("ab", gates, strict=True))
    stopped = Host(tmp_path / "host-a", compiler, server.url, **first.env, **space)
    other = Host(tmp_path / "host-b", compiler, server.url, **second.env, **space)
    holder = stopped.start()
    wait_until(lambda: first.started == 1)
    holder.process.send_signal(signal.SIGSTOP)
    gates[1].touch()
    published = other.compile()
    assert (published.exit_code, second.runs) == (0, 1)
    holder.process.send_signal(signal.SIGCONT)
    gates[0].touch()
    own = holder.finish()
    assert own.exit_code == 0
    assert own.output not in (None, published.output)
    assert "lease was lost" in stopped.log() or "lease_lost" in stopped.log()
    late = Host(tmp_path / "late", compiler, server.url, **second.env, **space).compile()
    assert (late.output, second.runs, first.runs) == (published.output, 1, 1)


def test_leader_of_a_host_stopped(tmp_path: Path, server: ServerProcess, space: dict[str, str]) -> None:
    """A stopped process blocks its host's others for a TTL, not for ever: they ask the server past it."""
    gate = tmp_path / "gate"
    stopped, other = (Node(tmp_path / "host", server.url, patience=PATIENT, **space) for _ in range(2))
    other.private_stem = "other"
    stopped.on_compile = lambda view: wait_until(gate.exists, seconds=90)
    process = multiprocessing.get_context("fork").Process(target=stopped.obtain)
    process.start()
    try:
        wait_until(lambda: any((tmp_path / "host" / "locks").rglob("*.lock")))
        with CacheClient(stopped.settings) as client:
            wait_until(lambda: client.live().leases)
        os.kill(process.pid or 0, signal.SIGSTOP)
        got = other.obtain(output="other.neff")
        assert (got.exit_code, other.compiles) == (0, 1)
    finally:
        process.kill()
        process.join()


def test_long_compile_is_never_robbed(tmp_path: Path, server: ServerProcess, space: dict[str, str]) -> None:
    """UC-12: three TTLs long, with waiters; heartbeats carry the phase and the memory."""
    node = Node(tmp_path / "holder", server.url, patience=PATIENT, **space)
    waiter = Node(tmp_path / "waiter", server.url, patience=PATIENT, **space)
    seen: list[tuple[str | None, int | None]] = []

    def compile_long(view: LeaseView) -> None:
        view.phase = "compiling"
        view.tell(123 << 20)
        with CacheClient(node.settings) as client:
            ends = time.monotonic() + 3 * TTL
            while time.monotonic() < ends:
                seen.extend((lease.phase, lease.rss_bytes) for lease in client.live().leases)
                time.sleep(0.5)

    node.on_compile = compile_long
    results = []
    threads = [threading.Thread(target=lambda n=n: results.append(n.obtain().verdict)) for n in (node, waiter)]
    threads[0].start()
    wait_until(lambda: node.compiles == 1)
    threads[1].start()
    for thread in threads:
        thread.join(90)
    assert (sorted(results), node.compiles + waiter.compiles) == (["compiled", "waited"], 1)
    assert ("compiling", 123 << 20) in seen


def test_job_cancelled_while_sixty_three_wait(tmp_path: Path) -> None:
    """SIGTERM to all 64: each exits 143 and the key is free again within seconds, not after the TTL of 30 s."""
    gate = tmp_path / "gate"
    compiler = FakeCompiler(tmp_path / "compilers", gate=gate, leave_grandchild=True)
    with running_server(tmp_path / "server", env={"NEFFCACHE_SERVER_TTL_SECONDS": "300"}) as server:
        hosts = [Host(tmp_path / f"host{n}", compiler, server.url, NEFFCACHE_HOST=f"host{n}") for n in range(8)]
        ranks: list[Started] = [hosts[n % 8].start() for n in range(RANKS)]
        wait_until(lambda: compiler.started == 1, seconds=90)
        # Before that a signal ends a launcher without its knowing.
        wait_until(lambda: all(catches(rank.process.pid, signal.SIGTERM) for rank in ranks), seconds=90)
        for rank in ranks:
            rank.process.terminate()
        assert {rank.finish().exit_code for rank in ranks} == {143}
        wait_until(lambda: compiler.alive() == [])
        assert compiler.runs == 1
        gate.touch()
        # A grant that no heartbeat confirmed lasts 5 s; the rest is for a busy machine.
        next_job = Host(tmp_path / "next", compiler, server.url).start()
        wait_until(lambda: compiler.started == 2, seconds=30)
        assert next_job.finish().exit_code == 0


@pytest.mark.one_backend("files of the host")
def test_reboot_leaves_locks_behind(tmp_path: Path, server: ServerProcess, space: dict[str, str]) -> None:
    """UC-01: files of another boot block nobody and supersede nothing."""
    node = Node(tmp_path / "host", server.url, **space)
    locks = Path(node.settings.lock_dir) / "neffcache"
    locks.mkdir(parents=True)
    record = '{"boot": "another", "pid": 1, "start": 1, "lease": "' + "ab" * 16 + '"}'
    (locks / f"{node.settings.namespace}-{KEY}.lock").write_text(record)
    (locks / "compiles").mkdir()
    (locks / "compiles" / "1-dead").write_text('{"running": true, "pid": 1}')
    for name in ("module.neff.lock", f"{KEY}.lock"):
        (tmp_path / "host" / name).touch()
    assert (node.obtain().reason, node.warnings()) == (None, [])


# Compilers


ONE_OF_MANY = pytest.mark.one_backend("how the launcher tells compiler errors apart; the first one runs on both")


@pytest.mark.parametrize("code", [NCC_CODES[0], *(pytest.param(code, marks=ONE_OF_MANY) for code in NCC_CODES[1:])])
def test_compiler_error_is_told_to_every_rank(
    tmp_path: Path, server: ServerProcess, space: dict[str, str], code: str
) -> None:
    """UC-02: exit 70 with a code; the other host's rank gets the words, when and where, and runs no compiler."""
    compiler = FakeCompiler(tmp_path / "compilers", exit_code=70, stderr=f"ERROR [{code}] no\n", partial=True)
    first = Host(tmp_path / "a", compiler, server.url, **space).start()
    assert first.finish()[:4] == (70, b"", f"ERROR [{code}] no\n".encode(), None)
    assert first.leftovers() == []
    other = Host(tmp_path / "b", compiler, server.url, **space).compile()
    assert (other.exit_code, other.output, compiler.runs) == (70, None, 1)
    assert f"[{code}] no".encode() in other.stderr
    assert b"served from neffcache: first compiled at" in other.stderr


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"exit_code": 70}, id="exit 70 without a code"),
        pytest.param({"kill_self": 9, "partial": True}, id="killed", marks=ONE_OF_MANY),
        pytest.param(
            {"exit_code": 70, "stderr": "OSError: No space left on device\n"}, id="disk full", marks=ONE_OF_MANY
        ),
        pytest.param({"exit_code": 1, "stderr": "Traceback\n"}, id="crash", marks=ONE_OF_MANY),
    ],
)
def test_compile_that_fails_for_no_reason_of_its_own(
    tmp_path: Path, server: ServerProcess, space: dict[str, str], more: dict[str, object]
) -> None:
    """UC-02, UC-04: tried again on another host, and never kept as the graph's result."""
    compiler, gate = FakeCompiler(tmp_path / "compilers"), tmp_path / "gate"
    bad, good = Behaviour(tmp_path / "bad", gate=gate, **more), Behaviour(tmp_path / "good")
    sick, well = (
        Host(tmp_path / f"host-{name}", compiler, server.url, NEFFCACHE_HOST=name, **how.env, **space)
        for name, how in (("sick", bad), ("well", good))
    )
    first = sick.start()
    wait_until(lambda: bad.started == 1)
    second = well.start()
    wait_until(lambda: "compiled by pid" in well.log())
    gate.touch()
    results = [first.finish(), second.finish()]
    assert [r.exit_code for r in results] == [0, 0]
    assert results[0].output == results[1].output
    assert (bad.runs, good.runs) == (1, 1)


def test_compile_that_fails_everywhere(tmp_path: Path, server: ServerProcess, space: dict[str, str]) -> None:
    """UC-04: after the third failure of the round all ranks are told the same at once."""
    compiler = FakeCompiler(tmp_path / "compilers", exit_code=70, stderr="died\n")
    hosts = [Host(tmp_path / n, compiler, server.url, NEFFCACHE_HOST=n, **space) for n in "abcd"]
    results = [started.finish() for started in [host.start() for host in hosts]]
    assert {r.exit_code for r in results} == {70}
    assert compiler.runs == 3
    assert all(b"died" in r.stderr for r in results)


@pytest.mark.one_backend("the room is the host's; test_killed_for_memory_and_taken_over has the server's part")
def test_compiler_killed_for_memory(tmp_path: Path, server: ServerProcess, space: dict[str, str]) -> None:
    """UC-09: tried once more with twice the estimate, then left to another host; never the graph's result."""
    node = Node(tmp_path / "small", server.url, patience=PATIENT, **space)
    starved = CompileResult(
        exit_code=137, kind="transient", peak_rss_bytes=40 << 30, seconds=1.0, code="F137", out_of_memory=True
    )
    estimates: list[int | None] = []

    def killed(view: LeaseView) -> CompileResult:
        estimates.append(node_room().peak)
        node.compiles += 1
        return starved

    def node_room() -> object:
        from neffcache_client.history import History

        return History(node.settings.tier_dir).expect(KEY, 1000)

    got = node.cache.obtain(
        KEY, {}, output=str(node.output()), compile=killed, expect_version=None, expect_target=None, graph_bytes=1000
    )
    assert (got.verdict, got.exit_code, got.reason, node.compiles) == ("failed", 137, "out_of_memory", 2)
    assert estimates == [None, 60 << 30]
    assert node_room().peak == 120 << 30  # type: ignore[attr-defined]
    large = Node(tmp_path / "large", server.url, patience=PATIENT, **space)
    assert (large.obtain().verdict, large.compiles) == ("compiled", 1)


def test_killed_for_memory_and_taken_over(tmp_path: Path, server: ServerProcess, space: dict[str, str]) -> None:
    """UC-04: the small host's rank gets what the larger host compiles."""
    small, large = (Node(tmp_path / name, server.url, patience=PATIENT, **space) for name in ("small", "large"))
    finish = threading.Event()

    def killed(view: LeaseView) -> CompileResult:
        small.compiles += 1
        if small.compiles == 2:
            large_rank.start()
            wait_until(lambda: any("compiled by pid" in line for line in large.log))
        return CompileResult(exit_code=137, kind="transient", peak_rss_bytes=1 << 30, out_of_memory=True)

    large_rank = threading.Thread(target=large.obtain)
    small.compile = killed  # type: ignore[method-assign]
    large.on_compile = lambda view: (finish.set(), None)[1]
    got = small.obtain()
    large_rank.join(60)
    assert finish.is_set()
    assert (got.verdict, got.exit_code, small.compiles, large.compiles) == ("waited", 0, 2, 1)


def queue(host: Host) -> int:
    """Compiles of a host that run or want to."""
    return len(list((host.root / "local_cache" / "neffcache" / "compiles").glob("*")))


@pytest.mark.one_backend("the queue is the host's")
def test_more_graphs_than_the_host_may_compile(tmp_path: Path, server: ServerProcess, space: dict[str, str]) -> None:
    """UC-04, UC-09: never more compilers than allowed, and all finish."""
    gate = tmp_path / "gate"
    compiler = FakeCompiler(tmp_path / "compilers", gate=gate)
    host = Host(tmp_path / "host", compiler, server.url, NEFFCACHE_HOST_COMPILES="2", **space)
    started = [host.start("--x", str(n)) for n in range(6)]
    wait_until(lambda: queue(host) == 6 and compiler.started == 2, seconds=60)
    assert compiler.runs == 2
    gate.touch()
    assert [one.finish().exit_code for one in started] == [0] * 6
    assert (compiler.runs, queue(host)) == (6, 0)


@pytest.mark.one_backend("there is no server")
def test_no_room_without_a_server_either(tmp_path: Path) -> None:
    """The bound is the host's, whether or not there is a server."""
    gate = tmp_path / "gate"
    compiler = FakeCompiler(tmp_path / "compilers", gate=gate)
    host = Host(tmp_path / "host", compiler, NEFFCACHE_HOST_COMPILES="1")
    started = [host.start("--x", str(n)) for n in range(3)]
    wait_until(lambda: queue(host) == 3 and compiler.started == 1, seconds=60)
    assert compiler.runs == 1
    gate.touch()
    assert [one.finish().exit_code for one in started] == [0] * 3
    assert compiler.runs == 3


def test_lease_that_comes_to_a_host_without_room(
    tmp_path: Path, server: ServerProcess, space: dict[str, str]
) -> None:
    """A waiter whose host is full gives the lease on instead of keeping it in the queue."""
    done = threading.Event()
    other_key = "cd" * 32
    full, waiting = (
        Node(tmp_path / "full", server.url, patience=PATIENT, NEFFCACHE_HOST_COMPILES="1", **space) for _ in range(2)
    )
    holder, free = (Node(tmp_path / name, server.url, patience=PATIENT, **space) for name in ("holder", "free"))
    waiting.private_stem = "waiting"
    full.on_compile = lambda view: (done.wait(60), None)[1]
    holder.on_compile = lambda view: (holder.abort.wait(60), None)[1]
    results: dict[str, str] = {}

    def ask(name: str, node: Node, key: str) -> threading.Thread:
        def work() -> None:
            try:
                results[name] = node.obtain(key, output=f"{name}.neff").verdict
            except Aborted:
                results[name] = "aborted"

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    threads = [ask("holder", holder, KEY)]
    wait_until(lambda: holder.compiles == 1)
    threads.append(ask("waiting", waiting, KEY))
    wait_until(lambda: any("compiled by pid" in line for line in waiting.log))
    threads.append(ask("full", full, other_key))
    wait_until(lambda: full.compiles == 1)
    holder.abort.set()
    # The only one that may compile it now is the host without room.
    wait_until(lambda: any("no room on this host" in line for line in waiting.log))
    threads.append(ask("free", free, KEY))
    wait_until(lambda: "free" in results)
    done.set()
    for thread in threads:
        thread.join(60)
    assert results == {"full": "compiled", "holder": "aborted", "waiting": "waited", "free": "compiled"}
    assert waiting.compiles == 0


@pytest.mark.one_backend("what the launcher finds out before it asks the server for anything")
@pytest.mark.parametrize("change", ["input", "named file"])
def test_input_changed_while_it_is_compiled(
    tmp_path: Path, server: ServerProcess, space: dict[str, str], change: str
) -> None:
    """Nobody knows what the compiler read: the caller gets the result, the cache does not."""
    gate = tmp_path / "gate"
    compiler = FakeCompiler(tmp_path / "compilers", gate=gate)
    host = Host(tmp_path / "host", compiler, server.url, **space)
    options = tmp_path / "options.json"
    options.write_text("1")
    started = host.start(f"--tiling-config={options}")
    wait_until(lambda: compiler.started == 1)
    changed = started.output.parent / "module.hlo.pb" if change == "input" else options
    changed.write_bytes(changed.read_bytes() + b"\n")
    gate.touch()
    assert started.finish().exit_code == 0
    assert "changed while it was compiled" in host.log()
    assert not list(host.tier.glob("artifacts/*/*"))
    with CacheClient(Node(tmp_path / "x", server.url, **space).settings) as client:
        assert client.stats().entries == 0
        assert client.live().leases == []


def test_compiler_that_never_ends(tmp_path: Path, server: ServerProcess, space: dict[str, str]) -> None:
    """Nobody is robbed and nobody hangs for good: the waiters say whom they wait for, and a signal ends it all."""
    compiler = FakeCompiler(tmp_path / "compilers", endless=True, partial=True, leave_grandchild=True)
    a, b = (Host(tmp_path / n, compiler, server.url, NEFFCACHE_JOB="endless", RANK="3", **space) for n in "ab")
    holder = a.start()
    wait_until(lambda: compiler.started == 1)
    waiter = b.start()
    wait_until(lambda: "compiled by pid" in b.log())
    (line,) = (line for line in b.log().splitlines() if "compiled by pid" in line)
    for word in (f"pid {holder.process.pid} on ", "rank 3", "job endless", "for ", "last heartbeat"):
        assert word in line
    for one in (waiter, holder):
        one.process.terminate()
        done = one.finish()
        assert (done.exit_code, done.output, one.leftovers()) == (143, None, [])
    wait_until(lambda: compiler.alive() == [])
    assert compiler.runs == 1


@pytest.mark.one_backend("a line in the waiter's log")
def test_waiting_longer_than_the_vendors_lock(tmp_path: Path, server: ServerProcess, space: dict[str, str]) -> None:
    """UC-12: said before TORCH_NEURONX_NEFF_CACHE_LOCK_TIMEOUT is reached."""
    release = threading.Event()
    holder = Node(tmp_path / "holder", server.url, patience=PATIENT, **space)
    waiter = Node(
        tmp_path / "waiter",
        server.url,
        patience=replace(PATIENT, poll=1.0),
        TORCH_NEURONX_NEFF_CACHE_LOCK_TIMEOUT="4",
        **space,
    )
    holder.on_compile = lambda view: (release.wait(60), None)[1]
    threads = [threading.Thread(target=node.obtain) for node in (holder, waiter)]
    threads[0].start()
    wait_until(lambda: holder.compiles == 1)
    threads[1].start()
    wait_until(lambda: any("TORCH_NEURONX_NEFF_CACHE_LOCK_TIMEOUT is 4 s" in line for line in waiter.log))
    release.set()
    for thread in threads:
        thread.join(60)
    assert len([line for line in waiter.log if "LOCK_TIMEOUT" in line]) == 1


def test_failure_is_passed_over_once_per_job(tmp_path: Path, server: ServerProcess, space: dict[str, str]) -> None:
    """UC-02: 8 ranks that all carry --retry_failed_compilation compile once between them."""
    nodes = [Node(tmp_path / f"h{n}", server.url, patience=PATIENT, NEFFCACHE_JOB="j", **space) for n in range(8)]
    for node in nodes:
        node.result = "deterministic"
    assert nodes[0].obtain().exit_code == 70
    both: list[Callable[[], object]] = [lambda node=node: node.obtain(retry_failed=True) for node in nodes]
    threads = [threading.Thread(target=one) for one in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(node.compiles for node in nodes) == 2
