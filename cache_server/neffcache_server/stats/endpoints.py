"""Figures."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from neffcache_client.wire import Stats, check_namespace
from pydantic import AfterValidator

from neffcache_server.auth import require
from neffcache_server.problems import InvalidRequest, JobUnknown, documented
from neffcache_server.state import AppState

router = APIRouter(prefix="/v1/stats", tags=["stats"])


@router.get("", responses=documented(JobUnknown))
@require("read", in_query=True)
async def stats(
    state: AppState,
    namespace: Annotated[str, AfterValidator(check_namespace), Query(max_length=63)] | None = None,
    job: Annotated[str | None, Query(max_length=255, description="Only this job; wants a namespace.")] = None,
    since_seconds: Annotated[
        float | None, Query(ge=0, description="Only the hours from that long ago on, as long as hours are kept.")
    ] = None,
) -> Stats:
    """Counters of one namespace, or of all; since the database was made, of a period, or of one job."""
    await state.counter.flush()
    await state.recorder.flush()
    async with state.database.read() as db:
        if job is not None:
            if namespace is None:
                raise InvalidRequest("job: say which namespace it belongs to")
            found = await state.history.job(db, namespace, job)
            if found is None:
                raise JobUnknown("No request of that job was seen in this namespace, or it is long ago.")
            return await state.stats.of_job(db, namespace, found)
        if since_seconds is not None:
            now = await state.history.now(db)
            return await state.stats.of_period(db, namespace, now - since_seconds)
        return await state.stats.read(db, namespace)
