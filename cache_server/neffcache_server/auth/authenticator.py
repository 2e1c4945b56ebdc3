"""From what a request carries to who it is."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from time import monotonic

from neffcache_server.auth.limiter import RateLimiter
from neffcache_server.auth.principal import EVERYTHING, Principal
from neffcache_server.auth.repository import TokenRepository, TokenRow
from neffcache_server.auth.secrets import PREFIX, digest_of, read_session, session_holds, sign_session
from neffcache_server.database.engine import Database
from neffcache_server.kit.tasks import retrieve
from neffcache_server.problems import TokenRequired, TooManyRequests
from neffcache_server.settings import ServerSettings

REMEMBERED_SECONDS = 5.0
"""A token that is revoked may work for this long yet: looking each one up for every request would cost a query."""
_MOST_REMEMBERED = 10_000
_ADMIN = "admin"


class Authenticator:
    """Knows tokens, sessions and whether there is a way in without."""

    def __init__(self, database: Database, settings: ServerSettings) -> None:
        self._db = database
        self._settings = settings
        self._repo = TokenRepository(database)
        self._limiter = RateLimiter(settings.requests_per_minute)
        self._remembered: dict[str, tuple[float, TokenRow]] = {}
        self._asked: dict[str, asyncio.Task[TokenRow | None]] = {}
        self._session_key: str | None = None
        self._admin = None
        if settings.admin_token is not None:
            digest = digest_of(settings.admin_token.get_secret_value())
            self._admin = TokenRow(_ADMIN, "from the server's environment", "admin", EVERYTHING, digest)

    @property
    def local(self) -> bool:
        """Everybody on this machine may do everything, and nobody else can reach the server."""
        return self._settings.anonymous == "local"

    def anonymous(self, *, proxied: bool) -> Principal:
        """Whoever comes without a token. Raises TokenRequired where that is not enough."""
        mode = self._settings.anonymous
        if mode == "off":
            raise TokenRequired
        if mode == "local":
            # A proxy on this machine brings the whole world to an address that only this machine can reach.
            if proxied:
                raise TokenRequired("requests that come through a proxy need a token; see docs/operations.md")
            return Principal(id="anonymous", name="anonymous", role="admin", namespace=EVERYTHING, limited=False)
        return Principal(id="anonymous", name="anonymous", role=mode, namespace=EVERYTHING)

    async def by_token(self, token: str) -> Principal:
        """Whom a bearer token belongs to. Raises TokenRequired for one that is unknown, expired or revoked."""
        return self._principal(await self._row(token))

    async def _row(self, token: str) -> TokenRow:
        digest = digest_of(token)
        row = self._admin
        if row is None or not hmac.compare_digest(row.digest, digest):
            row = await self._find(digest, token.split("_")[0] == PREFIX)
        if row is None:
            raise TokenRequired("this token is unknown, has run out or was revoked")
        return row

    async def _find(self, digest: str, plausible: bool) -> TokenRow | None:
        return await self._recall(digest, lambda: self._read(digest=digest)) if plausible else None

    async def by_session(self, cookie: str) -> Principal:
        """Whom the cookie of a browser belongs to. Raises TokenRequired."""
        parts = read_session(cookie)
        if parts is not None:
            token_id, payload, signature = parts
            row = self._admin if token_id == _ADMIN else await self._by_id(token_id)
            if row is not None and session_holds(await self.session_key(), row.digest, payload, signature):
                return self._principal(row)
        raise TokenRequired("the session has ended; log in again")

    async def _by_id(self, id: str) -> TokenRow | None:
        return await self._recall(f"id {id}", lambda: self._read(id=id))

    async def open_session(self, token: str, seconds: float) -> str:
        """A cookie that stands for `token`. Raises TokenRequired."""
        row = await self._row(token)
        return sign_session(await self.session_key(), row.id, row.digest, seconds)

    async def session_key(self) -> str:
        """The replicas' common key for sessions."""
        if self._session_key is None:
            async with self._db.write() as db:
                self._session_key = await self._repo.session_key(db)
        return self._session_key

    def limit(self, principal: Principal) -> None:
        """Count a request. Raises TooManyRequests."""
        if principal.limited and (wait := self._limiter.wait_seconds(principal.id)) > 0:
            raise TooManyRequests(
                f"more than {self._settings.requests_per_minute} requests a minute; try again in {wait:.1f} s"
            )

    def forget(self, id: str) -> None:
        """Look a token up anew (it was revoked on this replica)."""
        self._remembered = {k: v for k, v in self._remembered.items() if v[1].id != id}

    def _principal(self, row: TokenRow) -> Principal:
        return Principal(
            id=row.id,
            name=row.name,
            role=row.role,
            namespace=row.namespace,
            trusted=self._settings.trusted_by(row.namespace),
        )

    async def _recall(self, name: str, read: Callable[[], Awaitable[TokenRow | None]]) -> TokenRow | None:
        """A row that was read within the last seconds. Ten thousand ranks that come at once share one query."""
        found = self._remembered.get(name)
        if found is not None and found[0] > monotonic():
            return found[1]
        task = self._asked.get(name)
        if task is None:
            task = self._asked[name] = asyncio.create_task(self._remember(name, read))
            task.add_done_callback(retrieve)
        return await asyncio.shield(task)

    async def _remember(self, name: str, read: Callable[[], Awaitable[TokenRow | None]]) -> TokenRow | None:
        try:
            row = await read()
        finally:
            del self._asked[name]
        if row is None:
            self._remembered.pop(name, None)
        else:
            if len(self._remembered) >= _MOST_REMEMBERED:
                self._remembered.clear()
            self._remembered[name] = (monotonic() + REMEMBERED_SECONDS, row)
        return row

    async def _read(self, *, digest: str | None = None, id: str | None = None) -> TokenRow | None:
        async with self._db.read() as db:
            return await self._repo.find(db, digest=digest, id=id)
