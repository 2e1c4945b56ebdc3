"""Calls that explain misses."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query
from neffcache_client.explanation import Explanation, JobExplanation
from neffcache_client.wire import MIN_KEY_PREFIX, SummaryRequest

from neffcache_server.auth import require
from neffcache_server.problems import JobUnknown, KeyAmbiguous, KeyUnknown, documented
from neffcache_server.state import AppState, Key, Namespace

router = APIRouter(prefix="/v1/ns/{namespace}", tags=["explain"])

KeyPrefix = Annotated[
    str, Path(pattern=f"^[0-9a-f]{{{MIN_KEY_PREFIX},64}}$", description="A key, or enough of its first digits.")
]


@router.get("/entries/{key}/explain", responses=documented(KeyUnknown, KeyAmbiguous))
@require("read")
async def explain(namespace: Namespace, key: KeyPrefix, state: AppState) -> Explanation:
    """Why a key missed: the nearest stored key and the factors that differ. Also for keys with nothing published."""
    return await state.explain.explain(namespace, key)


@router.get("/explain", responses=documented(JobUnknown))
@require("read")
async def explain_job(
    namespace: Namespace, state: AppState, job: Annotated[str, Query(min_length=1, max_length=255)]
) -> JobExplanation:
    """What the ranks of a job missed, in groups of near-identical graphs, and why.

    A graph's ranks are all that asked for it, those that came late enough for a hit too.
    """
    await state.recorder.flush()
    return await state.explain.explain_job(namespace, job)


@router.post("/keys/{key}/summary", status_code=204, responses=documented(KeyUnknown))
@require("write")
async def keep_summary(namespace: Namespace, key: Key, body: SummaryRequest, state: AppState) -> None:
    """Tell what the graph of a missed key consists of. The first summary of a key is kept."""
    await state.explain.keep_summary(namespace, key, body.summary)
