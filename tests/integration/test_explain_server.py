"""Why a key missed, asked of the server's parts and of a real server."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from neffcache_client import wire
from neffcache_client.api import CacheClient
from neffcache_client.cli.main import main
from neffcache_client.errors import RequestRefused
from neffcache_client.graph_summary import GraphSummary, Op, encode
from neffcache_client.settings import ClientSettings
from neffcache_server.database.models import graphs
from neffcache_server.explain import repository
from neffcache_server.explain.repository import ExplainRepository, shape_of
from neffcache_server.problems import JobUnknown, KeyAmbiguous, KeyUnknown
from sqlalchemy import event, insert
from support.cache_state import StoppedClock, neff, opened_state, present, rows, upload
from support.cache_state import lease_id as lease
from support.server import ServerProcess, running_server

OLD, NEW = "2.26.6360.0+6f180f47", "2.23.6484.0+3b612583"


def factors(graph: str, *, compiler: str = OLD, level: str = "1", **more: Any) -> dict[str, Any]:
    return {
        "recipe": 1,
        "ir": {"kind": "mlir", "canonicaliser": "mlir-text-1", "digest": graph * 64},
        "compiler": {"version": compiler, "digest": compiler[-1] * 64, "kind": "wheel"},
        "target": "trn2",
        "options": {"known": [["optlevel", level]], "unknown": [], "environment": []},
        **more,
    }


def graph(constant: str, extra: int = 0) -> str:
    """A summary of a small model that differs by one constant, and by `extra` operations."""
    body = [("func.func", "f"), ("stablehlo.constant", constant), *[("stablehlo.add", "a")] * (84 + extra)]
    counts = {name: sum(n == name for n, _ in body) for name, _ in body}
    ops = [
        Op(name, digest, "", "model/train.py", 30 + n, f'%{n} = "{name}"() {digest}')
        for n, (name, digest) in enumerate(body)
    ]
    return encode(GraphSummary("mlir", counts, ops))


async def acquire(
    state: Any,
    key: str,
    number: int,
    *,
    host: str = "h0",
    job: str | None = None,
    rank: int | None = None,
    **given: Any,
) -> wire.AcquireAnswer:
    holder = wire.Holder(host=host, boot=f"boot-{host}", pid=number, job=job, rank=rank)
    request = wire.AcquireRequest(lease_id=lease(number), holder=holder, **given)
    answer: wire.AcquireAnswer = await state.leases.acquire("default", key, request, present)
    return answer


class Fleet:
    """Ranks that ask the server's own parts, one after the other."""

    def __init__(self, state: Any, clock: StoppedClock) -> None:
        self.state = state
        self.clock = clock
        self.number = 0

    async def miss(
        self, key: str, parts: dict[str, Any], summary: str | None = None, *, publish: bool = True, **holder: Any
    ) -> None:
        """Ask, describe the graph, and publish."""
        self.number += 1
        self.clock.value += 1
        answer = await acquire(self.state, key, self.number, factors=parts, **holder)
        assert answer.state == "leased"
        if summary is not None:
            await self.state.explain.keep_summary("default", key, summary)
        self.clock.value += 1
        if not publish:
            await self.state.leases.release("default", lease(self.number))
            return
        data = neff(key[:4])
        sha256 = await upload(self.state, self.number, data)
        request = wire.PublishRequest(sha256=sha256, size=len(data), compile_seconds=3.0)
        await self.state.publishing.publish("default", lease(self.number), request)


def with_fleet(folder: Path, act: Any) -> Any:
    async def run() -> Any:
        clock = StoppedClock()
        async with opened_state(folder, clock) as state:
            return await act(Fleet(state, clock))

    return asyncio.run(run())


def test_a_miss_is_explained_although_nothing_was_published(tmp_path: Path) -> None:
    """UC-07: the new compiler's lease ended without a result; the nearest stored key has the old compiler."""

    async def act(fleet: Fleet) -> Any:
        await fleet.miss("a" * 64, factors("1"), job="old")
        await fleet.miss("b" * 64, factors("2"), job="old")
        await fleet.miss("c" * 64, factors("1", compiler=NEW), job="new", publish=False)
        return await fleet.state.explain.explain("default", "c" * 8)

    found = with_fleet(tmp_path, act)
    assert found.key.state == "absent"
    assert found.nearest.key == "a" * 64
    assert found.text == f"It differs from the nearest stored key: compiler {NEW} here, {OLD} there."
    assert [(m.host, m.job) for m in found.misses] == [("h0", "new")]


def test_a_changed_constant_is_named_with_its_line(tmp_path: Path) -> None:
    async def act(fleet: Fleet) -> Any:
        await fleet.miss("a" * 64, factors("1"), graph("0"))
        await fleet.miss("b" * 64, factors("2"), graph("0", extra=3))
        await fleet.miss("c" * 64, factors("3"), graph("64"))
        return await fleet.state.explain.explain("default", "c" * 64)

    found = with_fleet(tmp_path, act)
    assert found.nearest.key == "a" * 64
    assert found.graph.differing == 1
    assert (found.graph.first.here.number, found.graph.first.here.where) == (2, "model/train.py:31")
    assert found.graph.first.here.text.endswith("64")
    assert found.graph.first.there.text.endswith("0")


def test_what_was_stored_at_the_time_comes_before_what_a_sibling_stored_since(tmp_path: Path) -> None:
    async def act(fleet: Fleet) -> Any:
        await fleet.miss("a" * 64, factors("1"), graph("0"))
        await fleet.miss("b" * 64, factors("2", compiler=NEW), graph("64"), job="new")
        await fleet.miss("c" * 64, factors("1", compiler=NEW), graph("0"), job="new")
        first = await fleet.state.explain.explain("default", "b" * 64)
        return first, await fleet.state.explain.explain_job("default", "new")

    first, job = with_fleet(tmp_path, act)
    assert first.nearest.key == "a" * 64
    assert [(c.text, len(c.keys)) for c in job.causes] == [
        (f"compiler {NEW} here, {OLD} there", 1),
        (f"compiler {NEW} here, {OLD} there; the graph itself", 1),
    ]


def test_near_identical_graphs_of_a_job_are_one_group(tmp_path: Path) -> None:
    """UC-06: rank 0, rank 1 and ranks 2+3 ask for three variants that differ in one constant."""

    async def act(fleet: Fleet) -> Any:
        for key, constant, rank in (("a", "0", 0), ("b", "64", 1), ("c", "128", 2)):
            await fleet.miss(key * 64, factors(key), graph(constant), job="llama", rank=rank)
        await fleet.miss("d" * 64, factors("d"), graph("0", extra=40), job="llama", rank=3, publish=False)
        answer = await acquire(fleet.state, "d" * 64, 90, factors=factors("d"), job="llama", rank=3)
        assert answer.state == "leased"
        waiting = await acquire(fleet.state, "d" * 64, 91, factors=factors("d"), job="llama", rank=2, host="h1")
        assert waiting.state == "busy"
        return await fleet.state.explain.explain_job("default", "llama")

    job = with_fleet(tmp_path, act)
    assert (job.ranks, job.keys) == (4, 4)
    variants, single = job.groups
    assert variants.text == "differ in constant %1 of op 2 (model/train.py:31)"
    assert [(v.key.key[0], v.ranks) for v in variants.variants] == [("a", [0]), ("b", [1]), ("c", [2])]
    assert [v.detail.rpartition(" ")[2] for v in variants.variants] == ["0", "64", "128"]
    assert (single.text, single.variants[0].ranks, single.variants[0].hosts) == ("", [2, 3], ["h0", "h1"])


def test_one_graph_under_two_settings_is_one_group(tmp_path: Path) -> None:
    async def act(fleet: Fleet) -> Any:
        await fleet.miss("a" * 64, factors("1"), job="j", rank=0)
        await fleet.miss("b" * 64, factors("1", level="2"), job="j", rank=1)
        return await fleet.state.explain.explain_job("default", "j")

    (group,) = with_fleet(tmp_path, act).groups
    assert group.text == "differ in option optlevel"


def test_a_reader_who_may_not_compile_is_explained_too(tmp_path: Path) -> None:
    """Nobody was granted a lease, so nobody but the asker ever told the factors."""

    async def act(fleet: Fleet) -> Any:
        await fleet.miss("a" * 64, factors("1"))
        answer = await acquire(fleet.state, "b" * 64, 50, factors=factors("1", level="2"), can_compile=False, job="r")
        assert answer.state == "busy"
        return await fleet.state.explain.explain("default", "b" * 64)

    found = with_fleet(tmp_path, act)
    assert found.text == "It differs from the nearest stored key: option -O2 here, -O1 there."
    assert [m.job for m in found.misses] == ["r"]


def test_the_first_key_of_a_namespace_has_nothing_to_be_compared_with(tmp_path: Path) -> None:
    async def act(fleet: Fleet) -> Any:
        await fleet.miss("a" * 64, factors("1"))
        return await fleet.state.explain.explain("default", "a" * 64)

    assert with_fleet(tmp_path, act).nearest is None


def test_unknown_and_ambiguous_keys_and_jobs_are_told_apart(tmp_path: Path) -> None:
    async def act(fleet: Fleet) -> None:
        await fleet.miss("a" * 63 + "0", factors("1"))
        await fleet.miss("a" * 63 + "1", factors("2"))
        with pytest.raises(KeyUnknown):
            await fleet.state.explain.explain("default", "b" * 8)
        with pytest.raises(KeyAmbiguous):
            await fleet.state.explain.explain("default", "a" * 8)
        with pytest.raises(KeyUnknown):
            await fleet.state.explain.explain("other", "a" * 8)
        with pytest.raises(KeyUnknown):
            await fleet.state.explain.keep_summary("default", "b" * 64, graph("0"))
        with pytest.raises(JobUnknown):
            await fleet.state.explain.explain_job("default", "nobody")

    with_fleet(tmp_path, act)


def test_what_is_old_is_forgotten_but_the_factors(tmp_path: Path) -> None:
    async def act(fleet: Fleet) -> Any:
        await fleet.miss("a" * 64, factors("1"), graph("0"), job="old")
        fleet.clock.value += 100
        await fleet.miss("b" * 64, factors("1", level="2"), graph("0"), job="new")
        async with fleet.state.database.write() as db:
            await ExplainRepository(fleet.state.database).purge(db, 50.0)
        return await fleet.state.explain.explain("default", "b" * 64)

    assert with_fleet(tmp_path, act).nearest.key == "a" * 64
    assert rows(tmp_path, "select job from misses") == [("new",)]
    assert rows(tmp_path, "select key from graphs where summary is not null") == [("b" * 64,)]


def test_looking_for_the_nearest_key_scans_nothing(tmp_path: Path) -> None:
    """Among many keys: every statement goes along an index, and few rows come back."""
    seen: list[str] = []

    async def act(fleet: Fleet) -> Any:
        parts = factors("1")
        counts = {"stablehlo.add": 84}
        row = {"namespace": "default", "settings": "s", "seen_at": 1.0, "ir_shape": shape_of(counts)}
        many = [{**row, "key": f"{n:064x}", "ir_digest": f"{n:064x}", "ir_ops": n} for n in range(5000)]
        async with fleet.state.database.write() as db:
            await db.execute(insert(graphs), many)
        await fleet.miss("a" * 64, parts, graph("0"), job="j")
        engine = fleet.state.database._reader.sync_engine
        event.listen(engine, "before_cursor_execute", lambda c, cur, text, p, ctx, many: seen.append(text))
        await fleet.state.explain.explain("default", "a" * 64)
        await fleet.state.explain.explain_job("default", "j")
        async with fleet.state.database.read() as db:
            return await ExplainRepository(fleet.state.database).neighbours(db, "default", "a" * 64)

    assert 0 < len(with_fleet(tmp_path, act)) <= 5 * repository._PER_INDEX
    connection = sqlite3.connect(tmp_path / "neffcache.sqlite3")
    statements = [text for text in seen if text.startswith("SELECT")]
    assert len(statements) > 10
    for text in statements:
        plan = connection.execute(f"EXPLAIN QUERY PLAN {text}", [None] * text.count("?")).fetchall()
        assert not [step for *_, step in plan if step.startswith("SCAN") or "TEMP B-TREE" in step], (text, plan)
    connection.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def client(server: ServerProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[CacheClient]:
    monkeypatch.setenv("NEFFCACHE_URL", server.url)
    monkeypatch.setenv("NEFFCACHE_NAMESPACE", tmp_path.name.lower().replace("_", "-")[-30:].strip("-"))
    monkeypatch.setenv("TORCH_NEURONX_NEFF_CACHE_DIR", str(tmp_path / "cache"))
    with CacheClient(ClientSettings.from_env()) as client:
        yield client


def ask(client: CacheClient, key: str, number: int, parts: dict[str, Any], **holder: Any) -> wire.AcquireAnswer:
    who = wire.Holder(host="trn-3", boot="b", pid=number, **holder)
    return client.acquire(key, wire.AcquireRequest(lease_id=f"{number:032x}", holder=who, factors=parts))


def test_the_command_explains_a_key_by_its_first_digits(
    client: CacheClient, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(client, "a1" * 32, 0xA1, factors("1"), job="one", rank=0)
    ask(client, "b1" * 32, 0xB1, factors("2", level="2"), job="two", rank=3)
    for key, constant in (("a1", "0"), ("b1", "64")):
        client.keep_summary(key * 32, wire.SummaryRequest(summary=graph(constant)))
    assert main(["explain", "B1B1B1B1"]) == 0
    said = capsys.readouterr().out
    assert "b1" * 32 in said
    assert "rank 3 on trn-3, job two" in said
    assert "option -O2 here, -O1 there; the graph (the same 86 operations, 1 of them not equal)" in said
    assert "op 2, stablehlo.constant, model/train.py:31" in said
    assert main(["explain", "b1b1b1b1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nearest"]["key"] == "a1" * 32


def test_the_command_groups_the_variants_of_a_job(client: CacheClient, capsys: pytest.CaptureFixture[str]) -> None:
    """UC-06."""
    for rank, (key, constant) in enumerate((("a2", "0"), ("b2", "64"), ("c2", "128"))):
        ask(client, key * 32, 0xA20 + rank, factors(str(rank)), job="llama", rank=rank)
        client.keep_summary(key * 32, wire.SummaryRequest(summary=graph(constant)))
    ask(client, "c2" * 32, 0xA29, factors("2"), job="llama", rank=3)  # is told to wait
    assert main(["explain", "--job", "llama"]) == 0
    said = capsys.readouterr().out
    assert "4 ranks, 3 variants, 86 operations: differ in constant %1 of op 2 (model/train.py:31)" in said
    assert [line.split()[:2] for line in said.splitlines() if line.startswith(("a2", "b2", "c2"))] == [
        ["c2" * 8, "2-3"],
        ["a2" * 8, "0"],
        ["b2" * 8, "1"],
    ]


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["explain"], 2, "name a key, or a job"),
        (["explain", "ab" * 4, "--job", "x"], 2, "name a key, or a job"),
        (["explain", "xyz"], 2, "is no key"),
        (["explain", "abcdef"], 2, "8 to 64 hex digits"),
        (["explain", "deadbeef"], 1, "Nobody has asked for that key"),
        (["explain", "--job", "nobody"], 1, "No miss of that job is known"),
    ],
)
def test_a_question_without_an_answer_is_answered_in_a_sentence(
    client: CacheClient, capsys: pytest.CaptureFixture[str], argv: list[str], code: int, said: str
) -> None:
    assert main(argv) == code
    assert said in capsys.readouterr().err


def test_a_damaged_summary_is_refused(client: CacheClient) -> None:
    ask(client, "a3" * 32, 0xA3, factors("1"))
    with pytest.raises(RequestRefused, match="no summary of a graph"):
        client.keep_summary("a3" * 32, wire.SummaryRequest(summary="AAAA"))


def test_a_slow_summary_holds_nobody_up(server: ServerProcess, tmp_path: Path) -> None:
    """The NEFF is there and the lease is over although the summary never comes."""
    from support.node import KEY, VERSION, Node

    node = Node(tmp_path / "host", server.url, NEFFCACHE_NAMESPACE="slow")
    never = threading.Event()

    def summarise() -> str | None:
        never.wait(120)
        return None

    got = node.cache.obtain(
        KEY,
        {"recipe": 1},
        output=str(node.output()),
        compile=node.compile,
        expect_version=VERSION,
        expect_target="trn2",
        summarise=summarise,
    )
    never.set()
    assert (got.verdict, got.exit_code) == ("compiled", 0)
    assert any(line.startswith(f"miss {KEY[:16]}") for line in node.log)
