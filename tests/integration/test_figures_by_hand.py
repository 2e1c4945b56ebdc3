"""Figures of the API and of the pages are those of the raw events, added up independently."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from neffcache_server.app import open_state
from support.by_hand import COLUMNS, check_everything, savings, write_year
from support.cache_state import migrated, rows, server_settings
from support.server import running_server

pytestmark = pytest.mark.usefixtures("backend")


def test_every_figure_is_that_of_the_raw_events(tmp_path: Path) -> None:
    """Total, by period, by job; a year of 2,400 requests. benchmarks/dashboard_scale.py does it at full size."""

    async def fill() -> None:
        state = open_state(migrated(server_settings(tmp_path / "data")))
        try:
            await write_year(state, requests=2400, jobs=12, graphs=60)
        finally:
            await state.database.close()

    asyncio.run(fill())
    raw = savings(rows(tmp_path / "data", f"SELECT {', '.join(COLUMNS)} FROM events ORDER BY id"))
    with running_server(tmp_path) as server:
        compared = check_everything(server.url, raw)
    assert compared == {"events": 2400, "periods": 3, "jobs": 12, "job pages": 12}
