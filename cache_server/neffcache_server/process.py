"""One serving process: uvicorn around the application, and a quick and quiet end."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from neffcache_server.app import create_app
from neffcache_server.logs import log_config
from neffcache_server.settings import ServerSettings
from neffcache_server.state import State


def serve_process(
    settings: ServerSettings, listener: socket.socket, ready: Callable[[], None], lifeline: int | None = None
) -> int:
    """Serve on `listener` until SIGTERM, SIGINT or the end of `lifeline`; returns the exit code.

    `ready` is called once when requests are answered.
    """
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        log_config=log_config(settings.log_level, settings.log_format),
        log_level=settings.log_level,
        access_log=settings.access_log,
        timeout_graceful_shutdown=settings.shutdown_seconds,
        proxy_headers=True,
        forwarded_allow_ips=settings.forwarded_allow_ips,
        server_header=False,
        # Ten thousand ranks may knock at the same moment.
        backlog=16384,
    )
    server = _Server(config, ready, lambda: _stop_waiting(app.state), lifeline)
    with asyncio.Runner() as runner:
        runner.run(server.serve([listener]))
    return 0 if server.started else 1


class _Server(uvicorn.Server):
    """uvicorn with our ready line, and signals that wake waiters before connections are closed."""

    def __init__(
        self,
        config: uvicorn.Config,
        ready: Callable[[], None],
        stop_waiting: Callable[[], None],
        lifeline: int | None,
    ) -> None:
        super().__init__(config)
        self._ready = ready
        self._stop_waiting = stop_waiting
        self._lifeline = lifeline

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn would raise the signal once more at the end: exit by signal, KeyboardInterrupt on the terminal.
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        if self._lifeline is not None:
            loop.add_reader(self._lifeline, self._on_parents_end, self._lifeline)
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

    def _on_parents_end(self, lifeline: int) -> None:
        asyncio.get_running_loop().remove_reader(lifeline)
        self._on_signal()


def _stop_waiting(app_state: object) -> None:
    state: State | None = getattr(app_state, "neffcache", None)
    if state is not None:
        state.leases.stop()
