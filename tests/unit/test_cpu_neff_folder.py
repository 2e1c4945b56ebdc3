"""The vendor's folder of NEFFs as the stand-in backend keeps it."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest
from neffcache_hook.cpu import neff_folder
from neffcache_hook.cpu.errors import CompilerFailed
from support.compilers import FakeCompiler
from support.neffs import make_neff

OP, IR = "0" * 64, b"ML\xefRbytes"


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, clean_environment: None) -> None:
    os.environ["TORCH_NEURONX_NEFF_CACHE_DIR"] = str(tmp_path / "cache")
    os.environ["TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR"] = str(tmp_path / "locks")


def use(compiler: FakeCompiler) -> FakeCompiler:
    os.environ["PATH"] = f"{compiler.folder}:/usr/bin:/bin"
    return compiler


def obtain(ir: bytes = IR) -> tuple[bytes, bool]:
    with neff_folder.obtain(OP, ir) as neff:
        return Path(neff.path).read_bytes(), neff.from_folder


def test_a_warm_folder_does_not_call_the_compiler(tmp_path: Path) -> None:
    compiler = use(FakeCompiler(tmp_path / "cc"))
    first, from_folder = obtain()
    assert not from_folder
    assert obtain() == (first, True)
    assert compiler.runs == 1
    (path,) = (tmp_path / "cache").glob("*/*/*.neff")
    key = path.stem
    assert path.relative_to(tmp_path / "cache").parts == (key[:2], key[2:4], f"{key}.neff")
    assert len(key) == 32


def test_the_command_line_is_torchneurons(tmp_path: Path) -> None:
    compiler = use(FakeCompiler(tmp_path / "cc"))
    os.environ["NEURON_CC_FLAGS"] = "--foo  --bar=1"
    obtain()
    words = compiler.command_lines[0].split()
    work = os.path.dirname(words[1])
    assert words == [
        *("compile", f"{work}/module.mlir", "--framework", "XLA", "--target", "trn2", "--lnc", "2", "-O2"),
        *("--model-type", "transformer", "--auto-cast=none", "--foo", "--bar=1", "--output", f"{work}/module.neff"),
    ]
    assert not os.path.exists(work)


def test_flags_and_bytes_make_the_key_and_the_compiler_does_not(tmp_path: Path) -> None:
    """The hazard neffcache exists to close: another compiler version is served the old NEFF."""
    use(FakeCompiler(tmp_path / "old", version="2.1.0.0+aa"))
    old, _ = obtain()
    new = use(FakeCompiler(tmp_path / "new", version="2.2.0.0+bb"))
    assert obtain() == (old, True)
    assert new.runs == 0
    os.environ["NEURON_CC_FLAGS"] = "--other"
    obtain()
    os.environ.pop("NEURON_CC_FLAGS")
    obtain(IR + b"moved by a line")
    assert new.runs == 2


@pytest.mark.parametrize("name", ["TORCH_NEURONX_NEFF_DISABLE_CACHE", "TORCH_NEURONX_DISABLE_NEFF_CACHE"])
def test_both_spellings_switch_the_folder_off_at_call_time(tmp_path: Path, name: str) -> None:
    compiler = use(FakeCompiler(tmp_path / "cc"))
    obtain()
    os.environ[name] = "1"
    assert not obtain()[1]
    assert not obtain()[1]
    assert compiler.runs == 3
    del os.environ[name]
    assert obtain()[1]


def test_who_waits_for_the_lock_takes_what_its_holder_made(tmp_path: Path) -> None:
    compiler = use(FakeCompiler(tmp_path / "cc"))
    key = neff_folder.file_key(OP, IR)
    (tmp_path / "locks").mkdir()
    got: list[tuple[bytes, bool]] = []
    with open(tmp_path / "locks" / f"{key}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiter = threading.Thread(target=lambda: got.append(obtain()))
        waiter.start()
        made = tmp_path / "made.neff"
        made.write_bytes(make_neff())
        neff_folder._put(str(made), neff_folder.neff_path(key))
    waiter.join(30)
    assert got == [(make_neff(), True)]
    assert compiler.runs == 0


def test_a_lock_held_too_long_is_passed_by(tmp_path: Path) -> None:
    compiler = use(FakeCompiler(tmp_path / "cc"))
    os.environ["TORCH_NEURONX_NEFF_CACHE_LOCK_TIMEOUT"] = "0"
    (tmp_path / "locks").mkdir()
    with open(tmp_path / "locks" / f"{neff_folder.file_key(OP, IR)}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        obtain()
    assert compiler.runs == 1


def test_a_compilers_error_is_told_by_its_code_and_not_kept(tmp_path: Path) -> None:
    stderr = "noise\nERROR: [NCC_EXTP003] unsupported operation stablehlo.fft\nmore noise\n"
    compiler = use(FakeCompiler(tmp_path / "cc", exit_code=70, output="", stderr=stderr))
    for _ in range(2):
        with pytest.raises(CompilerFailed, match=r"exit code 70: ERROR: \[NCC_EXTP003\] unsupported") as caught:
            obtain()
        assert (caught.value.exit_code, caught.value.code) == (70, "NCC_EXTP003")
        assert "noise" not in str(caught.value)
    assert compiler.runs == 2


def test_a_missing_compiler_is_told() -> None:
    os.environ["PATH"] = "/nonexistent"
    with pytest.raises(CompilerFailed, match="neuronx-cc could not be started"):
        obtain()


def test_success_without_a_neff_is_a_failure(tmp_path: Path) -> None:
    use(FakeCompiler(tmp_path / "cc", output=""))
    with pytest.raises(CompilerFailed, match="left no NEFF"):
        obtain()
    assert not list((tmp_path / "cache").glob("*/*/*.neff"))
