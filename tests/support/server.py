"""A real cache server in its own process, for tests of everything that talks to one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from support import backends

_START_SECONDS = 60.0
_STOP_SECONDS = 30.0


class ServerProcess:
    """`neffcache serve` as a child process. `url` and `port` stay the same over restarts."""

    def __init__(
        self,
        folder: Path,
        env: Mapping[str, str] | None = None,
        arguments: tuple[str, ...] = (),
        program: tuple[str, ...] = ("-m", "neffcache_server"),
    ) -> None:
        self.folder = folder
        self.data_dir = folder / "data"
        self.port = 0
        self.url = ""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("NEFFCACHE_")}
        # Several servers on one state are told so in `env`; else each has its own.
        own = {} if env and "NEFFCACHE_SERVER_DATABASE_URL" in env else backends.environment(self.data_dir)
        self._env = inherited | own | dict(env or {})
        self._arguments = arguments
        self.program = program
        """What Python runs; a test that breaks the server from inside brings its own."""
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0

    @property
    def pid(self) -> int:
        """Of the running server."""
        assert self._process is not None, "the server does not run"
        return self._process.pid

    @property
    def log(self) -> str:
        """What all starts so far have written to stdout and stderr."""
        return "".join(p.read_text() for p in sorted(self.folder.glob("server-*.log")))

    def start(self) -> None:
        """Start and return when the server answers. Raises AssertionError with its log when it does not start."""
        assert self._process is None, "the server runs already"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._starts += 1
        port_file = self.folder / "url"
        port_file.unlink(missing_ok=True)
        command = [sys.executable, *self.program, "serve", "--port", str(self.port)]
        command += ["--data-dir", str(self.data_dir), "--port-file", str(port_file), *self._arguments]
        with (self.folder / f"server-{self._starts:03}.log").open("wb") as log:
            self._process = subprocess.Popen(
                command, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + _START_SECONDS
        while not port_file.exists():
            code = self._process.poll()
            if code is not None or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"the server did not start (exit code {code}):\n{self.log}")
            time.sleep(0.02)
        self.url = port_file.read_text().strip()
        self.port = int(self.url.rpartition(":")[2])

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End the server politely and return its exit code; killed when it does not end in time."""
        process, self._process = self._process, None
        assert process is not None, "the server does not run"
        process.send_signal(signal.SIGCONT)
        process.send_signal(number)
        try:
            return process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"the server did not end within {_STOP_SECONDS:g} s:\n{self.log}") from None

    def kill(self) -> None:
        """SIGKILL; fine when it does not run."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    @property
    def died(self) -> bool:
        """It was started and has ended by itself."""
        return self._process is not None and self._process.poll() is not None

    def pause(self) -> None:
        """SIGSTOP: connections are taken by the kernel, nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)


@contextmanager
def running_server(
    folder: Path,
    *,
    env: Mapping[str, str] | None = None,
    arguments: tuple[str, ...] = (),
    program: tuple[str, ...] = ("-m", "neffcache_server"),
) -> Iterator[ServerProcess]:
    """A started server with its data under `folder`; ended, whatever happens, with the block.

    `env` adds settings (`NEFFCACHE_SERVER_…`); the caller's own NEFFCACHE_ variables are left out.
    """
    server = ServerProcess(folder, env, arguments, program)
    server.start()
    try:
        yield server
    finally:
        server.kill()
