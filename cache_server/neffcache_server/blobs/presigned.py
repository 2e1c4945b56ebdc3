"""Uploads that go past the server: a ticket under a lease first, a check of what the store then has at publish.

What is checked here: that the lease was given a ticket for that digest, that the object's length and the SHA-256 that
the store computed are right, the NEFF's header, and what the archive says of its compiler and target (streamed only
as far as that is found, in a real NEFF near the start). The MD5 of the whole payload is left to clients, which check
every download whole. A store that kept no SHA-256 has the object read and digested here instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from anyio import from_thread, to_thread
from neffcache_client.errors import NeffInvalid
from neffcache_client.neff import HEADER_SIZE, NeffHeader, read_members
from neffcache_client.wire import BlobAnswer, UploadAnswer

from neffcache_server.blobs.repository import BlobRepository
from neffcache_server.database.engine import Database
from neffcache_server.entries.repository import EntryRepository
from neffcache_server.kit.hub import EventHub
from neffcache_server.leases.machine import Lease
from neffcache_server.problems import BlobNotUploaded, BlobRefused
from neffcache_server.storage.base import BlobNotFound, BlobReader, BlobStore


class PresignedUploads:
    """Tickets, and what became of them."""

    def __init__(self, database: Database, store: BlobStore, entries: EntryRepository, hub: EventHub) -> None:
        self._db = database
        self._store = store
        self._entries = entries
        self._hub = hub
        self._repo = BlobRepository(database)

    async def issue(self, lease: Lease, sha256: str, size: int) -> UploadAnswer | None:
        """Where the lease may send that blob, None when it has to go through the server.

        Raises BlobRefused for a size that no NEFF has, StorageUnavailable.
        """
        if size <= HEADER_SIZE:
            raise BlobRefused(f"a NEFF has more than {HEADER_SIZE} bytes, not {size}; nothing was stored")
        answer = await self._store.upload_ticket(lease.namespace, sha256, size)
        if answer is not None:
            async with self._db.write() as db:
                await self._repo.put_ticket(db, lease.epoch, sha256, size)
        return answer

    async def accept(self, lease: Lease, sha256: str) -> None:
        """Note the object as uploaded by the lease, once it is checked.

        Raises BlobNotUploaded when the lease has no ticket or the store no object, BlobRefused (and removes the
        object) when it is not that NEFF, StorageUnavailable.
        """
        async with self._db.read() as db:
            size = await self._repo.ticket(db, lease.epoch, sha256)
        if size is None:
            raise BlobNotUploaded
        try:
            blob = await self._check(lease.namespace, sha256, size)
        except BlobNotFound:
            raise BlobNotUploaded from None
        except NeffInvalid as exc:
            await self._discard(lease.namespace, sha256)
            raise BlobRefused(f"{str(exc).rstrip('.')}; nothing was kept", code=exc.code) from exc
        async with self._db.write() as db:
            healed = await self._entries.blob_back(db, lease.namespace, sha256)
            await self._repo.put(db, lease.namespace, blob, lease.epoch)
        for key in healed:
            await self._hub.announce((lease.namespace, key))

    async def _check(self, namespace: str, sha256: str, size: int) -> BlobAnswer:
        stored = await self._store.inspect(namespace, sha256)
        reader = await self._store.open(namespace, sha256)
        try:
            found = stored.sha256 or await _digest(reader)
            if found != sha256:
                await self._discard(namespace, sha256)
                raise BlobRefused(
                    f"the uploaded bytes have SHA-256 {found}, announced was {sha256}; nothing was kept",
                    code="digest_mismatch",
                )
            if stored.size != size:
                raise BlobRefused(f"the blob has {stored.size} bytes, announced were {size}")
            version, target = await _members(reader)
        finally:
            await reader.close()
        return BlobAnswer(sha256=sha256, size=size, compiler_version=version, target=target)

    async def _discard(self, namespace: str, sha256: str) -> None:
        """Remove an object that was never verified. One that was is not removed on an uploader's word."""
        async with self._db.read() as db:
            verified = await self._repo.size(db, namespace, sha256)
        if verified is None:
            await self._store.delete(namespace, sha256)


async def _digest(reader: BlobReader) -> str:
    digest = hashlib.sha256()
    async for chunk in reader.chunks(0, reader.size):
        await to_thread.run_sync(digest.update, chunk)
    return digest.hexdigest()


async def _members(reader: BlobReader) -> tuple[str | None, str | None]:
    """What the archive says of itself. Raises NeffInvalid."""
    async with aclosing(reader.chunks(0, reader.size)) as chunks:  # type: ignore[type-var]  # it is a generator
        stream = _Stream(chunks)

        def read() -> tuple[str | None, str | None]:
            header = NeffHeader(stream.read(HEADER_SIZE))
            if reader.size != HEADER_SIZE + header.data_size:
                raise NeffInvalid(
                    f"the file has {reader.size} bytes, its header says {HEADER_SIZE + header.data_size}"
                )
            return read_members(stream)  # type: ignore[arg-type]  # tarfile calls nothing but read

        return await to_thread.run_sync(read)


class _Stream:
    """An async stream of chunks as a file, for use in a worker thread."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def read(self, size: int) -> bytes:
        parts = [self._rest]
        length = len(self._rest)
        while length < size and (chunk := from_thread.run(self._next)):
            parts.append(chunk)
            length += len(chunk)
        data = b"".join(parts)
        self._rest = data[size:]
        return data[:size]

    async def _next(self) -> Any:
        return await anext(self._chunks, b"")
