"""Engines, and the two ways to use them: `read` and `write`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NewType

from sqlalchemy import event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from neffcache_server.database.clock import DatabaseClock
from neffcache_server.problems import DatabaseUnavailable, InvalidRequest, SetupError
from neffcache_server.settings import ServerSettings

ReadConnection = NewType("ReadConnection", AsyncConnection)
WriteConnection = NewType("WriteConnection", ReadConnection)

_OUT_OF_RANGE = "a value in the request is out of the range that can be stored"
_SQLITE_PRAGMAS = (
    "PRAGMA journal_mode = WAL",
    # FULL: an answered publish survives a power cut, and an epoch that was given out is never given out again.
    "PRAGMA synchronous = FULL",
)


class Database:
    """One database. Make it with `open_database`, end it with `close`."""

    def __init__(
        self,
        url: URL,
        reader: AsyncEngine,
        writer: AsyncEngine,
        clock: DatabaseClock,
        connect_args: dict[str, Any] | None = None,
    ) -> None:
        self.dialect = url.get_backend_name()
        self.clock = clock
        self.on_fault: Callable[[], None] = lambda: None
        """Called when the database failed: leases may have run out while nobody could renew them."""
        self._reader = reader
        self._writer = writer
        self._url = url
        self._connect_args = connect_args or {}
        self._faults = (DBAPIError, PoolTimeout, TimeoutError, *driver_errors(self.dialect))

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
        except OverflowError as exc:
            # SQLite's driver lets a number that it cannot hold through as it is.
            raise InvalidRequest(_OUT_OF_RANGE) from exc
        except Exception as exc:
            if not isinstance(exc, self._faults) and (opened or not isinstance(exc, OSError)):
                # asyncpg lets a refused connection through as it is; an OSError from inside the block is not ours.
                raise
            if _is_bad_value(exc):
                raise InvalidRequest(_OUT_OF_RANGE) from exc
            self.on_fault()
            raise DatabaseUnavailable from exc

    async def connect_driver(self) -> Any:
        """A connection of the bare driver (asyncpg), outside of the pool, the caller's to close. PostgreSQL only."""
        import asyncpg

        arguments, options = self._writer.dialect.create_connect_args(self._url)
        for ours in ("prepared_statement_cache_size", "prepared_statement_name_func"):
            options.pop(ours, None)
        return await asyncpg.connect(*arguments, **{**options, **self._connect_args})

    async def close(self) -> None:
        """Close every connection."""
        await self._reader.dispose()
        if self._writer is not self._reader:
            await self._writer.dispose()


def open_database(settings: ServerSettings, *, readers: int = 4, clock: DatabaseClock | None = None) -> Database:
    """Prepare engines for the settings' database; connects at first use. Tests bring their own `clock`.

    Raises SetupError for a URL that cannot be used.
    """
    parsed = _checked_url(settings.effective_database_url)
    clock = clock or DatabaseClock(parsed.get_backend_name())
    busy_seconds = settings.busy_seconds
    if parsed.get_backend_name() == "sqlite":
        reader = _sqlite_engine(parsed, "BEGIN", busy_seconds, size=readers)
        # One writing connection: writers queue fairly in the pool. Several would poll SQLite's lock with sleeps.
        writer = _sqlite_engine(parsed, "BEGIN IMMEDIATE", busy_seconds, size=1)
        return Database(parsed, reader, writer, clock)
    connect_args = _postgres_options(settings)
    engine = _postgres_engine(parsed, settings, connect_args)
    return Database(parsed, engine, engine, clock, connect_args)


def driver_errors(dialect: str) -> tuple[type[Exception], ...]:
    """What the driver raises past SQLAlchemy when it cannot connect (starting up, no such database, password)."""
    if dialect != "postgresql":
        return ()
    import asyncpg

    return asyncpg.PostgresError, asyncpg.InterfaceError


def _is_bad_value(exc: Exception) -> bool:
    """True for PostgreSQL's class 22 and its driver's own check of parameters: the database is well."""
    if not isinstance(exc, DBAPIError):
        return False
    cause = exc.orig.__cause__ if exc.orig is not None else None
    return str(getattr(exc.orig, "sqlstate", None) or "").startswith("22") or isinstance(cause, ValueError)


def async_url(url: str) -> URL:
    """`url` with the driver we use. Raises ValueError for a database that is not supported."""
    parsed = make_url(url)
    driver = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}.get(parsed.get_backend_name())
    if driver is None:
        raise ValueError(f"unsupported database {parsed.get_backend_name()!r}: use sqlite:///… or postgresql://…")
    if parsed.get_backend_name() == "sqlite" and parsed.database in (None, "", ":memory:"):
        # Each connection would have a database of its own.
        raise ValueError("SQLite needs a file: sqlite:////an/absolute/path")
    return parsed.set(drivername=driver)


def _checked_url(url: str) -> URL:
    try:
        return async_url(url)
    except (ValueError, ArgumentError) as exc:
        raise SetupError(f"NEFFCACHE_SERVER_DATABASE_URL cannot be used: {exc}") from exc


def _postgres_options(settings: ServerSettings) -> dict[str, Any]:
    milliseconds = str(int(settings.database_statement_seconds * 1000))
    return {
        "timeout": settings.database_connect_seconds,
        # The driver's own limit, for a server that has gone silent, lies above what the server enforces.
        "command_timeout": settings.database_statement_seconds + 5.0,
        "server_settings": {
            "application_name": "neffcache",
            "statement_timeout": milliseconds,
            "idle_in_transaction_session_timeout": milliseconds,
        },
    }


def _postgres_engine(url: URL, settings: ServerSettings, connect_args: dict[str, Any]) -> AsyncEngine:
    # READ COMMITTED on purpose. A transition locks its key's row first and reads after that, each statement seeing
    # what was committed before it, and every change repeats its condition in WHERE. Stricter levels would only add
    # serialisation failures that have to be retried.
    return create_async_engine(
        url,
        hide_parameters=True,
        isolation_level="READ COMMITTED",
        pool_size=settings.database_pool_size,
        max_overflow=0,
        pool_timeout=settings.database_pool_seconds,
        # After a restart of PostgreSQL every pooled connection is dead; without the ping each would cost a request.
        pool_pre_ping=True,
        pool_recycle=1800,
        connect_args=connect_args,
    )


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
