"""What a blob store has to be able to do.

Blobs are named by namespace and SHA-256 and never change. Uploads through the server are checked in a staging file
before they get here; those that go past it by a presigned URL are checked when they are published. Every method
raises StorageUnavailable when the store fails; only "there is no such object" is a BlobNotFound.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

from neffcache_client.wire import UploadAnswer

from neffcache_server.problems import StorageUnavailable


class BlobNotFound(Exception):
    """The store has no such blob."""


class StorageMisconfigured(StorageUnavailable):
    """The store answers, and says that it cannot be used like this: no bucket, no rights."""


class StoredBlob(NamedTuple):
    """What a store knows of a blob without reading it. `sha256` is None where it computed none."""

    size: int
    sha256: str | None


class StoredObject(NamedTuple):
    """A blob as the store lists it; `modified_at` is by the store's clock."""

    namespace: str
    sha256: str
    size: int
    modified_at: float


class BlobReader(Protocol):
    """An opened blob: stays readable even when the blob is removed."""

    size: int

    def chunks(self, start: int, stop: int) -> AsyncIterator[bytes]:
        """The bytes from `start` to before `stop`; ends early when the store has fewer."""

    async def close(self) -> None:
        """Let go of the blob; may be called twice."""


class BlobStore(Protocol):
    """Where blobs live."""

    staging: Path
    """A folder for uploads that are being checked."""

    async def put(self, namespace: str, sha256: str, file: Path) -> None:
        """Take over a verified file: durable and visible when this returns. `file` is gone afterwards."""

    async def size(self, namespace: str, sha256: str) -> int:
        """Length of a blob. Raises BlobNotFound."""

    async def inspect(self, namespace: str, sha256: str) -> StoredBlob:
        """Length and, where the store has one of its own, digest of a blob. Raises BlobNotFound."""

    async def open(self, namespace: str, sha256: str) -> BlobReader:
        """Open a blob for reading. Raises BlobNotFound before any byte is read."""

    def as_file(self, namespace: str, sha256: str) -> AbstractAsyncContextManager[Path]:
        """The blob as a local file that must not be changed. Raises BlobNotFound."""

    async def download_url(self, namespace: str, sha256: str) -> str | None:
        """A presigned address for the bytes, None when they come from this server."""

    async def upload_ticket(self, namespace: str, sha256: str, size: int) -> UploadAnswer | None:
        """A presigned address to send the bytes to, None when they go to this server."""

    async def delete(self, namespace: str, sha256: str) -> None:
        """Remove a blob; no error when it is not there."""

    def listing(self) -> AsyncIterator[StoredObject]:
        """Every blob that is there. What does not look like one of ours is passed over."""

    async def check(self) -> None:
        """Raises StorageUnavailable, saying why, when blobs can be neither read nor written."""
