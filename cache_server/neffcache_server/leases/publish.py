"""Publishing: the only way in which a key gets an artifact."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from anyio import to_thread
from neffcache_client.errors import NeffInvalid
from neffcache_client.neff import member_digests
from neffcache_client.wire import Artifact, PublishAnswer, PublishRequest, from_json

from neffcache_server.blobs.presigned import PresignedUploads
from neffcache_server.database.engine import Database, WriteConnection
from neffcache_server.kit.hub import EventHub
from neffcache_server.leases.machine import Lease
from neffcache_server.leases.repository import LeaseRepository
from neffcache_server.leases.service import LeaseService, ended
from neffcache_server.problems import BlobNotUploaded, InvalidRequest
from neffcache_server.recording.events import of_holder
from neffcache_server.recording.recorder import Recorder
from neffcache_server.stats.counters import Counts, add_counts
from neffcache_server.storage.base import BlobNotFound, BlobStore


class PublishService:
    """Blob first (checked when it was uploaded), then the row, then the end of the lease, in one commit."""

    def __init__(
        self,
        database: Database,
        store: BlobStore,
        hub: EventHub,
        leases: LeaseService,
        presigned: PresignedUploads,
        recorder: Recorder,
    ) -> None:
        self._recorder = recorder
        self._presigned = presigned
        self._db = database
        self._store = store
        self._hub = hub
        self._leases = leases
        self._repo = LeaseRepository(database)

    async def publish(self, namespace: str, lease_id: str, request: PublishRequest) -> PublishAnswer:
        """Make an uploaded blob the artifact of the lease's key; a repeated call gets the first one's answer.

        First write wins. Raises LeaseUnknown, LeaseSuperseded, LeaseEnded, BlobNotUploaded, BlobRefused,
        InvalidRequest, StorageUnavailable.
        """
        compared: dict[str, list[str] | None] = {}
        while True:
            async with self._db.read() as reading:
                lease = await self._leases.find(reading, namespace, lease_id)
            if lease.status != "live":
                return _repeated(lease, request)
            # The store may take its time, so it is asked before anything is locked.
            blob = await self._checked_upload(lease, request)
            async with self._db.write() as db:
                lease = await self._leases.find(db, namespace, lease_id)
                if lease.status != "live":
                    return _repeated(lease, request)
                await self._repo.lock_key(db, namespace, lease.key)
                stored = (await self._repo.snapshot(db, namespace, lease.key)).artifact
                # Comparing two archives takes seconds: it happens outside of the transaction, then we look again.
                if stored is None or stored.sha256 == request.sha256 or stored.sha256 in compared:
                    answer = await self._commit(db, lease, blob, request, stored, compared)
                    break
            compared[stored.sha256] = await self._difference(namespace, stored.sha256, request.sha256)
        await self._hub.announce((namespace, lease.key))
        event = of_holder(namespace, lease.key, lease.holder, "pushed" if request.from_spool else "compiled")
        event.spent_seconds = 0.0 if request.from_spool else request.compile_seconds
        event.bytes = request.size
        self._recorder.note(event)
        return answer

    async def _checked_upload(self, lease: Lease, request: PublishRequest) -> Any:
        blob = await self._uploaded(lease, request.sha256)
        if blob is None:
            # It may have gone straight to the store.
            await self._presigned.accept(lease, request.sha256)
            blob = await self._uploaded(lease, request.sha256)
        if blob is None:
            raise BlobNotUploaded
        if blob.size != request.size:
            raise InvalidRequest(f"size says {request.size}, the uploaded blob has {blob.size} bytes")
        try:
            # The row is no proof: somebody may have emptied the store since the upload.
            size = await self._store.size(lease.namespace, request.sha256)
        except BlobNotFound:
            size = -1
        if size != blob.size:
            raise BlobNotUploaded("the uploaded blob is not in the store any more; upload it again")
        return blob

    async def _uploaded(self, lease: Lease, sha256: str) -> Any:
        async with self._db.read() as db:
            return await self._repo.uploaded(db, lease, sha256)

    async def _commit(
        self,
        db: WriteConnection,
        lease: Lease,
        blob: Any,
        request: PublishRequest,
        stored: Artifact | None,
        compared: dict[str, list[str] | None],
    ) -> PublishAnswer:
        # The fence: nothing is written on behalf of a lease that was superseded a moment ago.
        if not await self._repo.end(db, lease.epoch, "published"):
            raise ended(await self._leases.find(db, lease.namespace, lease.lease_id))
        counts = Counts(publishes=1, compile_seconds_spent=request.compile_seconds)
        if stored is None:
            await self._repo.put_artifact(db, lease, blob, request)
            served = (await self._repo.snapshot(db, lease.namespace, lease.key)).artifact
            assert served is not None
            answer = PublishAnswer(outcome="published", artifact=served)
        elif differing := compared.get(stored.sha256):
            await self._repo.record_difference(db, lease, stored.sha256, blob, differing)
            counts.nondeterministic = 1
            answer = PublishAnswer(outcome="nondeterministic", artifact=stored)
        else:
            answer = PublishAnswer(outcome="already_present", artifact=stored)
        await self._repo.clear_failures(db, lease.namespace, lease.key)
        await self._repo.set_outcome(db, lease.epoch, json.dumps({"offered": request.sha256, **asdict(answer)}))
        await add_counts(db, self._db.dialect, lease.namespace, counts)
        return answer

    async def _difference(self, namespace: str, stored: str, offered: str) -> list[str] | None:
        """Names of archive members that differ; None when they cannot be compared."""
        try:
            async with self._store.as_file(namespace, stored) as a, self._store.as_file(namespace, offered) as b:
                first = await to_thread.run_sync(member_digests, a)
                second = await to_thread.run_sync(member_digests, b)
        except (BlobNotFound, NeffInvalid, OSError):
            return None
        return sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))


def _repeated(lease: Lease, request: PublishRequest) -> PublishAnswer:
    if lease.status != "published" or lease.outcome is None:
        raise ended(lease)
    outcome = json.loads(lease.outcome)
    if outcome.pop("offered") != request.sha256:
        raise ended(lease)
    return from_json(PublishAnswer, outcome)
