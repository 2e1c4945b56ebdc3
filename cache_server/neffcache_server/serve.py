"""Running the application with uvicorn: one ready line, a quick and quiet end."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from neffcache_server.app import create_app
from neffcache_server.auth.exposure import check_access
from neffcache_server.database.migrate import ensure_schema
from neffcache_server.problems import SetupError
from neffcache_server.settings import ServerSettings
from neffcache_server.state import State
from neffcache_server.storage.open import open_store

_LEASE_IN_PATH = re.compile(r"/leases/[^/ ?]+")


def serve(settings: ServerSettings, *, workers: int = 1, port_file: Path | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Raises SetupError when it cannot start."""
    if workers != 1:
        raise SetupError(
            f"--workers {workers}: one process is all that can share the embedded database and wake each other's "
            "waiters; start it with --workers 1"
        )
    with _data_dir(settings):
        ensure_schema(settings)
        check_access(settings)
        open_store(settings)
        listener = _listen(settings.host, settings.port)
        url = _url(settings.host, listener)
        app = create_app(settings)
        config = uvicorn.Config(
            app,
            log_level=settings.log_level,
            access_log=settings.access_log,
            timeout_graceful_shutdown=settings.shutdown_seconds,
            server_header=False,
            # Ten thousand ranks may knock at the same moment.
            backlog=16384,
        )
        if settings.access_log:
            logging.getLogger("uvicorn.access").addFilter(_without_lease_ids)
        server = _Server(config, lambda: _ready(url, settings, port_file), lambda: _stop_waiting(app.state))
        with asyncio.Runner() as runner:
            runner.run(server.serve([listener]))
    return 0 if server.started else 1


class _Server(uvicorn.Server):
    """uvicorn with our ready line, and signals that wake waiters before connections are closed."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None], stop_waiting: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready
        self._stop_waiting = stop_waiting

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn would raise the signal once more at the end: exit by signal, KeyboardInterrupt on the terminal.
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        # uvicorn waits for running requests before it ends the application, and a long-poll runs for 25 s.
        self._stop_waiting()


def _stop_waiting(app_state: object) -> None:
    state: State | None = getattr(app_state, "neffcache", None)
    if state is not None:
        state.leases.stop()


def _ready(url: str, settings: ServerSettings, port_file: Path | None) -> None:
    if port_file is not None:
        partial = port_file.with_name(f".{port_file.name}.{os.getpid()}")
        partial.write_text(url + "\n")
        # Whoever polls for the file must not find it half written.
        partial.replace(port_file)
    print(f"neffcache server on {url} (data: {settings.data_dir})", flush=True)  # noqa: T201  # the ready line


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as exc:
        raise SetupError(f"cannot listen on {host}:{port}: {exc.strerror}; choose another --port or --host") from exc
    return listener


def _url(host: str, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def _data_dir(settings: ServerSettings) -> Iterator[None]:
    """The data folder for this process alone: a second server could not wake the first one's waiters."""
    if not settings.embedded:
        yield
        return
    try:
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(settings.data_dir / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as exc:
        raise SetupError(f"the data folder {settings.data_dir} cannot be used: {exc.strerror}") from exc
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise SetupError(
            f"another server uses the data folder {settings.data_dir}; stop it or choose another --data-dir"
        ) from None
    try:
        yield
    finally:
        os.close(descriptor)


def _without_lease_ids(record: logging.LogRecord) -> bool:
    if isinstance(record.args, tuple):
        record.args = tuple(_LEASE_IN_PATH.sub("/leases/***", a) if isinstance(a, str) else a for a in record.args)
    return True
