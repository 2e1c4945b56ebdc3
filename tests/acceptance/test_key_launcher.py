"""The key as the launcher uses it, with real processes."""

from __future__ import annotations

import json
from pathlib import Path

from neffcache_client.neff import check_neff
from support import pinned, wire
from support.compilers import FakeCompiler
from support.launchers import Host
from support.waiting import wait_until

GRAPH = (pinned.CORPUS / "mlp_grad.hlo.pb").read_bytes()


def moved(graph: bytes) -> bytes:
    """The same graph from another checkout, with ten lines inserted above the model."""

    def metadata(field: wire.Field) -> wire.Field:
        number, kind, value = field
        if isinstance(value, bytes):
            return wire.text(3, b"/other" + value) if number == 3 else field
        return (number, kind, value + 10) if number == 4 else field

    def instruction(_: int, fields: wire.Message) -> wire.Message:
        return [
            wire.text(n, wire.encode([metadata(field) for field in wire.decode(value)]))
            if n == wire.METADATA and isinstance(value, bytes)
            else (n, kind, value)
            for n, kind, value in fields
        ]

    fields = [field for field in wire.decode(wire.map_instructions(graph, instruction)) if field[0] not in (1, 17)]
    return wire.encode([*fields, wire.text(1, "jit_step.77")])


def test_two_compilers_over_one_folder_each_serve_their_own_neff(tmp_path: Path) -> None:
    """UC-12: two compiles, and each job gets the NEFF of its own compiler, the second time too."""
    old = FakeCompiler(tmp_path / "old", version="2.23.6484.0+3b612583")
    new = FakeCompiler(tmp_path / "new", version="2.26.6360.0+6f180f47")
    for _ in range(2):
        for compiler in (old, new):
            started = Host(tmp_path / "host", compiler).start(graph=GRAPH)
            assert started.finish().exit_code == 0
            assert check_neff(started.output).compiler_version == compiler.version
    assert (old.runs, new.runs) == (1, 1)


def test_a_compiler_upgraded_in_place_does_not_serve_the_old_neff(tmp_path: Path) -> None:
    """UC-12"""
    for version in ("2.23.6484.0+3b612583", "2.26.6360.0+6f180f47"):
        compiler = FakeCompiler(tmp_path / "compiler", version=version)
        started = Host(tmp_path / "host", compiler).start(graph=GRAPH)
        assert started.finish().exit_code == 0
        assert check_neff(started.output).compiler_version == version
    assert compiler.runs == 2


def test_a_compiler_upgraded_while_it_compiles_publishes_nothing(tmp_path: Path) -> None:
    """UC-12: one development build laid over another one says the same version, and nobody knows which made it."""
    gate = tmp_path / "gate"
    compiler = FakeCompiler(tmp_path / "compiler", gate=gate)
    host = Host(tmp_path / "host", compiler)
    started = host.start(graph=GRAPH)
    wait_until(lambda: compiler.started == 1)
    program = compiler.folder / "neuronx-cc"
    replaced = program.with_name("new")
    replaced.write_bytes(program.read_bytes() + b"# rebuilt\n")
    replaced.chmod(0o755)
    replaced.replace(program)
    gate.touch()
    assert started.finish().exit_code == 0
    assert "the compiler changed while it compiled" in host.log()
    assert not list(host.tier.glob("artifacts/*/*"))
    assert not list(host.tier.glob("spool/*"))


def test_a_graph_from_another_checkout_is_a_hit(tmp_path: Path) -> None:
    """UC-05"""
    compiler = FakeCompiler(tmp_path / "compiler")
    host = Host(tmp_path / "host", compiler)
    first, second = host.compile(graph=GRAPH), host.compile(graph=moved(GRAPH))
    assert moved(GRAPH) != GRAPH
    assert first.output == second.output is not None
    assert compiler.runs == 1


def test_the_launcher_finds_the_parsers_though_it_starts_without_them(tmp_path: Path) -> None:
    """The launcher leaves site-packages out; its worker must not, or every graph would be hashed raw."""
    host = Host(tmp_path / "host", FakeCompiler(tmp_path / "compiler"))
    for name in ("mlp_grad.hlo.pb", "mlp_grad.mlir", "conv.mlirbc"):
        host.compile(graph=(pinned.CORPUS / name).read_bytes())
    kinds = sorted(json.loads(p.read_bytes().partition(b"\n")[2])["kind"] for p in host.tier.rglob("index/**/*.json"))
    assert kinds == ["hlo", "mlir", "mlir"]


def test_extraction_mode_stores_nothing(tmp_path: Path) -> None:
    """UC-20"""
    compiler = FakeCompiler(tmp_path / "compiler")
    host = Host(tmp_path / "host", compiler, NEURON_EXTRACT_GRAPHS_ONLY="1")
    for _ in range(2):
        assert host.compile(graph=GRAPH).exit_code == 0
    assert compiler.runs == 2
    assert not list(host.tier.rglob("*.neff"))
