"""What the caller of neuronx-cc relies on, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from neffcache_client.neff import NeffHeader, check_neff
from support.compilers import FakeCompiler
from support.launchers import Host
from support.waiting import wait_until

TEN_MB = 10_000_000

HEAVY = {
    *("argparse", "ast", "ctypes", "dataclasses", "httpx", "importlib.metadata", "inspect", "logging", "pathlib"),
    *("shutil", "signal", "site", "socket", "ssl", "subprocess", "tempfile", "threading", "traceback", "typing"),
    *("uuid", "neffcache_client.api", "neffcache_client.node_cache", "neffcache_client.wire"),
}
"""What a local hit must not wait for."""

CALLER = """
import os, subprocess, sys
p = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
open("launcher.pid", "w").write(str(p.pid))
p.stdout.read(); p.stderr.read()
sys.exit(p.wait())
"""


@pytest.fixture
def compilers(tmp_path: Path) -> Path:
    return tmp_path / "compilers"


def test_output_exit_code_and_file_are_the_compilers(tmp_path: Path, compilers: Path) -> None:
    compiler = FakeCompiler(compilers, stdout="Compiler status PASS\n", stderr="a warning\n")
    host = Host(tmp_path, compiler)
    started = host.start()
    done = started.finish()
    assert (done.exit_code, done.stdout, done.stderr) == (0, b"Compiler status PASS\n", b"a warning\n")
    assert check_neff(started.output).compiler_version == compiler.version
    assert started.leftovers() == []
    assert compiler.environ()["NEFFCACHE_INNER"] == "1"


def test_a_hit_prints_nothing_and_runs_no_compiler(tmp_path: Path, compilers: Path) -> None:
    compiler = FakeCompiler(compilers, stdout="printed by the compiler\n")
    host = Host(tmp_path, compiler)
    first = host.compile()
    second = host.compile()
    assert second == (0, b"", b"", first.output)
    assert compiler.runs == 1


def test_a_local_hit_imports_next_to_nothing(tmp_path: Path, compilers: Path) -> None:
    host = Host(tmp_path, FakeCompiler(compilers))
    first = host.compile()
    program = [sys.executable, "-IS", "-X", "importtime", os.path.join(host.shim, "neuronx-cc")]
    hit = subprocess.run(
        [*program, *host.arguments(tmp_path / "T")], env=host.env, capture_output=True, text=True, check=True
    )
    assert (tmp_path / "T" / "module.neff").read_bytes() == first.output
    imported = {line.rpartition("|")[2].strip() for line in hit.stderr.splitlines() if "import time:" in line}
    assert "neffcache_client.local_tier" in imported
    assert not imported & HEAVY
    assert {name for name in imported if name.startswith("neffcache_hook.launcher.")} == {
        "neffcache_hook.launcher.find",
        "neffcache_hook.launcher.log",
        "neffcache_hook.launcher.main",
    }


def test_ten_megabytes_on_both_streams_do_not_hang_and_arrive_whole(tmp_path: Path, compilers: Path) -> None:
    """UC-12 (b)"""
    compiler = FakeCompiler(compilers, stdout_bytes=TEN_MB, stderr_bytes=TEN_MB)
    done = Host(tmp_path, compiler).compile()
    flood = (b"x" * 99 + b"\n") * (TEN_MB // 100)
    assert done.exit_code == 0
    assert done.stdout == flood
    assert done.stderr == flood


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_compiler_that_dies_with_half_a_file_leaves_none(tmp_path: Path, compilers: Path, number: int) -> None:
    """UC-12 (a): 128+N, never a death by signal, which the C++ caller reads as success."""
    compiler = FakeCompiler(compilers, partial=True, kill_self=int(number), stderr="last words\n")
    started = Host(tmp_path, compiler).start()
    done = started.finish()
    assert done == (128 + number, b"", b"last words\n", None)
    assert started.leftovers() == []


@pytest.mark.parametrize(("exit_code", "text"), [(70, "ERROR [NCC_EOOM001] too big\n"), (70, ""), (1, "crash\n")])
def test_a_failing_compile_fails_with_its_own_words(
    tmp_path: Path, compilers: Path, exit_code: int, text: str
) -> None:
    compiler = FakeCompiler(compilers, exit_code=exit_code, stderr=text, partial=True)
    started = Host(tmp_path, compiler).start()
    done = started.finish()
    assert (done.exit_code, done.stdout, done.output) == (exit_code, b"", None)
    assert done.stderr.decode() == text
    assert started.leftovers() == []


def test_success_without_an_output_file_is_a_failure_with_a_reason(tmp_path: Path, compilers: Path) -> None:
    done = Host(tmp_path, FakeCompiler(compilers, output="")).compile()
    assert (done.exit_code, done.output) == (70, None)
    assert b"left no output at" in done.stderr


def test_a_truncated_neff_with_exit_0_is_a_failure_with_a_reason(tmp_path: Path, compilers: Path) -> None:
    """UC-11: a full disk that the compiler did not notice."""
    started = Host(tmp_path, FakeCompiler(compilers, cut=100)).start()
    done = started.finish()
    assert (done.exit_code, done.output) == (70, None)
    assert b"left a damaged NEFF" in done.stderr
    assert started.leftovers() == []


def test_an_output_in_another_format_reaches_the_caller_but_no_cache(tmp_path: Path, compilers: Path) -> None:
    compiler = FakeCompiler(compilers, output="some other format")
    host = Host(tmp_path, compiler)
    assert host.compile() == (0, b"", b"", b"some other format")
    assert host.compile().output == b"some other format"
    assert compiler.runs == 2


def test_an_older_file_at_the_output_does_not_pass_for_a_result(tmp_path: Path, compilers: Path) -> None:
    host = Host(tmp_path, FakeCompiler(compilers, output=""))
    (tmp_path / "T1").mkdir()
    (tmp_path / "T1" / "module.neff").write_bytes(b"of an earlier compile")
    assert host.compile().exit_code == 70


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_stop_signal_ends_everything_and_leaves_no_output(tmp_path: Path, compilers: Path, number: int) -> None:
    compiler = FakeCompiler(compilers, endless=True, partial=True, leave_grandchild=True)
    started = Host(tmp_path, compiler).start()
    wait_until(lambda: compiler.started and len(compiler.pids) == 2)
    started.process.send_signal(number)
    done = started.finish()
    assert (done.exit_code, done.output) == (128 + number, None)
    assert compiler.alive() == []
    assert started.leftovers() == []


def test_an_ignored_hangup_stays_ignored(tmp_path: Path, compilers: Path) -> None:
    compiler = FakeCompiler(compilers, gate=tmp_path / "gate")
    host = Host(tmp_path, compiler)
    program = ["/usr/bin/nohup", os.path.join(host.shim, "neuronx-cc"), *host.arguments(tmp_path / "T")]
    process = subprocess.Popen(
        program, env=host.env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_until(lambda: compiler.started)
    process.send_signal(signal.SIGHUP)
    (tmp_path / "gate").touch()
    assert process.wait(60) == 0


def test_a_killed_launcher_takes_its_compiler_along(tmp_path: Path, compilers: Path) -> None:
    compiler = FakeCompiler(compilers, endless=True, partial=True, leave_grandchild=True)
    started = Host(tmp_path, compiler).start()
    wait_until(lambda: compiler.started and len(compiler.pids) == 2)
    started.process.kill()
    assert started.finish().output is None
    wait_until(lambda: compiler.alive() == [])
    wait_until(lambda: started.leftovers() == [])


def test_a_killed_caller_takes_launcher_and_compiler_along(tmp_path: Path, compilers: Path) -> None:
    compiler = FakeCompiler(compilers, endless=True, partial=True, leave_grandchild=True)
    host = Host(tmp_path, compiler)
    folder = tmp_path / "T"
    arguments = host.arguments(folder)
    program = os.path.join(host.shim, "neuronx-cc")
    caller = subprocess.Popen([sys.executable, "-c", CALLER, program, *arguments], cwd=folder, env=host.env)
    wait_until(lambda: compiler.started and len(compiler.pids) == 2)
    launcher = int((folder / "launcher.pid").read_text())
    caller.kill()
    caller.wait()
    wait_until(lambda: not _lives(launcher))
    assert compiler.alive() == []
    assert sorted(p.name for p in folder.iterdir()) == ["launcher.pid", "module.hlo.pb"]
    assert "has died" in host.log()


def test_other_sub_commands_and_options_pass_through(tmp_path: Path, compilers: Path) -> None:
    compiler = FakeCompiler(compilers)
    host = Host(tmp_path, compiler)
    program = os.path.join(host.shim, "neuronx-cc")
    other = subprocess.run([program, "list-operators", "-x"], env=host.env, capture_output=True, check=False)
    assert other.returncode == 3
    assert (other.stdout, other.stderr) == (b"sub-command list-operators -x\n", b"warning: on stderr\n")
    version = subprocess.run([program, "compile", "--version"], env=host.env, capture_output=True, check=True)
    assert compiler.version.encode() in version.stdout


@pytest.mark.parametrize(
    "more",
    [
        {"NEFFCACHE_URL": ""},
        {"NEFFCACHE_MODE": "off"},
        {"TORCH_NEURONX_NEFF_DISABLE_CACHE": "1"},
        {"TORCH_NEURONX_DISABLE_NEFF_CACHE": "yes"},
        {"NEURON_CC_FLAGS": "--no_cache"},
        {"NEFFCACHE_INNER": "1"},
    ],
)
def test_a_switched_off_cache_is_not_there(tmp_path: Path, compilers: Path, more: dict[str, str]) -> None:
    compiler = FakeCompiler(compilers)
    host = Host(tmp_path, compiler, **more)
    host.compile()
    assert host.compile().exit_code == 0
    assert compiler.runs == 2
    assert f"--output {tmp_path}/T2/module.neff" in compiler.command_lines[1]
    assert not list(host.tier.glob("artifacts/*/*"))


def test_wrapper_only_options_never_reach_the_compiler(tmp_path: Path, compilers: Path) -> None:
    compiler = FakeCompiler(compilers)
    host = Host(tmp_path, compiler)
    host.compile("--no_cache", "--cache_dir=/x")
    host.compile("--retry_failed_compilation", "--cache_dir=/x", graph=b"another")
    assert compiler.runs == 2
    for line in compiler.command_lines:
        assert not any(option in line for option in ("--no_cache", "--cache_dir", "--retry_failed"))


def test_a_bad_setting_never_breaks_the_job(tmp_path: Path, compilers: Path) -> None:
    compiler = FakeCompiler(compilers, stderr="compiler\n")
    done = Host(tmp_path, compiler, NEFFCACHE_MODE="readwirte").compile()
    assert done.exit_code == 0
    assert done.output
    first, rest = done.stderr.split(b"\n", 1)
    assert b"NEFFCACHE_MODE='readwirte'" in first
    assert rest == b"compiler\n"
    strict = Host(tmp_path / "s", compiler, NEFFCACHE_MODE="readwirte", NEFFCACHE_STRICT="1").compile()
    assert (strict.exit_code, strict.output, compiler.runs) == (75, None, 1)


def test_a_relative_output_and_the_callers_folder_are_kept(tmp_path: Path, compilers: Path) -> None:
    compiler = FakeCompiler(compilers)
    host = Host(tmp_path, compiler)
    host.arguments(tmp_path / "T")
    (tmp_path / "T" / "sub").mkdir()
    program = os.path.join(host.shim, "neuronx-cc")
    arguments = ["compile", "module.hlo.pb", "--framework=XLA", "--target=trn2", "--output=sub/out.neff"]
    subprocess.run([program, *arguments], cwd=tmp_path / "T", env=host.env, check=True, capture_output=True)
    assert check_neff(tmp_path / "T" / "sub" / "out.neff")
    given = compiler.command_lines[0].split()[-1]
    assert given.startswith("--output=sub/.neffcache-")
    assert given.endswith("/out.neff")
    assert compiler.environ()["PWD"] == host.env.get("PWD", compiler.environ()["PWD"])


def test_an_output_that_is_no_plain_file_is_left_to_the_compiler(tmp_path: Path, compilers: Path) -> None:
    """A rename would put a NEFF in the place of /dev/null; here a named pipe stands for the device."""
    host = Host(tmp_path, FakeCompiler(compilers))
    arguments = host.arguments(tmp_path / "T")
    pipe, link = tmp_path / "T" / "pipe", tmp_path / "T" / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    program = os.path.join(host.shim, "neuronx-cc")
    for output in (pipe, link):
        arguments[-1] = str(output)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        subprocess.run([program, *arguments], env=host.env, check=True, capture_output=True)
        assert NeffHeader(os.read(reader, 1 << 16))
        os.close(reader)
        assert pipe.is_fifo()
        assert link.is_symlink()


def test_two_installs_on_path_do_not_wait_for_each_other(tmp_path: Path, compilers: Path) -> None:
    """Also when one does not know the other for a launcher: the inner one passes through."""
    compiler = FakeCompiler(compilers)
    host = Host(tmp_path, compiler)
    for name, edit in (("second", "# another install\n"), ("unknown", None)):
        text = Path(host.shim, "neuronx-cc").read_text()
        text = text + edit if edit else text.replace("neffcache-launcher-marker", "something else")
        (tmp_path / name).mkdir()
        (tmp_path / name / "neuronx-cc").write_text(text)
        (tmp_path / name / "neuronx-cc").chmod(0o755)
        env_path = os.pathsep.join([host.shim, str(tmp_path / name), str(compiler.folder), "/usr/bin", "/bin"])
        host.env["PATH"] = env_path
        before = compiler.runs
        assert host.compile(graph=name.encode()).exit_code == 0
        assert compiler.runs == before + 1


def test_no_compiler_behind_the_launcher_is_said(tmp_path: Path, compilers: Path) -> None:
    compiler = FakeCompiler(compilers)
    host = Host(tmp_path, compiler)
    compiler.path.unlink()
    done = host.compile()
    assert done.exit_code == 127
    assert b"no neuronx-cc on PATH behind the neffcache launcher" in done.stderr


def test_a_fault_in_neffcache_itself_ends_in_a_compile(tmp_path: Path, compilers: Path) -> None:
    """A folder that cannot be a folder, as a stand-in for what nobody thought of."""
    compiler = FakeCompiler(compilers, stderr="compiler\n")
    host = Host(tmp_path, compiler)
    (tmp_path / "neff_cache").write_text("not a folder")
    done = host.compile()
    assert (done.exit_code, done.stderr) == (0, b"compiler\n")
    assert done.output
    assert compiler.runs == 1


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
