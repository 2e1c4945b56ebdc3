"""Calls on published keys."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from neffcache_client.wire import Entry, EntryPage, check_key

from neffcache_server.auth import require
from neffcache_server.problems import EntryUnknown, InvalidRequest, documented
from neffcache_server.state import AppState, Key, Namespace

router = APIRouter(prefix="/v1/ns/{namespace}/entries", tags=["entries"])


@router.get("")
@require("read")
async def list_entries(
    namespace: Namespace,
    state: AppState,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str | None, Query(max_length=128, description="`next` of the page before.")] = None,
) -> EntryPage:
    """Published keys, newest first."""
    async with state.database.read() as db:
        return await state.entries.page(db, namespace, limit, _cursor(after))


@router.get("/{key}", responses=documented(EntryUnknown))
@require("read")
async def show_entry(namespace: Namespace, key: Key, state: AppState) -> Entry:
    """One published key with what it was made of."""
    await state.counter.flush()
    async with state.database.read() as db:
        entry = await state.entries.show(db, namespace, key)
    if entry is None:
        raise EntryUnknown
    return entry


@router.delete("/{key}", status_code=204, responses=documented(EntryUnknown))
@require("admin")
async def delete_entry(namespace: Namespace, key: Key, state: AppState) -> None:
    """Remove a key's artifact; the next rank that asks compiles it again."""
    async with state.database.write() as db:
        sha256 = await state.entries.remove(db, namespace, key)
        if sha256 is None:
            raise EntryUnknown
        orphan = await state.entries.forget_blob(db, namespace, sha256)
    # The row first: were the object to go first and the commit to fail, a served key would point at nothing.
    if orphan:
        await state.store.delete(namespace, sha256)
    await state.hub.announce((namespace, key))


@router.put("/{key}/pin", status_code=204, responses=documented(EntryUnknown))
@require("admin")
async def pin_entry(namespace: Namespace, key: Key, state: AppState) -> None:
    """Keep a key's artifact from garbage collection. May be repeated."""
    async with state.database.write() as db:
        if not await state.entries.pin(db, namespace, key, True):
            raise EntryUnknown


@router.delete("/{key}/pin", status_code=204, responses=documented(EntryUnknown))
@require("admin")
async def unpin_entry(namespace: Namespace, key: Key, state: AppState) -> None:
    """Let garbage collection have it again. May be repeated."""
    async with state.database.write() as db:
        if not await state.entries.pin(db, namespace, key, False):
            raise EntryUnknown


@router.put("/{key}/quarantine", status_code=204, responses=documented(EntryUnknown))
@require("admin")
async def quarantine_entry(namespace: Namespace, key: Key, state: AppState) -> None:
    """Serve a key's artifact to nobody any more: the next rank that asks compiles, and its result replaces it.

    Hosts that have the artifact in their local folder keep it. May be repeated.
    """
    async with state.database.write() as db:
        if not await state.entries.quarantine(db, namespace, key):
            raise EntryUnknown
    await state.hub.announce((namespace, key))


def _cursor(after: str | None) -> tuple[float, str] | None:
    if after is None:
        return None
    created_at, _, key = after.partition(":")
    try:
        return float(created_at), check_key(key)
    except ValueError:
        raise InvalidRequest("after: must be the `next` of an earlier page") from None
