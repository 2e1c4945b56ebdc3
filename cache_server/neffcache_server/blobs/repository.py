"""Statements on blobs and on who uploaded them."""

from __future__ import annotations

from neffcache_client.wire import BlobAnswer
from sqlalchemy import delete, select

from neffcache_server.database.dialect import upsert
from neffcache_server.database.engine import Database, ReadConnection, WriteConnection
from neffcache_server.database.models import blobs, tickets, uploads


class BlobRepository:
    """Rows of stored blobs."""

    def __init__(self, database: Database) -> None:
        self._dialect = database.dialect
        self._clock = database.clock

    async def size(self, db: ReadConnection, namespace: str, sha256: str) -> int | None:
        """Length of a blob of that namespace, None when it has none of that digest."""
        statement = select(blobs.c.size).where(blobs.c.namespace == namespace, blobs.c.sha256 == sha256)
        size: int | None = (await db.execute(statement)).scalar_one_or_none()
        return size

    async def stored_at(self, db: ReadConnection, namespace: str, sha256: str) -> float | None:
        """When a blob was last uploaded, None when there is none."""
        statement = select(blobs.c.stored_at).where(blobs.c.namespace == namespace, blobs.c.sha256 == sha256)
        at: float | None = (await db.execute(statement)).scalar_one_or_none()
        return at

    async def forget(self, db: WriteConnection, namespace: str, sha256: str) -> None:
        """The blob is to be removed from the store."""
        await db.execute(delete(blobs).where(blobs.c.namespace == namespace, blobs.c.sha256 == sha256))

    async def put(self, db: WriteConnection, namespace: str, blob: BlobAnswer, epoch: int) -> None:
        """A verified blob is in the store, uploaded by the lease of that epoch."""
        values = {
            "size": blob.size,
            "compiler_version": blob.compiler_version,
            "target": blob.target,
            "stored_at": self._clock.now(),
            "doomed_at": None,
        }
        await db.execute(
            upsert(self._dialect, blobs)
            .values(namespace=namespace, sha256=blob.sha256, **values)
            .on_conflict_do_update(index_elements=["namespace", "sha256"], set_=values)
        )
        await db.execute(
            upsert(self._dialect, uploads)
            .values(epoch=epoch, sha256=blob.sha256, stored_at=self._clock.now())
            .on_conflict_do_nothing()
        )

    async def put_ticket(self, db: WriteConnection, epoch: int, sha256: str, size: int) -> None:
        """The lease of that epoch may send that blob past the server."""
        values = {"size": size, "issued_at": self._clock.now()}
        await db.execute(
            upsert(self._dialect, tickets)
            .values(epoch=epoch, sha256=sha256, **values)
            .on_conflict_do_update(index_elements=["epoch", "sha256"], set_=values)
        )

    async def ticket(self, db: ReadConnection, epoch: int, sha256: str) -> int | None:
        """The size a ticket was given for, None when there is no ticket."""
        statement = select(tickets.c.size).where(tickets.c.epoch == epoch, tickets.c.sha256 == sha256)
        size: int | None = (await db.execute(statement)).scalar_one_or_none()
        return size
