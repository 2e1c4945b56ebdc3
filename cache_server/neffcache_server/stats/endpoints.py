"""Figures."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from neffcache_client.wire import Stats, check_namespace
from pydantic import AfterValidator

from neffcache_server.auth import require
from neffcache_server.state import AppState

router = APIRouter(prefix="/v1/stats", tags=["stats"])


@router.get("")
@require("read")
async def stats(
    state: AppState,
    namespace: Annotated[str, AfterValidator(check_namespace), Query(max_length=63)] | None = None,
) -> Stats:
    """Counters of one namespace, or of all."""
    await state.counter.flush()
    async with state.database.read() as db:
        return await state.stats.read(db, namespace)
