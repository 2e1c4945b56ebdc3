"""Blobs in a folder: `<root>/<namespace>/<ab>/<sha256>`, written by rename from `<root>/.staging`."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from anyio import to_thread
from neffcache_client.wire import UploadAnswer, check_key

from neffcache_server.problems import SetupError, StorageUnavailable
from neffcache_server.storage.base import BlobNotFound, StoredBlob, StoredObject

T = TypeVar("T")

# Tried against nginx's sendfile on one machine: 64 KiB a thread hop gave 0.15 of it, 1 MiB about all of it.
CHUNK = 1 << 20
_ABANDONED_SECONDS = 86400.0


class FolderReader:
    """An open file. Holding the descriptor keeps the bytes readable after a removal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        self.size = os.fstat(descriptor).st_size

    async def chunks(self, start: int, stop: int) -> AsyncIterator[bytes]:
        while start < stop and self._descriptor is not None:
            chunk = await _in_thread(os.pread, self._descriptor, min(CHUNK, stop - start), start)
            if not chunk:
                return
            start += len(chunk)
            yield chunk

    async def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


class FolderStore:
    """A BlobStore on one file system."""

    def __init__(self, root: Path) -> None:
        """Make the folder if need be. Raises SetupError when that is impossible."""
        self._root = root
        self.staging = root / ".staging"
        try:
            self.staging.mkdir(parents=True, exist_ok=True)
            _sweep(self.staging)
        except OSError as exc:
            raise SetupError(f"the blob folder {root} cannot be used: {exc.strerror}") from exc

    def _path(self, namespace: str, sha256: str) -> Path:
        return self._root / namespace / sha256[:2] / sha256

    async def put(self, namespace: str, sha256: str, file: Path) -> None:
        await _in_thread(_place, file, self._path(namespace, sha256))

    async def size(self, namespace: str, sha256: str) -> int:
        return (await _in_thread(os.stat, self._path(namespace, sha256))).st_size

    async def inspect(self, namespace: str, sha256: str) -> StoredBlob:
        return StoredBlob(await self.size(namespace, sha256), None)

    async def open(self, namespace: str, sha256: str) -> FolderReader:
        return FolderReader(await _in_thread(os.open, self._path(namespace, sha256), os.O_RDONLY | os.O_CLOEXEC))

    @asynccontextmanager
    async def as_file(self, namespace: str, sha256: str) -> AsyncIterator[Path]:
        await self.size(namespace, sha256)
        yield self._path(namespace, sha256)

    async def download_url(self, namespace: str, sha256: str) -> str | None:
        return None

    async def upload_ticket(self, namespace: str, sha256: str, size: int) -> UploadAnswer | None:
        return None

    async def delete(self, namespace: str, sha256: str) -> None:
        try:
            await _in_thread(os.unlink, self._path(namespace, sha256))
        except BlobNotFound:
            return

    async def listing(self) -> AsyncIterator[StoredObject]:
        for namespace in await _in_thread(_folders, self._root):
            for folder in await _in_thread(_folders, self._root / namespace):
                for found in await _in_thread(_objects, self._root / namespace / folder, namespace):
                    yield found

    async def check(self) -> None:
        await _in_thread(_probe, self.staging)


async def _in_thread(call: Callable[..., T], *args: object) -> T:
    """Run a file operation in a thread; its errors leave in the store's vocabulary."""

    def run() -> T:
        try:
            return call(*args)
        except FileNotFoundError as exc:
            raise BlobNotFound from exc
        except OSError as exc:
            raise StorageUnavailable(f"the cache's blob folder failed: {exc.strerror}") from exc

    return await to_thread.run_sync(run)


def _place(file: Path, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(file, target)
        _sync_folder(target.parent)
    except FileNotFoundError as exc:
        raise StorageUnavailable("the cache's blob folder was removed while it was in use") from exc


def _folders(folder: Path) -> list[str]:
    try:
        return sorted(e.name for e in os.scandir(folder) if e.is_dir(follow_symlinks=False) and e.name[0] != ".")
    except FileNotFoundError:
        return []


def _objects(folder: Path, namespace: str) -> list[StoredObject]:
    found = []
    for entry in os.scandir(folder):
        try:
            check_key(entry.name)
            seen = entry.stat(follow_symlinks=False)
        except (ValueError, FileNotFoundError):
            continue
        found.append(StoredObject(namespace, entry.name, seen.st_size, seen.st_mtime))
    return found


def _sync_folder(folder: Path) -> None:
    # Without this a power cut may keep the row in SQL and lose the name of the file.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _probe(folder: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"ready?")
            file.flush()
    except FileNotFoundError as exc:
        raise StorageUnavailable(f"the cache's blob folder {folder} is gone") from exc


def _sweep(staging: Path) -> None:
    """Remove uploads that a killed server left behind."""
    horizon = time.time() - _ABANDONED_SECONDS
    for file in staging.iterdir():
        if file.stat().st_mtime < horizon:
            file.unlink(missing_ok=True)
