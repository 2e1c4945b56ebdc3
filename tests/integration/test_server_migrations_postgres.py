"""Migrating a real PostgreSQL: in turns, within bounds, and while an older version still runs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from neffcache_server.database import migrate
from neffcache_server.database.models import metadata
from neffcache_server.problems import SetupError
from sqlalchemy import Connection
from support.postgres import Postgres


def neffcache_db(action: str, url: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "neffcache_server", "db", action, "--database-url", url]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_two_deployments_at_once_migrate_once(postgres: Postgres) -> None:
    url = postgres.url(postgres.create_empty())
    assert neffcache_db("check", url).returncode == 1
    with ThreadPoolExecutor() as both:
        first, second = both.map(lambda _: neffcache_db("upgrade", url), range(2))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout == second.stdout
    assert neffcache_db("check", url).returncode == 0


def test_migrations_make_in_postgres_what_the_models_say(postgres: Postgres) -> None:
    def differences(connection: Connection) -> list[object]:
        return list(compare_metadata(MigrationContext.configure(connection), metadata))

    url = postgres.url(postgres.take())
    assert asyncio.run(migrate._with_connection(url, differences)) == []


def test_upgrade_gives_up_when_a_table_stays_locked(postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody else would wait behind it for that table."""
    monkeypatch.setattr(migrate, "_LOCK_TIMEOUT", "100ms")
    name = postgres.create_empty()
    migrate.upgrade(postgres.url(name))
    postgres.execute(name, "UPDATE alembic_version SET version_num = '0001'")
    postgres.execute(name, "BEGIN; LOCK TABLE alembic_version IN ACCESS EXCLUSIVE MODE")
    try:
        with pytest.raises(SetupError, match="lock timeout"):
            migrate.upgrade(postgres.url(name))
    finally:
        postgres.execute(name, "ROLLBACK")


def test_an_older_version_goes_on_with_a_newer_schema(postgres: Postgres, tmp_path: Path) -> None:
    """An upgrade migrates first and then replaces replicas one by one; one that crashes meanwhile starts."""
    name = postgres.create_empty()
    migrate.upgrade(postgres.url(name))
    postgres.execute(name, "UPDATE alembic_version SET version_num = '9999'")
    assert migrate.is_current(postgres.url(name))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql://postgres@127.0.0.1:{port}/nowhere", "nowhere"),
        ("postgresql://postgres@127.0.0.1:9/x", "cannot be used"),
        ("mysql://localhost/x", "unsupported database"),
        ("postgresql", "cannot be used"),
    ],
)
def test_database_that_cannot_be_used_is_a_sentence(postgres: Postgres, url: str, words: str) -> None:
    result = neffcache_db("check", url.format(port=postgres.port))
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
