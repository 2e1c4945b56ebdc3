"""Reports in; live state, jobs and their figures out."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse
from neffcache_client.wire import JobList, JobShow, Live, ReportsAnswer, ReportsRequest, check_namespace
from pydantic import AfterValidator

from neffcache_server.auth import require
from neffcache_server.problems import JobUnknown, documented
from neffcache_server.state import AppState, Namespace

router = APIRouter(prefix="/v1", tags=["statistics"])
AnyNamespace = Annotated[str | None, AfterValidator(lambda n: n and check_namespace(n)), Query(max_length=63)]


@router.post("/ns/{namespace}/reports")
@require("write")
async def report(namespace: Namespace, body: ReportsRequest, state: AppState) -> ReportsAnswer:
    """What clients noted that the server did not see: local hits, fallbacks, compiles that cannot be cached."""
    return ReportsAnswer(taken=await state.recorder.take(namespace, body))


@router.get("/ns/{namespace}/jobs")
@require("read")
async def list_jobs(
    namespace: Namespace, state: AppState, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> JobList:
    """Jobs, latest first."""
    await state.recorder.flush()
    async with state.database.read() as db:
        return JobList(jobs=await state.history.jobs(db, namespace, limit=limit))


@router.get("/ns/{namespace}/job", responses=documented(JobUnknown))
@require("read")
async def show_job(
    namespace: Namespace,
    state: AppState,
    name: Annotated[str, Query(max_length=255)],
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> JobShow:
    """One job and its ranks."""
    await state.recorder.flush()
    async with state.database.read() as db:
        job = await state.history.job(db, namespace, name)
        if job is None:
            raise JobUnknown("No request of that job was seen in this namespace, or it is long ago.")
        return JobShow(job=job, ranks=await state.history.ranks(db, namespace, name, limit))


@router.get("/events", response_class=StreamingResponse)
@require("read", in_query=True)
async def events(state: AppState, namespace: AnyNamespace = None) -> StreamingResponse:
    """Server-sent events: `live`, with what `/v1/live` answers, within a second of every change."""
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(state.live.feed(namespace), media_type="text/event-stream", headers=headers)


@router.get("/live")
@require("read", in_query=True)
async def live(state: AppState, namespace: AnyNamespace = None) -> Live:
    """Leases that run now and how much happened in the last minute."""
    return await state.live.read(namespace)
