"""Models and migrations."""

from __future__ import annotations

from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from neffcache_server.database.migrate import alembic_config, migrations_dir, upgrade
from neffcache_server.database.models import metadata
from sqlalchemy import create_engine, inspect, text
from sqlalchemy.exc import IntegrityError


def test_migrations_make_what_the_models_say(tmp_path: Path) -> None:
    upgrade(f"sqlite:///{tmp_path / 'db'}")
    engine = create_engine(f"sqlite:///{tmp_path / 'db'}")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    engine.dispose()


def test_migrations_go_down_again(tmp_path: Path) -> None:
    upgrade(f"sqlite:///{tmp_path / 'db'}")
    engine = create_engine(f"sqlite:///{tmp_path / 'db'}")
    with engine.begin() as connection:
        command.downgrade(alembic_config(connection), "base")
        assert set(inspect(connection).get_table_names()) == {"alembic_version"}
    engine.dispose()


def test_migrations_are_found(tmp_path: Path) -> None:
    assert (migrations_dir() / "versions").is_dir()


def test_database_itself_refuses_a_second_live_lease(tmp_path: Path) -> None:
    upgrade(f"sqlite:///{tmp_path / 'db'}")
    engine = create_engine(f"sqlite:///{tmp_path / 'db'}")
    insert = text(
        "INSERT INTO leases (lease_id, namespace, key, status, confirmed, retry_failed, granted_at, expires_at) "
        "VALUES (:lease, 'n', 'k', :status, 0, 0, 0, 0)"
    )
    with engine.connect() as connection:
        connection.execute(insert, {"lease": "1", "status": "live"})
        connection.execute(insert, {"lease": "2", "status": "superseded"})
        with pytest.raises(IntegrityError):
            connection.execute(insert, {"lease": "3", "status": "live"})
    engine.dispose()
