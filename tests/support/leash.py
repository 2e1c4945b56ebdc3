"""Foreign servers (PostgreSQL, S3, a proxy) as children that never outlive the test run."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

# The shell waits for the end of its input, which is our end, however we end; then it ends the program.
_SCRIPT = '"$@" </dev/null & echo $! >"$0"; while read -r _; do :; done; kill -KILL $! 2>/dev/null'
_START_SECONDS = 60.0
_STOP_SECONDS = 30.0


class Leashed:
    """A program that runs until `stop`, or until this process is gone."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        folder: Path | None = None,
    ) -> None:
        """Start it. `user` is whom it runs as (for programs that refuse to run as root)."""
        self.log = log
        # In /tmp: another user has to be able to write it.
        pid_file = log.with_name(f"{log.name}.pid.{time.monotonic_ns()}")
        pid_file.touch()
        pid_file.chmod(0o666)
        with log.open("ab") as output:
            self._shell = subprocess.Popen(
                ["/bin/sh", "-c", _SCRIPT, str(pid_file), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env) if env is not None else None,
                user=user,
                cwd=folder,
                extra_groups=[] if user is not None else None,
            )
        self.pid = _read_pid(pid_file)

    @property
    def alive(self) -> bool:
        """Whether the program runs."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state not in "ZX"

    def send(self, number: int) -> None:
        """Send a signal to the program."""
        os.kill(self.pid, number)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End it and wait until it is gone; killed when it does not go. May be called twice."""
        if self._shell.poll() is not None:
            return
        if self.alive:
            self.send(number)
        deadline = time.monotonic() + _STOP_SECONDS
        while self.alive and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self._shell.stdin is not None
        self._shell.stdin.close()
        self._shell.wait()

    def wait_ready(self, ready: Callable[[], bool]) -> None:
        """Return when `ready()`. Raises AssertionError with the log when the program ends or takes a minute."""
        deadline = time.monotonic() + _START_SECONDS
        while not ready():
            if not self.alive or time.monotonic() > deadline:
                self.stop(signal.SIGKILL)
                raise AssertionError(f"not ready:\n{self.log.read_text(errors='replace')[-1500:]}")
            time.sleep(0.02)


def free_port() -> int:
    """A port nobody listens on, below the range from which the kernel picks ports of clients.

    It stays this process's: another one of the test run, or a second call, is given others.
    """
    folder = Path(tempfile.gettempdir()) / f"neffcache-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for _ in range(200):
        port = 10000 + int.from_bytes(os.urandom(2), "big") % 20000
        reserved = os.open(folder / str(port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(reserved, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            os.close(reserved)
            continue
        # Left open: the kernel lets go of it when this process ends.
        return port
    raise AssertionError("no free port")


def listens(port: int) -> bool:
    """Whether somebody takes connections on that port of this machine."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _read_pid(file: Path) -> int:
    deadline = time.monotonic() + _START_SECONDS
    while not (text := file.read_text()).endswith("\n"):
        assert time.monotonic() < deadline, "the shell did not start"
        time.sleep(0.005)
    file.unlink()
    return int(text)
