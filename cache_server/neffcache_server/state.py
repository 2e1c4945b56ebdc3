"""What a running application holds, and how endpoints get at it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Path, Request
from neffcache_client.wire import check_key, check_lease_id, check_namespace
from pydantic import AfterValidator

from neffcache_server.auth.authenticator import Authenticator
from neffcache_server.blobs.presigned import PresignedUploads
from neffcache_server.blobs.service import BlobService
from neffcache_server.database.engine import Database
from neffcache_server.entries.repository import EntryRepository
from neffcache_server.explain.misses import MissLog
from neffcache_server.explain.service import ExplainService
from neffcache_server.failures.repository import FailureRepository
from neffcache_server.health.store_health import StoreHealth
from neffcache_server.kit.hub import EventHub
from neffcache_server.leases.publish import PublishService
from neffcache_server.leases.service import LeaseService
from neffcache_server.recording.history import History
from neffcache_server.recording.live import LiveView
from neffcache_server.recording.recorder import Recorder
from neffcache_server.settings import ServerSettings
from neffcache_server.stats.counters import HitCounter
from neffcache_server.stats.repository import StatsRepository
from neffcache_server.storage.base import BlobStore


@dataclass(slots=True)
class State:
    """Everything an application made for itself at start."""

    settings: ServerSettings
    auth: Authenticator
    database: Database
    store: BlobStore
    store_health: StoreHealth
    hub: EventHub
    counter: HitCounter
    recorder: Recorder
    history: History
    live: LiveView
    leases: LeaseService
    publishing: PublishService
    blobs: BlobService
    presigned: PresignedUploads
    entries: EntryRepository
    failures: FailureRepository
    stats: StatsRepository
    misses: MissLog
    explain: ExplainService


async def _state(request: Request) -> State:
    # A plain function would be run in a thread for every request.
    state: State = request.app.state.neffcache
    return state


def _hidden(value: str) -> str:
    # A lease id is a secret, so it must not come back in an error about it either.
    return check_lease_id(value)


def _key(value: str) -> str:
    return check_key(value)


def _digest(value: str) -> str:
    return check_key(value, "sha256")


def _pattern(text: str) -> dict[str, object]:
    # Said in the schema only: the checks above refuse in words of their own, and never echo a lease id.
    return {"pattern": f"^{text}$"}


AppState = Annotated[State, Depends(_state)]
Namespace = Annotated[
    str,
    Path(max_length=63, json_schema_extra=_pattern("[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")),
    AfterValidator(check_namespace),
]
Key = Annotated[str, Path(max_length=64, json_schema_extra=_pattern("[0-9a-f]{64}")), AfterValidator(_key)]
Digest = Annotated[str, Path(max_length=64, json_schema_extra=_pattern("[0-9a-f]{64}")), AfterValidator(_digest)]
LeaseId = Annotated[str, Path(max_length=64, json_schema_extra=_pattern("[0-9a-f]{32,64}")), AfterValidator(_hidden)]
