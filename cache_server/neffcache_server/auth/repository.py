"""Statements on tokens and on the key that signs sessions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, func, insert, select, update

from neffcache_server.auth.principal import EVERYTHING, Role
from neffcache_server.auth.secrets import new_key
from neffcache_server.database.dialect import upsert
from neffcache_server.database.engine import Database, ReadConnection, WriteConnection
from neffcache_server.database.models import secrets, tokens

_SESSION_KEY = "session"


@dataclass(slots=True, frozen=True)
class TokenRow:
    """A token that may be used now."""

    id: str
    name: str
    role: Role
    namespace: str
    digest: str


class TokenRepository:
    """Bound to a database only for its clock and dialect."""

    def __init__(self, database: Database) -> None:
        self._clock = database.clock
        self._dialect = database.dialect

    @property
    def _live(self) -> ColumnElement[bool]:
        unexpired = tokens.c.expires_at.is_(None) | (tokens.c.expires_at > self._clock.now())
        return tokens.c.revoked_at.is_(None) & unexpired

    async def find(self, db: ReadConnection, *, digest: str | None = None, id: str | None = None) -> TokenRow | None:
        """The usable token of that digest or id."""
        which = tokens.c.sha256 == digest if digest is not None else tokens.c.id == id
        row = (await db.execute(select(tokens).where(which, self._live))).one_or_none()
        if row is None:
            return None
        return TokenRow(row.id, row.name, row.role, row.namespace, row.sha256)

    async def any_live(self, db: ReadConnection) -> bool:
        """True when somebody could use a token."""
        return bool((await db.execute(select(func.count()).select_from(tokens).where(self._live))).scalar_one())

    async def add(
        self,
        db: WriteConnection,
        *,
        id: str,
        digest: str,
        name: str,
        role: Role,
        namespace: str,
        created_by: str,
        seconds: float | None,
    ) -> Any:
        """Store a token; its row without the digest."""
        now = self._clock.now()
        values: dict[str, Any] = {"id": id, "sha256": digest, "name": name, "role": role, "namespace": namespace}
        values |= {"created_by": created_by, "created_at": now}
        if seconds is not None:
            values["expires_at"] = now + seconds
        return (await db.execute(insert(tokens).values(values).returning(*_SHOWN))).one()

    async def listing(self, db: ReadConnection, namespace: str, limit: int) -> list[Any]:
        """Tokens of a namespace (`*`: all), newest first, revoked and expired ones too."""
        statement = select(*_SHOWN).order_by(tokens.c.created_at.desc(), tokens.c.id).limit(limit)
        if namespace != EVERYTHING:
            statement = statement.where(tokens.c.namespace == namespace)
        return list((await db.execute(statement)).all())

    async def namespace_of(self, db: ReadConnection, id: str) -> str | None:
        """Where a token is valid, None when there is none of that id."""
        statement = select(tokens.c.namespace).where(tokens.c.id == id)
        namespace: str | None = (await db.execute(statement)).scalar_one_or_none()
        return namespace

    async def revoke(self, db: WriteConnection, id: str) -> None:
        """Make a token useless; nothing happens when it is already."""
        await db.execute(
            update(tokens)
            .where(tokens.c.id == id, tokens.c.revoked_at.is_(None))
            .values(revoked_at=self._clock.now())
        )

    async def session_key(self, db: WriteConnection) -> str:
        """The key that signs sessions, the same for every replica; made by whoever needs it first."""
        row = upsert(self._dialect, secrets).values(name=_SESSION_KEY, value=new_key()).on_conflict_do_nothing()
        await db.execute(row)
        return str((await db.execute(select(secrets.c.value).where(secrets.c.name == _SESSION_KEY))).scalar_one())


_SHOWN = tuple(c for c in tokens.c if c.name != "sha256")
