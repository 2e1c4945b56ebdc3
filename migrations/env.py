"""Alembic's entry: run by `neffcache_server.database.migrate`, which hands over a connection."""

from __future__ import annotations

from alembic import context
from neffcache_server.database.models import metadata

_connection = context.config.attributes.get("connection")
if _connection is None:
    raise SystemExit("run `neffcache db upgrade` instead of alembic itself")

context.configure(
    connection=_connection, target_metadata=metadata, render_as_batch=_connection.dialect.name == "sqlite"
)
with context.begin_transaction():
    context.run_migrations()
