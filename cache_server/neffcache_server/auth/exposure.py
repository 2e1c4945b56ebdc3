"""A server that strangers can reach does not start without a lock on its door."""

from __future__ import annotations

import asyncio

from neffcache_server.auth.repository import TokenRepository
from neffcache_server.database.engine import open_database
from neffcache_server.problems import SetupError
from neffcache_server.settings import ServerSettings


def check_access(settings: ServerSettings) -> None:
    """Raises SetupError when nobody could use the server: no anonymous access, and no token."""
    if settings.anonymous != "off" or settings.admin_token is not None or asyncio.run(_has_tokens(settings)):
        return
    raise SetupError(
        f"whoever reaches {settings.host} needs a token, and there is none: set NEFFCACHE_SERVER_ADMIN_TOKEN "
        "(`openssl rand -hex 24` makes one), or let everybody in with NEFFCACHE_SERVER_ALLOW_ANONYMOUS=write"
    )


async def _has_tokens(settings: ServerSettings) -> bool:
    database = open_database(settings)
    try:
        async with database.read() as db:
            return await TokenRepository(database).any_live(db)
    finally:
        await database.close()
