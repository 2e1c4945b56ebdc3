"""Probes: is the process alive, can it serve."""

from __future__ import annotations

from fastapi import APIRouter
from sqlalchemy import select

from neffcache_server.auth import public
from neffcache_server.database.models import entries
from neffcache_server.problems import DatabaseUnavailable, ShuttingDown, StorageUnavailable, documented
from neffcache_server.state import AppState

router = APIRouter(tags=["operations"])


@router.get("/livez")
@public
async def livez() -> dict[str, str]:
    """The process answers. Looks at nothing else: a restart does not mend a database."""
    return {"status": "alive"}


@router.get("/readyz", responses=documented(DatabaseUnavailable, StorageUnavailable, ShuttingDown))
@public
async def readyz(state: AppState) -> dict[str, str]:
    """Database and store can be used, or the store has not been away for long: then `store` says why."""
    if state.leases.stopping:
        raise ShuttingDown
    async with state.database.read() as db:
        await db.execute(select(entries.c.key).limit(1))
    trouble = await state.store_health.trouble()
    return {"status": "ready"} if trouble is None else {"status": "ready", "store": trouble}
