"""How many bytes a namespace may hold."""

from __future__ import annotations

from sqlalchemy import func, select

from neffcache_server.database.engine import Database
from neffcache_server.database.models import blobs
from neffcache_server.problems import QuotaExceeded
from neffcache_server.settings import ServerSettings


async def check_quota(
    database: Database, settings: ServerSettings, namespace: str, sha256: str, size: int | None
) -> None:
    """Raises QuotaExceeded when the namespace has no room for a blob of `size` bytes (None: not known yet).

    Uploads that run at the same time are not counted, so a namespace can end up above its quota by as much.
    """
    quota = settings.quota_of(namespace)
    if not quota:
        return
    others = select(func.coalesce(func.sum(blobs.c.size), 0)).where(
        blobs.c.namespace == namespace, blobs.c.sha256 != sha256, blobs.c.doomed_at.is_(None)
    )
    async with database.read() as db:
        held = int((await db.execute(others)).scalar_one())
    if held + (size or 1) > quota:
        raise QuotaExceeded(
            f"namespace {namespace} holds {held} of {quota} bytes, which leaves no room for {size or 'more'}; "
            "remove entries or raise the quota"
        )
