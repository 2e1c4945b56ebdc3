"""Old code runs on the new schema: what a migration may do while servers of the version before still run.

For every revision a program is made up that knows the schema of that revision and nothing newer. Its statements have
to work on every later revision, on both databases. (That today's program runs on a later schema without asking which
is in test_server_migrations_postgres.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.script import ScriptDirectory
from neffcache_server.database import migrate
from neffcache_server.problems import SetupError
from sqlalchemy import Connection, text
from support.cache_state import migrated, server_settings
from support.old_schema import OldProgram, Schema, differences
from support.postgres import Postgres

Database = Callable[[Callable[[Connection], Any]], Any]
REVISIONS = [r.revision for r in ScriptDirectory.from_config(migrate.alembic_config()).walk_revisions()][::-1]


def opened(url: str) -> Database:
    """To be called with what to do on a connection, in one transaction."""
    return lambda act: asyncio.run(migrate._with_connection(url, act))


@pytest.fixture(params=["sqlite", "postgres"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    if request.param == "sqlite":
        return opened(f"sqlite:///{tmp_path / 'db'}")
    postgres: Postgres = request.getfixturevalue("postgres")
    return opened(postgres.url(postgres.create_empty()))


def upgrade(revision: str) -> Callable[[Connection], None]:
    return lambda connection: command.upgrade(migrate.alembic_config(connection), revision)


def rows(schema: Schema) -> Callable[[Connection], dict[str, int]]:
    return lambda connection: {
        name: connection.execute(text(f"SELECT count(*) FROM {name}")).scalar_one() for name in schema.tables
    }


def test_program_of_every_revision_goes_on_with_all_that_come_later(empty: Database) -> None:
    """Nothing is dropped, renamed, narrowed or demanded that an older program does not know of, and no row is lost.

    Where a revision removes what its predecessors had stopped using, say so here.
    """
    database = empty
    database(upgrade(REVISIONS[0]))
    programs: list[OldProgram] = []
    for before, after in pairwise(REVISIONS):
        schema: Schema = database(Schema.read)
        programs.append(OldProgram(schema))
        database(programs[-1].work)
        database(programs[-1].leave_rows)
        kept = database(rows(schema))
        database(upgrade(after))
        assert database(lambda connection, schema=schema: differences(schema, connection)) == [], (before, after)
        assert database(rows(schema)) == kept, (before, after)
        database(programs[-1].work)
    for program in programs:
        database(program.work)


# The check is checked: each of these statements stands for a migration.


@pytest.fixture(params=["sqlite", "postgres"])
def newest(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Database, Schema]]:
    """A database of the newest revision, and what its program knows."""
    if request.param == "sqlite":
        migrated(server_settings(tmp_path))
        database = opened(f"sqlite:///{tmp_path / 'neffcache.sqlite3'}")
        yield database, database(Schema.read)
        return
    postgres: Postgres = request.getfixturevalue("postgres")
    name = postgres.take()
    database = opened(postgres.url(name))
    yield database, database(Schema.read)
    postgres.give_back(name)


class _Undo(Exception):
    pass


def tried(newest: tuple[Database, Schema], statement: str) -> tuple[str, str]:
    """(the differences that `statement` makes, what the database says to the program of before).

    PostgreSQL undoes all of it; on SQLite each test has a database of its own.
    """
    database, schema = newest
    found: list[str] = []

    def act(connection: Connection) -> None:
        connection.execute(text(statement))
        found.append("\n".join(differences(schema, connection)))
        OldProgram(schema).work(connection)
        raise _Undo

    try:
        database(act)
    except _Undo:
        return found[0], ""
    except (SetupError, AssertionError) as exc:
        return found[0], str(exc)
    raise RuntimeError


@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        ("ALTER TABLE entries DROP COLUMN compile_seconds", "entries.compile_seconds is gone"),
        ("ALTER TABLE entries RENAME COLUMN target TO goal", "entries.target is gone"),
        ("DROP TABLE pulse", "table pulse is gone"),
        ("ALTER TABLE pulse RENAME TO heartbeat", "table pulse is gone"),
    ],
)
def test_what_is_taken_away_is_found(newest: tuple[Database, Schema], statement: str, sentence: str) -> None:
    found, complaint = tried(newest, statement)
    assert sentence in found
    assert complaint


@pytest.mark.parametrize("newest", ["postgres"], indirect=True)
@pytest.mark.parametrize(
    ("statement", "sentence", "fails"),
    [
        (
            "ALTER TABLE entries ADD COLUMN origin text NOT NULL",
            "entries.origin is new, NOT NULL and has no default",
            True,
        ),
        ("ALTER TABLE entries ALTER COLUMN target SET NOT NULL", "entries.target does not take NULL any more", True),
        ("ALTER TABLE entries ALTER COLUMN hits DROP DEFAULT", "entries.hits has no default any more", True),
        ("ALTER TABLE leases ALTER COLUMN job TYPE varchar(1)", "leases.job was VARCHAR(length=255)", True),
        ("ALTER TABLE leases ALTER COLUMN rank TYPE text", "leases.rank was BIGINT() and is TEXT()", True),
        ("CREATE UNIQUE INDEX one_host ON entries (host)", "entries: host has to be unique", False),
        # No list of differences knows of these; the statements do.
        ("ALTER TABLE tokens ADD CHECK (role <> 'read')", "", True),
    ],
)
def test_what_is_demanded_is_found(
    newest: tuple[Database, Schema], statement: str, sentence: str, fails: bool
) -> None:
    found, complaint = tried(newest, statement)
    assert sentence in found
    assert bool(complaint) == fails


@pytest.mark.parametrize(
    "statement",
    [
        "ALTER TABLE entries ADD COLUMN origin text NOT NULL DEFAULT ''",
        "ALTER TABLE entries ADD COLUMN origin text",
        "CREATE TABLE origins (name text NOT NULL PRIMARY KEY, weight text NOT NULL)",
        "CREATE INDEX by_host ON entries (host)",
    ],
)
def test_what_old_code_does_not_notice_is_allowed(newest: tuple[Database, Schema], statement: str) -> None:
    assert tried(newest, statement) == ("", "")
