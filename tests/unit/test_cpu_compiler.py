"""The stand-in `neuronx-cc`: its command line, its answers to bad input, and what a NEFF of its holds."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from neffcache_client.neff import check_neff, extract_members
from neffcache_hook.cpu import compiler

PROGRAM = """\
module {
  func.func @main(%arg0: tensor<4xf32>) -> tensor<4xf32> {
    %0 = stablehlo.add %arg0, %arg0 : tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}
"""
TORCHNEURON = ["--framework", "XLA", "--target", "trn2", "--lnc", "2", "-O2"]
TORCHNEURON += ["--model-type", "transformer", "--auto-cast=none"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "module.mlir"
    path.write_text(PROGRAM)
    return path


def failure(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    assert compiler.main([str(a) for a in args]) == 70
    return capsys.readouterr().err


def test_compiles_torchneurons_command_line(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "module.neff"
    assert compiler.main(["compile", str(source), *TORCHNEURON, "--output", str(out)]) == 0
    assert capsys.readouterr().out == "Compiler status PASS\n"
    info = check_neff(out)
    assert (info.compiler_version, info.target) == (compiler.version(), "trn2")
    assert json.loads(extract_members(out, ["kelf-0.json"])["kelf-0.json"]) == {"target": "cayman"}


def test_a_global_option_may_stand_before_the_sub_command(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.neff"
    args = ["--target=trn1", "compile", "--framework", "XLA", str(source), "--output", str(out), "--verbose=35"]
    assert compiler.main(args) == 0
    assert check_neff(out).target == "trn1"


def test_the_neff_does_not_depend_on_where_the_source_lies(source: Path, tmp_path: Path) -> None:
    """UC: two checkouts of one script. Locations in the input leave no trace in the artifact."""
    moved = tmp_path / "elsewhere" / "other.mlir"
    moved.parent.mkdir()
    moved.write_text(PROGRAM.replace("tensor<4xf32>\n    return", 'tensor<4xf32> loc("/a/b.py":7:0)\n    return'))
    outs = [tmp_path / "1.neff", tmp_path / "2.neff"]
    for path, out in zip((source, moved), outs, strict=True):
        assert compiler.main(["compile", str(path), *TORCHNEURON, "--output", str(out)]) == 0
    assert outs[0].read_bytes() == outs[1].read_bytes()


def test_what_cannot_be_lowered_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "m.mlir", tmp_path / "o.neff"
    source.write_text(
        PROGRAM.replace("stablehlo.add %arg0, %arg0 :", "stablehlo.custom_call @nki(%arg0) : ").replace(
            "tensor<4xf32>\n    return", "(tensor<4xf32>) -> tensor<4xf32>\n    return"
        )
    )
    said = failure(capsys, "compile", source, *TORCHNEURON, "--output", out)
    assert "[NCC_EXTP003] unsupported operation stablehlo.custom_call" in said
    assert len(said.splitlines()) == 1
    assert not out.exists()


def test_an_hlo_protobuf_is_refused_with_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "module.hlo.pb"
    source.write_bytes(b"\n\x04main\x12\x00\x1a\x02hi")
    said = failure(capsys, "compile", source, *TORCHNEURON, "--output", tmp_path / "o.neff")
    assert "[NCC_EARG001] module.hlo.pb is not StableHLO" in said
    assert "HLO protobufs" in said


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["compile", "missing.mlir", "--target", "trn2"], "input file not found"),
        (["compile", "missing.mlir"], "required: --target"),
        (["compile", "--target", "trn2"], "required: the input file"),
        (["compile", "missing.mlir", "--target"], "--target: expected one argument"),
        (["compile", "missing.mlir", "--target", "trn2", "--cache_dir=/x"], "unrecognized arguments: --cache_dir=/x"),
        (["compile", "missing.mlir", "--target", "trn2", "--retry_failed_compilation"], "unrecognized arguments"),
        (["compile", "missing.mlir", "--target", "trn2", "--framework", "JAX"], "invalid framework"),
        (["optimise", "missing.mlir", "--target", "trn2"], "invalid command 'optimise'"),
    ],
)
def test_a_bad_command_line_gets_a_code_and_a_reason(
    args: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = failure(capsys, *args)
    assert "[NCC_EARG001]" in said
    assert word in said


def test_a_full_disk_has_no_deterministic_code(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = failure(capsys, "compile", source, *TORCHNEURON, "--output", "/nonexistent/o.neff")
    assert "No such file or directory: /nonexistent/o.neff" in said
    assert "NCC_" not in said


def test_every_compile_is_logged_when_asked(source: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    os.environ["NEFFCACHE_CPU_COMPILER_LOG"] = str(log)
    compiler.main(["compile", str(source), *TORCHNEURON, "--output", str(tmp_path / "o.neff")])
    compiler.main(["compile", str(source), *TORCHNEURON, "--output", "/nonexistent/o.neff"])
    compiler.main(["--version"])
    first, second = (json.loads(line) for line in log.read_text().splitlines())
    assert (first["pid"], first["exit"], second["exit"]) == (os.getpid(), 0, 70)
    assert first["input"] == second["input"]


def test_the_installed_program_runs_alone_and_quietly(source: Path, tmp_path: Path) -> None:
    program = compiler.install_compiler(str(tmp_path / "bin"))
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": "/nonexistent"}
    told = subprocess.run([program, "--version"], capture_output=True, text=True, env=env, check=True)
    assert told.stdout.splitlines()[0] == f"NeuronX Compiler version {compiler.version()}"
    assert "stand-in" in told.stdout
    out = tmp_path / "o.neff"
    done = subprocess.run(
        [program, "compile", str(source), *TORCHNEURON, "--output", str(out)],
        capture_output=True,
        text=True,
        env=env,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("Compiler status PASS\n", "")
    check_neff(out)


def test_a_python_with_a_blank_in_its_path_is_started_by_a_shell(tmp_path: Path) -> None:
    odd = tmp_path / "it's python"
    odd.write_text('#!/bin/sh\necho "$1 $3"\n')
    odd.chmod(0o755)
    program = tmp_path / "neuronx-cc"
    program.write_text(compiler._program_text(str(odd)))
    program.chmod(0o755)
    done = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == "-I --version\n"


def test_help_says_that_it_is_a_stand_in(capsys: pytest.CaptureFixture[str]) -> None:
    assert compiler.main(["--help"]) == 0
    assert "CPU stand-in" in capsys.readouterr().out
