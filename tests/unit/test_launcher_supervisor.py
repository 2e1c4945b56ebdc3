from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from neffcache_hook.launcher import process_tree
from neffcache_hook.launcher.compilation import SUPERVISOR, Compilation, Ended
from support.compilers import FakeCompiler
from support.waiting import wait_until


@pytest.fixture(autouse=True)
def _no_subreaper_afterwards() -> Iterator[None]:
    """`Compilation` makes this process one, and orphans of later tests would become its children."""
    yield
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)


class Running:
    """A compilation in a thread of its own."""

    def __init__(self, tmp_path: Path, command: list[str]) -> None:
        self.folder = tmp_path / "work"
        self.folder.mkdir()
        self.samples: list[int] = []
        with open(tmp_path / "stdout", "wb") as out, open(tmp_path / "stderr", "wb") as err:
            self.compilation = Compilation(
                command,
                dict(os.environ),
                folder=str(self.folder),
                stdout=os.dup(out.fileno()),
                stderr=os.dup(err.fileno()),
                on_sample=self.samples.append,
            )
        self.ended: Ended | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.ended = self.compilation.run()

    def result(self) -> Ended:
        self._thread.join(60)
        assert self.ended is not None
        return self.ended


def _arguments(compiler: FakeCompiler, tmp_path: Path) -> list[str]:
    return [str(compiler.path), "compile", "x", "--output", str(tmp_path / "out.neff")]


def test_exit_code_and_cost_are_reported(tmp_path: Path) -> None:
    busy = ["import sys, time", "x = bytearray(60 << 20)", "t = time.time()", "while time.time() < t + 0.5: pass"]
    running = Running(tmp_path, [sys.executable, "-IS", "-c", "\n".join([*busy, "sys.exit(3)"])])
    ended = running.result()
    assert ended.exit_code == 3
    assert ended.seconds >= 0.5
    assert ended.cpu_seconds > 0.1
    assert 60 << 20 < ended.peak < 400 << 20
    assert running.samples


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_signal_becomes_128_plus_its_number(tmp_path: Path, number: int) -> None:
    """UC-12 (a)"""
    assert Running(tmp_path, ["/bin/sh", "-c", f"kill -{int(number)} $$"]).result().exit_code == 128 + number


@pytest.mark.parametrize(("name", "mode", "code"), [("absent", None, 127), ("plain", 0o644, 126)])
def test_a_compiler_that_cannot_start(tmp_path: Path, name: str, mode: int | None, code: int) -> None:
    if mode is not None:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(mode)
    ended = Running(tmp_path, [str(tmp_path / name)]).result()
    assert ended.exit_code == code
    assert ended.could_not_start


def test_a_script_without_an_interpreter_line_runs_in_the_shell(tmp_path: Path) -> None:
    (tmp_path / "script").write_text("exit 5\n")
    (tmp_path / "script").chmod(0o755)
    assert Running(tmp_path, [str(tmp_path / "script")]).result().exit_code == 5


def test_stop_kills_the_compiler_and_a_grandchild_in_its_own_session(tmp_path: Path) -> None:
    compiler = FakeCompiler(tmp_path / "c", endless=True, leave_grandchild=True)
    running = Running(tmp_path, _arguments(compiler, tmp_path))
    wait_until(lambda: compiler.started and len(compiler.pids) == 2)
    running.compilation.stop()
    assert running.result().stopped
    assert compiler.alive() == []
    assert not running.folder.exists()


def test_what_a_finished_compiler_leaves_behind_is_ended(tmp_path: Path) -> None:
    compiler = FakeCompiler(tmp_path / "c", leave_grandchild=True, output="")
    ended = Running(tmp_path, _arguments(compiler, tmp_path)).result()
    assert ended.exit_code == 0
    assert len(compiler.pids) == 2
    assert compiler.alive() == []


def test_stop_before_the_start_starts_nothing(tmp_path: Path) -> None:
    compilation = Compilation(["/bin/false"], {}, folder=str(tmp_path), stdout=1, stderr=2)
    compilation.stop()
    assert compilation.run().stopped


def test_a_killed_supervisor_does_not_leave_its_compiler(tmp_path: Path) -> None:
    compiler = FakeCompiler(tmp_path / "c", endless=True, leave_grandchild=True)
    running = Running(tmp_path, _arguments(compiler, tmp_path))
    wait_until(lambda: compiler.started and len(compiler.pids) == 2)
    supervisor = process_tree.parent_of(compiler.pids[0])
    assert supervisor is not None
    os.kill(supervisor, signal.SIGKILL)
    ended = running.result()
    assert (ended.exit_code, ended.supervisor_died) == (137, True)
    wait_until(lambda: compiler.alive() == [])


def test_the_supervisor_ends_everything_when_its_launcher_is_gone(tmp_path: Path) -> None:
    """The lifeline is all it needs: nobody reads its answer any more."""
    compiler = FakeCompiler(tmp_path / "c", endless=True, leave_grandchild=True)
    (tmp_path / "work").mkdir()
    lifeline, ours = os.pipe()
    result_r, result_w = os.pipe()
    fds = [str(lifeline), str(result_w)]
    supervisor = subprocess.Popen(
        [sys.executable, "-IS", SUPERVISOR, *fds, str(tmp_path / "work"), "--", *_arguments(compiler, tmp_path)],
        pass_fds=(lifeline, result_w),
        start_new_session=True,
    )
    os.close(lifeline)
    os.close(result_w)
    os.close(result_r)
    wait_until(lambda: compiler.started and len(compiler.pids) == 2)
    os.close(ours)
    supervisor.wait(30)
    assert compiler.alive() == []
    assert not (tmp_path / "work").exists()


def test_a_stranger_that_got_the_number_is_not_killed() -> None:
    """A pid seen as a descendant may belong to somebody else by the time of the kill."""
    shell = subprocess.Popen(["/bin/sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    assert shell.stdout is not None
    with shell.stdout:
        stranger = int(shell.stdout.readline())
        process_tree._kill(stranger, parent=1)  # its parent is the shell
        assert process_tree.parent_of(stranger) == shell.pid
        process_tree._kill(stranger, parent=shell.pid)
        assert shell.wait(30) == 0


IMMORTAL = """
import os, sys
from neffcache_hook.launcher import process_tree, supervisor
process_tree.become_subreaper()
process_tree._kill = lambda pid, parent: None
supervisor.GIVE_UP_SECONDS = 0.1
lifeline, launcher = os.pipe()
result, told = os.pipe()
command = "sleep 600 >/dev/null 2>&1 & echo $! > pid; exit 0"
supervisor.Supervisor(lifeline, told, sys.argv[1]).run(["/bin/sh", "-c", command])
print(os.read(result, 65536).decode().splitlines()[-1])
"""


def test_a_descendant_that_cannot_be_killed_does_not_hold_up_the_job(tmp_path: Path) -> None:
    """A process that hangs in the kernel, over a file system that is gone, ignores even SIGKILL."""
    program = subprocess.Popen(
        [sys.executable, "-c", IMMORTAL, str(tmp_path)], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    try:
        stdout, _ = program.communicate(timeout=15)
    except subprocess.TimeoutExpired:
        program.kill()
        program.communicate()
        raise
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert '"exit": 0' in stdout
