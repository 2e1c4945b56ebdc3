"""Look-ups of many keys at once: what they find, and which way they go on PostgreSQL."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from neffcache_server.database.models import entries
from neffcache_server.state import State
from sqlalchemy import event, insert, text
from support import backends
from support.cache_state import opened_state

pytestmark = pytest.mark.usefixtures("backend")

KEYS = [f"{n:064x}" for n in range(3000)]


async def fill(state: State) -> None:
    """Every third key is present, every third quarantined, and every third another namespace's."""
    row = {"size": 1000, "created_at": 1.0}
    kinds = [("default", "present"), ("default", "quarantined"), ("other", "present")]
    rows = [
        {**row, "key": key, "sha256": key, "namespace": kinds[n % 3][0], "state": kinds[n % 3][1]}
        for n, key in enumerate(KEYS)
    ]
    async with state.database.write() as db:
        await db.execute(insert(entries), rows)
        await db.execute(text("ANALYZE"))


async def look(state: State, keys: list[str]) -> list[str]:
    async with state.database.read() as db:
        found = await state.entries.present(db, "default", keys)
    assert all(artifact.sha256 == key for key, artifact in found.items())
    return sorted(found)


def test_a_look_up_finds_what_is_present_in_the_namespace_and_nothing_else(tmp_path: Path) -> None:
    async def check() -> None:
        async with opened_state(tmp_path) as state:
            await fill(state)
            for number in (0, 1, 2, 100, 1000):
                assert await look(state, KEYS[:number]) == KEYS[:number:3]
            assert await look(state, [KEYS[0], KEYS[0], "f" * 64, KEYS[3]]) == [KEYS[0], KEYS[3]]

    asyncio.run(check())


def test_look_ups_are_one_statement_along_the_hash_index(tmp_path: Path) -> None:
    """PostgreSQL's only: a statement for each number of keys would be parsed anew by every connection."""

    async def check() -> None:
        if not backends.current().shared:
            return
        async with opened_state(tmp_path) as state:
            await fill(state)
            seen: set[str] = set()
            arguments: list[Any] = []

            def note(_connection: Any, _cursor: Any, statement: str, given: Any, *_: Any) -> None:
                seen.add(statement)
                arguments[:] = given

            event.listen(state.database._reader.sync_engine, "before_cursor_execute", note)
            # Few at last: for a hundred of three thousand, reading the table is cheaper.
            for number in (100, 2, 5):
                await look(state, KEYS[:number])
            assert len(seen) == 1
            connection = await state.database.connect_driver()
            plan = await connection.fetch(f"EXPLAIN {seen.pop()}", *arguments)
            await connection.close()
            assert "ix_entries_key" in "\n".join(row[0] for row in plan)

    asyncio.run(check())
