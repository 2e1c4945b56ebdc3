"""Calls on keys and leases."""

from __future__ import annotations

from fastapi import APIRouter, Request
from neffcache_client.wire import (
    AcquireAnswer,
    AcquireRequest,
    FailAnswer,
    FailRequest,
    HeartbeatAnswer,
    HeartbeatRequest,
    LookupAnswer,
    LookupRequest,
    PublishAnswer,
    PublishRequest,
)

from neffcache_server.auth import CurrentPrincipal, require
from neffcache_server.problems import (
    BlobNotUploaded,
    BlobRefused,
    ClientGone,
    FactorsTooLarge,
    LeaseEnded,
    LeaseIdReused,
    LeaseSuperseded,
    LeaseUnknown,
    ShuttingDown,
    StorageUnavailable,
    WriteNeeded,
    documented,
)
from neffcache_server.state import AppState, Key, LeaseId, Namespace

router = APIRouter(prefix="/v1/ns/{namespace}", tags=["leases"])


@router.post(
    "/keys/{key}/acquire",
    responses=documented(
        LeaseSuperseded, LeaseEnded, LeaseIdReused, FactorsTooLarge, ShuttingDown, ClientGone, WriteNeeded
    ),
)
@require("read")
async def acquire(
    namespace: Namespace,
    key: Key,
    body: AcquireRequest,
    state: AppState,
    request: Request,
    principal: CurrentPrincipal,
) -> AcquireAnswer:
    """Get the artifact of a key, or the right and duty to compile it; waits for either up to `wait_seconds`.

    A granted lease is provisional: it ends after 5 s unless a heartbeat follows. Repeating the call with the same
    lease id gives the same lease. A lease id that has ended is answered 409 where it would be granted again.
    """
    wants_to_compile = body.can_compile
    # A reader gets hits, and waits for those who compile; it is never given the lease.
    body.can_compile = wants_to_compile and principal.may("write", namespace)
    answer = await state.leases.acquire(namespace, key, body, request.is_disconnected)
    if answer.state == "busy" and answer.holder is None and wants_to_compile and not body.can_compile:
        raise WriteNeeded(
            f"nobody has or compiles this key, and to compile it for others needs the role write in namespace "
            f"{namespace}; this token has {principal.rights}"
        )
    return answer


@router.post("/keys/lookup")
@require("read")
async def lookup(namespace: Namespace, body: LookupRequest, state: AppState) -> LookupAnswer:
    """Which of these keys are present, with their artifacts. Never leases, counts no hit."""
    trusted = state.settings.trusted_by(namespace)
    async with state.database.read() as db:
        present = await state.entries.present(db, namespace, body.keys)
        if trusted is not None:
            present = {**await state.entries.present(db, trusted, body.keys), **present}
    return LookupAnswer(present=present)


@router.post("/leases/{lease_id}/heartbeat", responses=documented(LeaseUnknown, LeaseSuperseded, LeaseEnded))
@require("write")
async def heartbeat(
    namespace: Namespace, lease_id: LeaseId, body: HeartbeatRequest, state: AppState
) -> HeartbeatAnswer:
    """Keep a lease. One that ran out is kept too, as long as nobody else has got it."""
    return await state.leases.heartbeat(namespace, lease_id, body)


@router.delete("/leases/{lease_id}", status_code=204, responses=documented(LeaseUnknown))
@require("write")
async def release(namespace: Namespace, lease_id: LeaseId, state: AppState) -> None:
    """Give a lease back without a result. May be repeated."""
    await state.leases.release(namespace, lease_id)


@router.post(
    "/leases/{lease_id}/publish",
    responses=documented(LeaseUnknown, LeaseSuperseded, LeaseEnded, BlobNotUploaded, BlobRefused, StorageUnavailable),
)
@require("write")
async def publish(namespace: Namespace, lease_id: LeaseId, body: PublishRequest, state: AppState) -> PublishAnswer:
    """Make a blob that this lease uploaded the key's artifact, and end the lease. May be repeated."""
    return await state.publishing.publish(namespace, lease_id, body)


@router.post("/leases/{lease_id}/fail", responses=documented(LeaseUnknown, LeaseSuperseded, LeaseEnded))
@require("write")
async def fail(namespace: Namespace, lease_id: LeaseId, body: FailRequest, state: AppState) -> FailAnswer:
    """End a lease with a failure. May be repeated."""
    return await state.leases.fail(namespace, lease_id, body)
