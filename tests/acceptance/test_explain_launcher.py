"""Misses made by hand through the real launcher and a real server, and what `neffcache explain` says of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from neffcache_client.cli.main import main
from support.cache_state import rows
from support.compilers import FakeCompiler
from support.launchers import Host
from support.server import ServerProcess, running_server
from support.waiting import wait_until

GRAPH = """\
module @train {{
  func.func @main(%x: tensor<{batch}x64xf32>) -> tensor<{batch}x64xf32> {{
    %c = stablehlo.constant dense<{scale}> : tensor<f32>
    %b = stablehlo.broadcast_in_dim %c, dims = [] : (tensor<f32>) -> tensor<{batch}x64xf32>
    %y = stablehlo.multiply %x, %b : tensor<{batch}x64xf32>
    return %y : tensor<{batch}x64xf32>
  }}
}}
"""


def graph(scale: str = "0.5", batch: int = 8) -> bytes:
    return GRAPH.format(scale=scale, batch=batch).encode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("server")) as server:
        yield server


class Site:
    """A new host for every compile, all of them in one namespace."""

    def __init__(self, folder: Path, server: ServerProcess, namespace: str) -> None:
        self.folder = folder
        self.server = server
        self.namespace = namespace
        self.compiler = FakeCompiler(folder / "compiler", gate=folder / "gate")
        self.hosts = 0

    def described(self) -> int:
        """How many summaries the server has."""
        where = f"namespace = '{self.namespace}' and summary is not null"
        return int(rows(self.server.data_dir, f"select count(*) from graphs where {where}")[0][0])

    def miss(
        self, *options: str, data: bytes = b"", compiler: FakeCompiler | None = None, job: str = "j", **env: str
    ) -> str:
        """Compile on a new host; the key's first digits as the launcher's log has them."""
        self.hosts += 1
        gate = self.folder / "gate"
        gate.unlink(missing_ok=True)
        before = self.described()
        host = Host(
            self.folder / f"host{self.hosts}",
            compiler or self.compiler,
            self.server.url,
            NEFFCACHE_NAMESPACE=self.namespace,
            NEFFCACHE_JOB=job,
            **env,
        )
        started = host.start(*options, graph=data or graph())
        # The compiler ends when the graph has been described: as long as real ones take, that is always so.
        wait_until(lambda: self.described() > before, what="the summary arrives while the compiler runs")
        gate.touch()
        assert started.finish().exit_code == 0
        found = re.search(r"miss ([0-9a-f]{16}), compiling it here; why: neffcache explain \1", host.log())
        assert found is not None, host.log()
        return found.group(1)


@pytest.fixture
def site(tmp_path: Path, server: ServerProcess, request: pytest.FixtureRequest) -> Site:
    return Site(tmp_path, server, f"n{abs(hash(request.node.name)) % 10**12}")


@pytest.fixture
def explain(site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    monkeypatch.setenv("NEFFCACHE_URL", site.server.url)
    monkeypatch.setenv("NEFFCACHE_NAMESPACE", site.namespace)
    monkeypatch.setenv("TORCH_NEURONX_NEFF_CACHE_DIR", str(site.folder / "nowhere"))

    def explain(*words: str) -> str:
        assert main(["explain", *words]) == 0
        return capsys.readouterr().out

    return explain


def test_another_compiler_version(site: Site, explain: Callable[..., str]) -> None:
    """UC-12"""
    site.miss()
    other = FakeCompiler(site.folder / "other", gate=site.folder / "gate", version="2.26.6360.0+6f180f47")
    said = explain(site.miss(compiler=other))
    assert "nearest stored key: compiler 2.26.6360.0+6f180f47 here, 2.99.1.0+0123abcd there." in said
    assert "The same on both sides: graph, target" in said


def test_another_optimisation_level(site: Site, explain: Callable[..., str]) -> None:
    """UC-08"""
    site.miss()
    assert "nearest stored key: option -O1 -O2 here, -O1 there." in explain(site.miss("-O2"))


def test_another_constant(site: Site, explain: Callable[..., str]) -> None:
    """UC-06"""
    site.miss()
    said = explain(site.miss(data=graph(scale="0.25")))
    assert "nearest stored key: the graph (the same 6 operations, 1 of them not equal)." in said
    assert "op 3, stablehlo.constant, module.mlir:3" in said
    assert "dense<2.500000e-01>" in said
    assert "dense<5.000000e-01>" in said


def test_another_shape(site: Site, explain: Callable[..., str]) -> None:
    site.miss()
    said = explain(site.miss(data=graph(batch=16)))
    assert "the graph (the same 6 operations, 4 of them not equal" in said
    assert "op 4, stablehlo.broadcast_in_dim, module.mlir:4" in said
    assert "tensor<16x64xf32>" in said


def test_other_content_of_a_file_and_another_environment(site: Site, explain: Callable[..., str]) -> None:
    """UC-14, UC-07"""
    schedule = site.folder / "schedule.json"
    schedule.write_text("1")
    option = f"--tensorizer-options=--schedule={schedule}"
    site.miss(option)
    schedule.write_text("2")
    said = explain(site.miss(option, XLA_FLAGS="--xla_x"))
    assert 'nearest stored key: env XLA_FLAGS "--xla_x" here, not set there; file named by an option, content' in said


def test_a_rank_that_only_its_constant_tells_from_the_others(site: Site, explain: Callable[..., str]) -> None:
    """UC-06: four ranks on four hosts, three variants; the launchers say everything there is to know."""
    for rank, scale in enumerate(("0.5", "64.0", "128.0")):
        site.miss(data=graph(scale), job="llama", RANK=str(rank))
    said = explain("--job", "llama")
    assert "3 ranks, 3 variants, 6 operations: differ in constant %0 of op 3 (module.mlir:3)" in said
    assert "dense<6.400000e+01>" in said
