"""Looking again at a stored blob that a client found damaged."""

from __future__ import annotations

import asyncio
from pathlib import Path
from time import monotonic
from typing import Literal

from anyio import to_thread
from neffcache_client.errors import NeffInvalid
from neffcache_client.neff import check_neff

from neffcache_server.blobs.repository import BlobRepository
from neffcache_server.database.engine import Database
from neffcache_server.entries.repository import EntryRepository
from neffcache_server.kit.hub import EventHub
from neffcache_server.problems import BlobUnknown, StorageUnavailable
from neffcache_server.storage.base import BlobNotFound, BlobStore

_SOUND_FOR_SECONDS = 60.0
_REMEMBERED = 1000

Verdict = Literal["sound", "quarantined", "missing"]


class _StoredAgain(Exception):
    """Undoes the transaction."""


class BlobVerifier:
    """Reads one blob at a time: reports come in crowds, and a blob may have gigabytes."""

    def __init__(self, database: Database, store: BlobStore, entries: EntryRepository, hub: EventHub) -> None:
        self._db = database
        self._store = store
        self._entries = entries
        self._hub = hub
        self._repo = BlobRepository(database)
        self._one_at_a_time = asyncio.Lock()
        self._sound: dict[tuple[str, str], float] = {}

    async def verify(self, namespace: str, sha256: str) -> Verdict:
        """Read a blob and judge it; one that is damaged is served to nobody any more and its object removed.

        The keys that it was served for are compiled again. Raises BlobUnknown, StorageUnavailable.
        """
        async with self._one_at_a_time:
            if monotonic() < self._sound.get((namespace, sha256), 0.0):
                return "sound"
            async with self._db.read() as db:
                stored_at = await self._repo.stored_at(db, namespace, sha256)
            if stored_at is None:
                raise BlobUnknown
            verdict = await self._judge(namespace, sha256)
            if verdict == "sound":
                self._remember(namespace, sha256)
            elif not await self._withdraw(namespace, sha256, verdict, stored_at):
                return "sound"
            return verdict

    async def _judge(self, namespace: str, sha256: str) -> Verdict:
        try:
            async with self._store.as_file(namespace, sha256) as path:
                return "sound" if await to_thread.run_sync(_is_sound, path, sha256) else "quarantined"
        except BlobNotFound:
            return "missing"

    async def _withdraw(self, namespace: str, sha256: str, verdict: Verdict, stored_at: float) -> bool:
        """False when the blob was uploaded again after it was judged."""
        try:
            async with self._db.write() as db:
                keys = await self._entries.withdraw(db, namespace, sha256, verdict)
                if await self._repo.stored_at(db, namespace, sha256) != stored_at:
                    raise _StoredAgain
                if verdict == "quarantined":
                    await self._repo.forget(db, namespace, sha256)
        except _StoredAgain:
            return False
        if verdict == "quarantined":
            # Or a store that keeps what it has would refuse the same bytes when they come again, whole.
            await self._store.delete(namespace, sha256)
        for key in keys:
            await self._hub.announce((namespace, key))
        return True

    def _remember(self, namespace: str, sha256: str) -> None:
        if len(self._sound) >= _REMEMBERED:
            self._sound.clear()
        self._sound[(namespace, sha256)] = monotonic() + _SOUND_FOR_SECONDS


def _is_sound(path: Path, sha256: str) -> bool:
    try:
        return check_neff(path).sha256 == sha256
    except NeffInvalid:
        return False
    except FileNotFoundError as exc:
        raise BlobNotFound from exc
    except OSError as exc:
        # No word about the bytes: without descriptors, or with a file system that is away, every blob reads like
        # this, and what is called damaged is deleted.
        raise StorageUnavailable(f"the blob cannot be read to be judged: {exc.strerror}") from exc
