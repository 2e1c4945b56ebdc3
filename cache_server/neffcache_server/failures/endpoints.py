"""Calls on stored failures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query

from neffcache_server.auth import require
from neffcache_server.failures.repository import KeyFailure
from neffcache_server.leases.repository import LeaseRepository
from neffcache_server.problems import FailureUnknown, documented
from neffcache_server.state import AppState, Key, Namespace

router = APIRouter(prefix="/v1/ns/{namespace}/failures", tags=["failures"])


@dataclass(slots=True, kw_only=True)
class FailureList:
    """Failures in force, latest first."""

    failures: list[KeyFailure]


@router.get("")
@require("read")
async def list_failures(
    namespace: Namespace, state: AppState, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> FailureList:
    """Keys that are answered with a failure at present."""
    async with state.database.read() as db:
        return FailureList(failures=await state.failures.in_force(db, namespace, limit))


@router.delete("/{key}", status_code=204, responses=documented(FailureUnknown))
@require("write")
async def clear_failure(namespace: Namespace, key: Key, state: AppState) -> None:
    """Forget a key's failures, so that the next rank that asks may compile it."""
    repository = LeaseRepository(state.database)
    async with state.database.write() as db:
        if not await repository.clear_failures(db, namespace, key):
            raise FailureUnknown
    await state.hub.announce((namespace, key))
