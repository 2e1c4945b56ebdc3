from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from neffcache_hook.launcher import find
from neffcache_hook.launcher.shim import MAX_SHEBANG, ShimUnusable, make_shim, package_dirs, shim_text
from support.compilers import FakeCompiler, environment


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """An environment whose only place for launchers is the test's own."""
    (tmp_path / "tmp").mkdir()
    return {"TMPDIR": str(tmp_path / "tmp")}


def _version(program: Path, *path: Path, tmp_path: Path) -> str:
    done = subprocess.run(
        [program, "--version"],
        env=environment(program.parent, *path, cache=tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_the_same_install_gives_the_same_folder(env: dict[str, str]) -> None:
    first = make_shim(env)
    inode = os.stat(os.path.join(first, "neuronx-cc")).st_ino
    assert make_shim(env) == first
    assert os.stat(os.path.join(first, "neuronx-cc")).st_ino == inode
    assert os.stat(os.path.dirname(first)).st_mode & 0o777 == 0o700


def test_a_shim_that_was_changed_is_made_again(env: dict[str, str]) -> None:
    folder = make_shim(env)
    program = Path(folder, "neuronx-cc")
    program.write_text("#!/bin/sh\necho planted\n")
    assert make_shim(env) == folder
    assert find.is_launcher(str(program))


def test_a_folder_that_others_may_write_is_not_trusted(env: dict[str, str], tmp_path: Path) -> None:
    folder = make_shim(env)
    os.chmod(folder, 0o777)
    assert not make_shim(env).startswith(str(tmp_path))


def test_a_symlink_in_place_of_the_folder_is_not_trusted(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "tmp" / f"neffcache-launcher-{os.geteuid()}").symlink_to(tmp_path / "elsewhere")
    assert not make_shim(env).startswith(str(tmp_path))
    assert not list((tmp_path / "elsewhere").iterdir())


def test_nowhere_to_put_it_is_said_with_every_place_tried(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ShimUnusable, match=r"(?s)neffcache-launcher.*noexec.*/var/tmp"):
        make_shim(env)


def test_a_long_interpreter_path_or_one_with_blanks_goes_through_the_shell(tmp_path: Path) -> None:
    compiler = FakeCompiler(tmp_path / "real")
    for folder in ("it's a folder", "x" * (MAX_SHEBANG + 1)):
        python = tmp_path / folder / "python"
        python.parent.mkdir()
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        program = tmp_path / folder / "neuronx-cc"
        program.write_text(shim_text(str(python), package_dirs()))
        program.chmod(0o755)
        assert program.read_text().startswith("#!/bin/sh\n")
        assert find.is_launcher(str(program))
        assert compiler.version in _version(program, compiler.folder, tmp_path=tmp_path)


def test_a_shim_whose_package_is_gone_still_finds_the_compiler(tmp_path: Path) -> None:
    """UC-10: uninstalling neffcache under a running job."""
    compiler = FakeCompiler(tmp_path / "real")
    program = tmp_path / "shim" / "neuronx-cc"
    program.parent.mkdir()
    program.write_text(shim_text(sys.executable, [str(tmp_path / "nothing")]))
    program.chmod(0o755)
    assert compiler.version in _version(program, compiler.folder, tmp_path=tmp_path)


def test_the_real_compiler_is_found_behind_any_number_of_launchers(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "neuronx-cc").write_text(shim_text(sys.executable, [f"/install/{name}"]))
        (tmp_path / name / "neuronx-cc").chmod(0o755)
    compiler = FakeCompiler(tmp_path / "real")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "neuronx-cc").write_text("not executable")
    (tmp_path / "dir" / "neuronx-cc").mkdir(parents=True)
    path = os.pathsep.join(str(tmp_path / n) for n in ("a", "data", "dir", "b", "missing", "real"))
    assert find.real_compiler(path) == str(compiler.path)
    assert find.real_compiler(str(tmp_path / "a")) is None


def test_an_empty_entry_of_path_means_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = FakeCompiler(tmp_path / "real")
    monkeypatch.chdir(compiler.folder)
    assert find.real_compiler("/nonexistent:") == str(compiler.path)


def test_the_marker_is_within_the_bytes_that_are_read(tmp_path: Path) -> None:
    text = shim_text("/" + "long/" * 100 + "python", ["/p" * 400] * 5)
    assert text.encode().index(find.MARKER) < 1024
