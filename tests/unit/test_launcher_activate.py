from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from neffcache_client.errors import SettingsError
from neffcache_hook import autoload, run_command
from neffcache_hook.launcher.activate import activate
from support.compilers import FakeCompiler, environment
from support.launchers import UNREACHABLE


@pytest.fixture
def compiler(tmp_path: Path) -> FakeCompiler:
    return FakeCompiler(tmp_path / "compilers")


@pytest.fixture
def env(tmp_path: Path, compiler: FakeCompiler) -> dict[str, str]:
    return environment(compiler.folder, cache=tmp_path, url=UNREACHABLE)


def _log(tmp_path: Path) -> str:
    return "".join(p.read_text() for p in (tmp_path / "neff_cache" / "neffcache" / "log").glob("*"))


def test_path_and_the_vendors_folder_point_at_neffcache(env: dict[str, str], tmp_path: Path) -> None:
    before = env["PATH"]
    assert activate(env).active
    assert env["PATH"] == f"{env['NEFFCACHE_LAUNCHER_DIR']}:{before}"
    vendor = Path(env["TORCH_NEURONX_NEFF_CACHE_DIR"])
    assert vendor.parent == tmp_path / "neff_cache" / "by-compiler"
    assert len(vendor.name) == 16
    assert env["NEFFCACHE_LOCAL_DIR"] == str(tmp_path / "neff_cache")


def test_doing_it_again_changes_nothing(env: dict[str, str]) -> None:
    activate(env)
    once = dict(env)
    assert activate(env).active
    assert env == once


def test_another_compiler_gets_another_vendor_folder(env: dict[str, str], tmp_path: Path) -> None:
    """UC-12: the vendor's own key does not know the compiler's version."""
    activate(env)
    first = env["TORCH_NEURONX_NEFF_CACHE_DIR"]
    newer = FakeCompiler(tmp_path / "newer", version="2.100.0.0+9999ffff")
    env["PATH"] = f"{newer.folder}:{env['PATH']}"
    activate(env)
    assert env["TORCH_NEURONX_NEFF_CACHE_DIR"] != first
    assert env["PATH"].startswith(env["NEFFCACHE_LAUNCHER_DIR"])


@pytest.mark.parametrize("name", ["XLA_FLAGS", "NEURON_LOGICAL_NC_CONFIG", "NEURON_CC_ANYTHING"])
def test_what_only_our_key_knows_gets_another_vendor_folder(env: dict[str, str], name: str) -> None:
    """The vendor's cache would serve the NEFF of the other setting, and the launcher would not even be asked."""
    folders = set()
    for value in (None, "1", "2"):
        changed = env | ({name: value} if value else {})
        activate(changed)
        folders.add(changed["TORCH_NEURONX_NEFF_CACHE_DIR"])
    assert len(folders) == 3


def test_a_file_behind_a_flag_counts_by_content_for_the_vendor_folder(env: dict[str, str], tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    env["NEURON_CC_FLAGS"] = f"--some-table={table}"
    folders = []
    for text in ("one", "two", "one"):
        table.write_text(text)
        changed = dict(env)
        activate(changed)
        folders.append(changed["TORCH_NEURONX_NEFF_CACHE_DIR"])
    assert folders[0] == folders[2] != folders[1]


def test_a_folder_named_inside_an_active_environment_is_the_users(env: dict[str, str], tmp_path: Path) -> None:
    activate(env)
    env["TORCH_NEURONX_NEFF_CACHE_DIR"] = str(tmp_path / "mine")
    activate(env)
    assert env["TORCH_NEURONX_NEFF_CACHE_DIR"].startswith(str(tmp_path / "mine" / "by-compiler"))


@pytest.mark.parametrize("more", [{"NEFFCACHE_URL": ""}, {"NEFFCACHE_MODE": "off"}, {"PATH": "/nonexistent"}])
def test_where_there_is_nothing_to_do_nothing_is_done(env: dict[str, str], more: dict[str, str]) -> None:
    env |= more
    before = dict(env)
    done = activate(env)
    assert (done.active, done.problem) == (False, None)
    assert env == before


def test_settings_that_cannot_be_used_leave_the_environment_alone(env: dict[str, str]) -> None:
    env["NEFFCACHE_MODE"] = "sometimes"
    before = dict(env)
    with pytest.raises(SettingsError, match="sometimes"):
        activate(env)
    assert env == before


def test_an_unknown_variable_is_named_in_the_log(env: dict[str, str], tmp_path: Path) -> None:
    """UC-03"""
    env["NEFFCACHE_TOKE"] = "x"
    activate(env)
    assert "NEFFCACHE_TOKE is set but means nothing" in _log(tmp_path)


def test_autoload_never_raises_and_says_one_line(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in {**env, "NEFFCACHE_URL": "cache:8765"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NEFFCACHE_LAUNCHER_DIR", raising=False)
    autoload.activate()
    autoload.activate()
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "NEFFCACHE_URL='cache:8765'" in said
    monkeypatch.delenv("NEFFCACHE_LAUNCHER_DIR")


def test_autoload_without_a_url_imports_nothing(tmp_path: Path) -> None:
    program = (
        "import sys; from neffcache_hook import autoload; before = set(sys.modules); autoload.activate();"
        "print(sorted(set(sys.modules) - before), [m for m in sys.modules if m.startswith('neffcache_client')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(cache=tmp_path), capture_output=True, text=True, check=True
    )
    assert done.stdout == "[] []\n"


def _run(env: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    program = (
        "import argparse, sys; from neffcache_hook import run_command as r;"
        "p = argparse.ArgumentParser(); r.register(p.add_subparsers()); sys.exit(r.run(p.parse_args(sys.argv[1:])))"
    )
    return subprocess.run(
        [sys.executable, "-c", program, "run", *command], env=env, capture_output=True, text=True, check=False
    )


def test_run_gives_the_program_the_launcher(env: dict[str, str]) -> None:
    done = _run(env, "--", "/bin/sh", "-c", "command -v neuronx-cc; echo $TORCH_NEURONX_NEFF_CACHE_DIR; exit 4")
    launcher, vendor = done.stdout.splitlines()
    assert "neffcache-launcher" in launcher
    assert "/by-compiler/" in vendor
    assert (done.returncode, done.stderr) == (4, "")


def test_run_without_a_cache_says_so_and_runs(env: dict[str, str]) -> None:
    del env["NEFFCACHE_URL"]
    done = _run(env, "echo", "--", "x")
    assert done.stdout == "-- x\n"
    assert done.stderr == "neffcache: NEFFCACHE_URL is not set; running without the cache\n"
    env["NEFFCACHE_STRICT"] = "1"
    strict = _run(env, "echo", "x")
    assert (strict.returncode, strict.stdout) == (1, "")


def test_run_of_a_program_that_is_not_there(env: dict[str, str]) -> None:
    done = _run(env, "--", "no-such-program")
    assert done.returncode == run_command.NOT_FOUND
    assert "no-such-program" in done.stderr
    assert _run(env).returncode == 2


def test_the_activated_launcher_answers(env: dict[str, str], compiler: FakeCompiler) -> None:
    activate(env)
    done = subprocess.run(["neuronx-cc", "--version"], env=env, capture_output=True, text=True, check=True)
    assert compiler.version in done.stdout
    assert os.path.realpath(env["NEFFCACHE_LAUNCHER_DIR"])
