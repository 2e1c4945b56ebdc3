"""Alembic, driven from here: `upgrade`, `is_current`, and what `serve` needs."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, make_url, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import create_async_engine

from neffcache_server.problems import SetupError
from neffcache_server.settings import ServerSettings

if TYPE_CHECKING:
    from alembic.config import Config

_log = logging.getLogger(__name__)

# Two deployments that upgrade at the same moment take turns.
_ADVISORY_LOCK = 0x6E656666
_TURN_TIMEOUT = "10min"
# While a migration waits for a table, every newcomer to that table waits behind it. Rather fail, and be run again.
_LOCK_TIMEOUT = "10s"


def migrations_dir() -> Path:
    """The folder of the migrations: packaged with us, or beside us in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "migrations", package.parents[1] / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise SetupError("the database migrations are not installed: install neffcache[server] again")


def upgrade(url: str) -> str:
    """Migrate the database to the newest revision, which is returned. Raises SetupError."""
    return str(asyncio.run(_with_connection(url, _upgrade)))


def is_current(url: str) -> bool:
    """True when the database is at the newest revision, or PostgreSQL at a newer one. Raises SetupError."""
    return bool(asyncio.run(_with_connection(url, _is_current)))


def ensure_schema(settings: ServerSettings) -> None:
    """Migrate the embedded database; refuse any other that is not migrated. Raises SetupError."""
    url = settings.effective_database_url
    if is_current(url):
        return
    if not settings.embedded:
        raise SetupError("the database is not at this version's schema: run `neffcache db upgrade` first")
    upgrade(url)


def alembic_config(connection: Connection | None = None) -> Config:
    """Alembic's configuration, without an ini file."""
    from alembic.config import Config

    config = Config()
    # A percent sign would be taken for an interpolation.
    config.set_main_option("script_location", str(migrations_dir()).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


async def _with_connection(url: str, act: Any) -> Any:
    from neffcache_server.database.engine import async_url, driver_errors

    try:
        faults = (SQLAlchemyError, OSError, *driver_errors(async_url(url).get_backend_name()))
        engine = create_async_engine(async_url(url), hide_parameters=True)
    except (SQLAlchemyError, ValueError) as exc:
        raise SetupError(f"the database URL cannot be used: {exc}") from exc
    path = engine.url.database or ""
    if engine.dialect.name == "sqlite" and not Path(path).absolute().parent.is_dir():
        # Found out by connecting, the driver's thread would complain to a loop that is closed by then.
        raise SetupError(f"the database {path} cannot be used: its folder does not exist")
    try:
        async with engine.begin() as connection:
            return await connection.run_sync(act)
    except Exception as exc:
        if not isinstance(exc, faults):
            raise
        shown = make_url(url).render_as_string(hide_password=True)
        raise SetupError(f"the database {shown} cannot be used: {_reason(exc)}") from exc
    finally:
        await engine.dispose()


def _upgrade(connection: Connection) -> str:
    from alembic import command
    from alembic.script import ScriptDirectory

    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SET LOCAL lock_timeout = '{_TURN_TIMEOUT}'"))
        connection.execute(text(f"SELECT pg_advisory_xact_lock({_ADVISORY_LOCK})"))
        connection.execute(text(f"SET LOCAL lock_timeout = '{_LOCK_TIMEOUT}'"))
    config = alembic_config(connection)
    command.upgrade(config, "head")
    return str(ScriptDirectory.from_config(config).get_current_head())


def _is_current(connection: Connection) -> bool:
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory

    script = ScriptDirectory.from_config(alembic_config())
    current = MigrationContext.configure(connection).get_current_revision()
    if current is not None and current not in {revision.revision for revision in script.walk_revisions()}:
        if connection.dialect.name == "sqlite":
            raise SetupError(f"the database was made by a newer version of neffcache (revision {current})")
        # In the middle of a rolling upgrade: migrated already, this replica's turn is still to come. Migrations only
        # add, and what they leave unused is removed a release later, so this version runs on the new schema.
        _log.warning("the database is at revision %s, of a newer version of neffcache than this", current)
        return True
    return current == script.get_current_head()


def _reason(exc: Exception) -> str:
    original = getattr(exc, "orig", None) or exc
    return str(original).strip().splitlines()[0] if str(original).strip() else type(original).__name__
