"""Statements that list failures."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from neffcache_client.wire import Failure
from sqlalchemy import select

from neffcache_server.database.engine import Database, ReadConnection
from neffcache_server.database.models import failures
from neffcache_server.leases.repository import FAILURE_COLUMNS, failure_of


@dataclass(slots=True, kw_only=True)
class KeyFailure(Failure):
    """A failure in force, and the key it stands for."""

    key: str


class FailureRepository:
    """Failures that are answered at present."""

    def __init__(self, database: Database) -> None:
        self._clock = database.clock

    async def in_force(self, db: ReadConnection, namespace: str, limit: int) -> list[KeyFailure]:
        """Failures that have not run out, latest first."""
        statement = (
            select(failures.c.key, *FAILURE_COLUMNS)
            .where(failures.c.namespace == namespace, failures.c.until > self._clock.now())
            .order_by(failures.c.last_failure_at.desc(), failures.c.key)
            .limit(limit)
        )
        found = [(row.key, failure_of(row)) for row in await db.execute(statement)]
        return [KeyFailure(key=key, **asdict(failure)) for key, failure in found if failure is not None]
