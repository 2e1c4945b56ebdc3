"""Blobs in: checked while they stream into a staging file, then handed to the store. Blobs out: opened or lost."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from anyio import CancelScope, to_thread
from neffcache_client.errors import NeffInvalid
from neffcache_client.neff import HEADER_SIZE, NeffChecker, read_members
from neffcache_client.wire import BlobAnswer

from neffcache_server.blobs.repository import BlobRepository
from neffcache_server.blobs.verification import BlobVerifier
from neffcache_server.database.engine import Database
from neffcache_server.entries.repository import EntryRepository
from neffcache_server.kit.hub import EventHub
from neffcache_server.leases.machine import Lease
from neffcache_server.leases.repository import LeaseRepository
from neffcache_server.leases.service import ended
from neffcache_server.problems import (
    BlobMissing,
    BlobRefused,
    BlobTooLarge,
    BlobUnknown,
    LeaseUnknown,
    StorageUnavailable,
    UploadCut,
)
from neffcache_server.storage.base import BlobNotFound, BlobReader, BlobStore

_CHUNK = 1 << 20


class BlobService:
    """Uploads and downloads of one server."""

    def __init__(
        self, database: Database, store: BlobStore, entries: EntryRepository, hub: EventHub, max_bytes: int
    ) -> None:
        self._db = database
        self._store = store
        self._entries = entries
        self._hub = hub
        self._max_bytes = max_bytes
        self.verifier = BlobVerifier(database, store, entries, hub)
        self._repo = BlobRepository(database)
        self._leases = LeaseRepository(database)

    async def authorise(self, namespace: str, lease_id: str, size: int | None) -> Lease:
        """The live lease an upload belongs to. Raises LeaseUnknown, -Superseded, -Ended, BlobTooLarge."""
        if size is not None and size > self._max_bytes:
            raise BlobTooLarge(f"the blob has {size} bytes, this server takes at most {self._max_bytes}")
        async with self._db.read() as db:
            lease = await self._leases.find(db, lease_id)
        if lease is None or lease.namespace != namespace:
            raise LeaseUnknown
        if lease.status != "live":
            raise ended(lease)
        return lease

    async def receive(self, lease: Lease, sha256: str, size: int | None, body: AsyncIterator[bytes]) -> BlobAnswer:
        """Take a NEFF: stored, verified and noted as this lease's when this returns.

        Raises BlobRefused (not the NEFF it claims to be), BlobTooLarge, UploadCut, StorageUnavailable; then nothing
        is kept.
        """
        staged = await to_thread.run_sync(_Staged, self._store.staging)
        try:
            try:
                await self._fill(staged, body)
            except (NeffInvalid, BlobTooLarge):
                # Without reading on, the client would see a broken connection instead of the reason.
                await _drain(body)
                raise
            if size is not None and staged.size != size:
                raise UploadCut(f"{staged.size} of {size} bytes arrived; nothing was stored")
            blob = await to_thread.run_sync(staged.finish, sha256)
            await self._store.put(lease.namespace, sha256, staged.path)
        except NeffInvalid as exc:
            raise BlobRefused(f"{str(exc).rstrip('.')}; nothing was stored", code=exc.code) from exc
        finally:
            # Shielded: a cancelled upload must not leave its file behind either.
            with CancelScope(shield=True):
                await to_thread.run_sync(staged.discard)
        async with self._db.write() as db:
            # Keys before blobs, the order in which a removal locks them.
            healed = await self._entries.blob_back(db, lease.namespace, sha256)
            await self._repo.put(db, lease.namespace, blob, lease.epoch)
        for key in healed:
            await self._hub.announce((lease.namespace, key))
        return blob

    async def _fill(self, staged: _Staged, body: AsyncIterator[bytes]) -> None:
        # One hop to a thread per MiB: the server's own chunks of 64 KiB would spend their time hopping.
        pending: list[bytes] = []
        gathered = 0
        async for chunk in body:
            pending.append(chunk)
            gathered += len(chunk)
            if staged.size + gathered > self._max_bytes:
                raise BlobTooLarge(f"the blob has more than {self._max_bytes} bytes, which is all this server takes")
            if gathered >= _CHUNK:
                await to_thread.run_sync(staged.write, pending)
                pending, gathered = [], 0
        if pending:
            await to_thread.run_sync(staged.write, pending)

    async def open(self, namespace: str, sha256: str) -> BlobReader:
        """A blob ready to be read. Raises BlobUnknown, or BlobMissing after marking the entries that lost it."""
        async with self._db.read() as db:
            size = await self._repo.size(db, namespace, sha256)
        if size is None:
            raise BlobUnknown
        try:
            reader = await self._store.open(namespace, sha256)
        except BlobNotFound:
            await self._lost(namespace, sha256)
            raise BlobMissing from None
        if reader.size != size:
            await reader.close()
            await self._lost(namespace, sha256)
            raise BlobMissing("the stored blob has another length than it should; its keys will be compiled again")
        return reader

    async def _lost(self, namespace: str, sha256: str) -> None:
        async with self._db.write() as db:
            keys = await self._entries.blob_lost(db, namespace, sha256)
        for key in keys:
            await self._hub.announce((namespace, key))


async def _drain(body: AsyncIterator[bytes]) -> None:
    left = 64 << 20
    async for chunk in body:
        left -= len(chunk)
        if left < 0:
            return


class _Staged:
    """A file that an upload goes into. Its methods block; they run in threads."""

    def __init__(self, folder: Path) -> None:
        try:
            descriptor, name = tempfile.mkstemp(dir=folder)
        except OSError as exc:
            raise StorageUnavailable(f"no upload can be taken: {exc.strerror}") from exc
        self.path = Path(name)
        self._file = os.fdopen(descriptor, "w+b", buffering=0)
        self._checker = NeffChecker()

    @property
    def size(self) -> int:
        return self._checker.size

    def write(self, chunks: list[bytes]) -> None:
        """Raises NeffInvalid as soon as the bytes cannot become a NEFF, StorageUnavailable when the disk is full."""
        try:
            for chunk in chunks:
                self._checker.update(chunk)
                view = memoryview(chunk)
                while view:
                    view = view[self._file.write(view) :]
        except OSError as exc:
            raise StorageUnavailable(f"the upload could not be written: {exc.strerror}") from exc

    def finish(self, sha256: str) -> BlobAnswer:
        """What was received, verified whole. Raises NeffInvalid, BlobRefused or StorageUnavailable."""
        self._checker.finish()
        if self._checker.sha256 != sha256:
            raise BlobRefused(
                f"the bytes have SHA-256 {self._checker.sha256}, the address says {sha256}; nothing was stored",
                code="digest_mismatch",
            )
        try:
            self._file.seek(HEADER_SIZE)
            version, target = read_members(self._file)
            self._file.close()
            os.chmod(self.path, 0o644)
        except OSError as exc:
            raise StorageUnavailable(f"the upload could not be read back: {exc.strerror}") from exc
        return BlobAnswer(sha256=sha256, size=self.size, compiler_version=version, target=target)

    def discard(self) -> None:
        """Close and remove whatever is left."""
        self._file.close()
        self.path.unlink(missing_ok=True)
