"""What an operator runs: replicas of the server behind HAProxy, on one PostgreSQL and one bucket."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from support import backends
from support.backends import Production
from support.leash import Leashed, free_port, listens
from support.postgres import Postgres
from support.s3 import S3
from support.server import ServerProcess, running_server

_HAPROXY = """
global
  maxconn 2000
defaults
  mode http
  timeout connect 2s
  timeout client 60s
  timeout server 60s
  timeout check 5s
  retries 3
  option redispatch
  # A connection that broke before the answer may be tried elsewhere: every call of the API can be repeated.
  retry-on conn-failure empty-response response-timeout
frontend door
  bind 127.0.0.1:{port}
  default_backend replicas
backend replicas
  balance roundrobin
  option httpchk GET /readyz
  default-server check inter 1s fall 3 rise 1 on-marked-down shutdown-sessions
{servers}
"""


class Deployment:
    """Replicas and the door in front of them."""

    def __init__(self, replicas: list[ServerProcess], url: str, production: Production, folder: Path) -> None:
        self.replicas = replicas
        self.url = url
        self.production = production
        self._folder = folder

    def rows(self, statement: str) -> list[tuple[object, ...]]:
        """What SQL says."""
        return self.production.rows(self._folder, statement)


@contextmanager
def running_deployment(
    folder: Path, postgres: Postgres, s3: S3, *, count: int = 2, env: dict[str, str] | None = None
) -> Iterator[Deployment]:
    """`count` replicas behind HAProxy; gone with the block."""
    production = Production(postgres, s3)
    state = folder / "state"
    with backends.using(production), ExitStack() as stack:
        shared = {**backends.environment(state), **(env or {})}
        replicas = [
            stack.enter_context(running_server(folder / f"replica{n}", env=shared, arguments=("--log-level", "info")))
            for n in range(count)
        ]
        port = free_port()
        servers = "\n".join(f"  server r{n} 127.0.0.1:{r.port}" for n, r in enumerate(replicas))
        config = folder / "haproxy.cfg"
        config.write_text(_HAPROXY.format(port=port, servers=servers))
        door = Leashed(["haproxy", "-db", "-f", str(config)], log=folder / "haproxy.log")
        stack.callback(door.stop, signal.SIGKILL)
        door.wait_ready(lambda: listens(port))
        yield Deployment(replicas, f"http://127.0.0.1:{port}", production, state)
