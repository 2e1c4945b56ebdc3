"""What has to be right before requests are served, and the line that says that they are."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from neffcache_server.auth.exposure import check_access
from neffcache_server.database.migrate import ensure_schema
from neffcache_server.problems import SetupError, StorageUnavailable
from neffcache_server.process import serve_process
from neffcache_server.settings import ServerSettings, make_data_dir
from neffcache_server.storage.base import StorageMisconfigured
from neffcache_server.storage.open import open_store
from neffcache_server.workers import Run, Workers


def serve(settings: ServerSettings, *, port_file: Path | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Raises SetupError when it cannot start."""
    workers = settings.workers
    if workers != 1 and settings.embedded:
        raise SetupError(
            f"--workers {workers}: one process is all that can share the embedded database and wake each other's "
            "waiters; start it with --workers 1, or give it PostgreSQL (--database-url)"
        )
    if port_file is not None and not os.access(port_file.parent, os.W_OK | os.X_OK):
        raise SetupError(f"--port-file {port_file}: {port_file.parent} is no folder that can be written to")
    with _data_dir(settings):
        ensure_schema(settings)
        check_access(settings)
        check_store(settings)
        listener = _listen(settings.host, settings.port)

        def ready() -> None:
            _ready(_url(settings.host, listener), settings, port_file)

        if workers == 1:
            return serve_process(settings, listener, ready)
        run: Run = lambda told, lifeline: serve_process(settings, listener, told, lifeline)  # noqa: E731
        return Workers(workers, run, ready).serve()


def check_store(settings: ServerSettings) -> None:
    """Raises SetupError when the store says that it cannot be used like this.

    One that does not answer just now is no reason not to start: requests that need it are answered 503 meanwhile.
    """
    store = open_store(settings)
    try:
        asyncio.run(store.check())
    except StorageMisconfigured as exc:
        raise SetupError(exc.detail) from exc
    except StorageUnavailable as exc:
        print(f"neffcache: starting all the same: {exc.detail}", file=sys.stderr)  # noqa: T201  # no logging yet


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
    make_data_dir(settings.data_dir)
    try:
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
