"""/metrics."""

from __future__ import annotations

from anyio import to_thread
from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from neffcache_server.auth import require
from neffcache_server.metrics.families import Scraper, exposition
from neffcache_server.state import AppState

router = APIRouter(tags=["operations"])


@router.get("/metrics", response_class=Response)
@require("read")
async def metrics(state: AppState, request: Request) -> Response:
    """Figures in Prometheus' text format. Replicas tell the same: scrape their common address."""
    scraper: Scraper | None = getattr(request.app.state, "neffcache_scraper", None)
    if scraper is None:
        scraper = request.app.state.neffcache_scraper = Scraper(state)
    snapshot = await scraper.read()
    return Response(await to_thread.run_sync(exposition, snapshot), media_type=CONTENT_TYPE_LATEST)
