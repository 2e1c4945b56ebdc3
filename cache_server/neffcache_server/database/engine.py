"""Engines, and the two ways to use them: `read` and `write`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NewType

from sqlalchemy import event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError, IntegrityError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from neffcache_server.database.clock import DatabaseClock
from neffcache_server.problems import DatabaseUnavailable

ReadConnection = NewType("ReadConnection", AsyncConnection)
WriteConnection = NewType("WriteConnection", ReadConnection)

_SQLITE_PRAGMAS = (
    "PRAGMA journal_mode = WAL",
    # FULL: an answered publish survives a power cut, and an epoch that was given out is never given out again.
    "PRAGMA synchronous = FULL",
)


class Database:
    """One database. Make it with `open_database`, end it with `close`."""

    def __init__(self, url: URL, reader: AsyncEngine, writer: AsyncEngine) -> None:
        self.url = url
        self.dialect = url.get_backend_name()
        self.clock = DatabaseClock(self.dialect)
        self.on_fault: Callable[[], None] = lambda: None
        """Called when the database failed: leases may have run out while nobody could renew them."""
        self._reader = reader
        self._writer = writer

    @asynccontextmanager
    async def read(self) -> AsyncIterator[ReadConnection]:
        """A connection for single statements that change nothing. Raises DatabaseUnavailable."""
        async with self._guarded(self._reader.connect()) as connection:
            yield ReadConnection(connection)

    @asynccontextmanager
    async def write(self) -> AsyncIterator[WriteConnection]:
        """A transaction: committed when the block ends, rolled back when it raises. Raises DatabaseUnavailable.

        The commit has happened when `async with` is left, so an answer may be sent after it. On SQLite the write lock
        is taken at the start (a lock taken half way cannot be waited for).
        """
        async with self._guarded(self._writer.begin()) as connection:
            yield WriteConnection(ReadConnection(connection))

    @asynccontextmanager
    async def _guarded(self, opening: Any) -> AsyncIterator[AsyncConnection]:
        opened = False
        try:
            async with opening as connection:
                opened = True
                yield connection
        except (IntegrityError, ProgrammingError):
            raise
        except (DBAPIError, PoolTimeout) as exc:
            self.on_fault()
            raise DatabaseUnavailable from exc
        except OSError as exc:
            # asyncpg lets a refused connection through as it is; an OSError from inside the block is not ours.
            if opened:
                raise
            self.on_fault()
            raise DatabaseUnavailable from exc

    async def close(self) -> None:
        """Close every connection."""
        await self._reader.dispose()
        if self._writer is not self._reader:
            await self._writer.dispose()


def open_database(url: str, *, busy_seconds: float = 30.0, readers: int = 4) -> Database:
    """Prepare engines for `url`; connects at first use."""
    parsed = async_url(url)
    if parsed.get_backend_name() == "sqlite":
        reader = _sqlite_engine(parsed, "BEGIN", busy_seconds, size=readers)
        # One writing connection: writers queue fairly in the pool. Several would poll SQLite's lock with sleeps.
        writer = _sqlite_engine(parsed, "BEGIN IMMEDIATE", busy_seconds, size=1)
        return Database(parsed, reader, writer)
    engine = create_async_engine(parsed, hide_parameters=True, pool_pre_ping=True, pool_size=10)
    return Database(parsed, engine, engine)


def async_url(url: str) -> URL:
    """`url` with the driver we use. Raises ValueError for a database that is not supported."""
    parsed = make_url(url)
    driver = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}.get(parsed.get_backend_name())
    if driver is None:
        raise ValueError(f"unsupported database {parsed.get_backend_name()!r}: use sqlite:///… or postgresql://…")
    return parsed.set(drivername=driver)


def _sqlite_engine(url: URL, begin: str, busy_seconds: float, size: int) -> AsyncEngine:
    engine = create_async_engine(
        url,
        # Lease ids are parameters, and errors with their parameters end up in logs.
        hide_parameters=True,
        connect_args={"timeout": busy_seconds},
        pool_size=size,
        max_overflow=0,
        pool_timeout=busy_seconds,
    )

    @event.listens_for(engine.sync_engine, "connect")
    def prepare(connection: Any, _record: Any) -> None:
        # The driver's own BEGIN comes late (before the first change) and is never IMMEDIATE.
        connection.isolation_level = None
        cursor = connection.cursor()
        for pragma in _SQLITE_PRAGMAS:
            cursor.execute(pragma)
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def start(connection: Any) -> None:
        connection.exec_driver_sql(begin)

    return engine
