"""The FastAPI application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from typing import Any

from fastapi import Depends, FastAPI

from neffcache_server.auth.authenticator import Authenticator
from neffcache_server.auth.endpoints import router as auth
from neffcache_server.auth.requirement import authorise
from neffcache_server.blobs.endpoints import router as blobs
from neffcache_server.blobs.presigned import PresignedUploads
from neffcache_server.blobs.service import BlobService
from neffcache_server.dashboard.endpoints import router as dashboard
from neffcache_server.database.clock import DatabaseClock
from neffcache_server.database.engine import open_database
from neffcache_server.entries.endpoints import router as entries
from neffcache_server.entries.repository import EntryRepository
from neffcache_server.explain.endpoints import router as explain
from neffcache_server.explain.misses import MissLog
from neffcache_server.explain.service import ExplainService
from neffcache_server.failures.endpoints import router as failures
from neffcache_server.failures.repository import FailureRepository
from neffcache_server.gc.loop import collect_every
from neffcache_server.handlers import install_handlers, problem_openapi
from neffcache_server.health.endpoints import router as health
from neffcache_server.health.store_health import StoreHealth
from neffcache_server.kit.body_limit import BodyLimit
from neffcache_server.kit.hub import EventHub, LocalHub
from neffcache_server.kit.notify_hub import NotifyHub
from neffcache_server.kit.request_id import RequestIds
from neffcache_server.kit.tracing import Traced, open_tracing
from neffcache_server.leases.endpoints import router as leases
from neffcache_server.leases.publish import PublishService
from neffcache_server.leases.service import LeaseService
from neffcache_server.metrics.endpoints import router as metrics
from neffcache_server.problems import ServerProblem
from neffcache_server.recording.endpoints import router as recording
from neffcache_server.recording.history import History
from neffcache_server.recording.live import LiveView
from neffcache_server.recording.recorder import Recorder
from neffcache_server.settings import ServerSettings
from neffcache_server.state import State
from neffcache_server.stats.counters import HitCounter
from neffcache_server.stats.endpoints import router as stats
from neffcache_server.stats.repository import StatsRepository
from neffcache_server.storage.open import open_store

_PURGE_SECONDS = 600.0
# JSON bodies; blobs have their own, much larger limit. Factors and log tails are the largest things in them.
_MAX_JSON_BYTES = 1 << 20


def create_app(settings: ServerSettings) -> FastAPI:
    """An application that opens its database and store when it starts, and closes them when it stops.

    The database must be migrated already (`neffcache db upgrade`; `neffcache serve` does it for SQLite).
    """
    tracing = open_tracing()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state = open_state(settings)
        app.state.neffcache = state
        tasks: list[asyncio.Task[Any]] = []
        try:
            await state.leases.start()
            tasks += [
                asyncio.create_task(state.hub.run()),
                asyncio.create_task(state.leases.outage.watch()),
                asyncio.create_task(state.counter.flush_every(settings.flush_seconds)),
                asyncio.create_task(state.misses.flush_every(settings.flush_seconds)),
                asyncio.create_task(state.recorder.flush_every(settings.flush_seconds)),
                asyncio.create_task(state.recorder.forget_every(_PURGE_SECONDS)),
                asyncio.create_task(state.leases.purge_every(_PURGE_SECONDS)),
                asyncio.create_task(state.explain.purge_every(_PURGE_SECONDS)),
                asyncio.create_task(collect_every(state.database, state.store, settings)),
            ]
            yield
        finally:
            await _close(state, tasks)
            if tracing is not None:
                tracing.close()

    app = FastAPI(
        title="neffcache",
        version=version("neffcache"),
        description="Distributed compilation cache for AWS Trainium. Errors are RFC 9457 problem documents.",
        lifespan=lifespan,
        # FastAPI's own spans name paths, which hold keys and lease ids. (Versions that make none ignore this.)
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    routers = (leases, blobs, entries, explain, failures, stats, recording, health, metrics, auth, dashboard)
    for router in routers:
        app.include_router(router, dependencies=[Depends(authorise)])
    app.add_middleware(BodyLimit, limit=_MAX_JSON_BYTES)
    if tracing is not None:
        app.add_middleware(Traced, tracer=tracing.tracer)
    # Added last, so it is outermost: refusals of the others have an id too.
    app.add_middleware(RequestIds)
    install_handlers(app)
    app.openapi = problem_openapi(app, routers)  # type: ignore[method-assign]  # the documented way to extend the schema
    return app


def open_state(settings: ServerSettings, clock: DatabaseClock | None = None) -> State:
    """The parts of a server. Connects to nothing yet. Raises SetupError."""
    store = open_store(settings)
    database = open_database(settings, clock=clock)
    hub: EventHub = LocalHub() if settings.embedded else NotifyHub(database.connect_driver)
    counter = HitCounter(database)
    recorder = Recorder(database, settings)
    entry_rows = EntryRepository(database)
    misses = MissLog(database)
    presigned = PresignedUploads(database, store, entry_rows, hub)
    lease_service = LeaseService(database, hub, counter, settings, misses, recorder)
    return State(
        settings=settings,
        auth=Authenticator(database, settings),
        database=database,
        store=store,
        store_health=StoreHealth(store, settings.store_outage_seconds),
        hub=hub,
        counter=counter,
        recorder=recorder,
        history=History(database),
        live=LiveView(database, lease_service.gates, lambda: lease_service.stopping),
        leases=lease_service,
        publishing=PublishService(database, store, hub, lease_service, presigned, recorder),
        presigned=presigned,
        blobs=BlobService(database, store, entry_rows, hub, settings.max_blob_bytes),
        entries=entry_rows,
        failures=FailureRepository(database),
        stats=StatsRepository(database),
        misses=misses,
        explain=ExplainService(database, misses),
    )


async def _close(state: State, tasks: list[asyncio.Task[Any]]) -> None:
    state.leases.stop()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    with suppress(ServerProblem):
        await state.counter.flush()
        await state.misses.flush()
        await state.recorder.flush()
    await state.database.close()
