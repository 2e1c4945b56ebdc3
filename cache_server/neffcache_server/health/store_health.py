"""Whether the store can be used, as the readiness probe has to tell it."""

from __future__ import annotations

import asyncio
import logging
from time import monotonic

from neffcache_server.kit.shared_read import SharedRead
from neffcache_server.problems import StorageUnavailable
from neffcache_server.storage.base import BlobStore

_log = logging.getLogger(__name__)

# Proxies give a probe a second, and a store that swallows packets takes many to be given up.
_PROBE_SECONDS = 0.5


class StoreHealth:
    """Looks at the store when asked, once for everybody who asks at the same time."""

    def __init__(self, store: BlobStore, tolerated_seconds: float) -> None:
        """`tolerated_seconds`: how long a store that worked may be away."""
        self._store = store
        self._tolerated = tolerated_seconds
        self._look = SharedRead(self._check)
        self._worked = False
        self._away_since: float | None = None

    async def trouble(self) -> str | None:
        """None when the store can be used, else why not.

        Raises StorageUnavailable instead when it has been so for longer than is tolerated, or ever since the start: a
        new replica with wrong credentials must not take the place of one that works.
        """
        try:
            await asyncio.wait_for(self._look(), _PROBE_SECONDS if self._worked else None)
            return None
        except TimeoutError:
            why = f"the cache's store does not answer within {_PROBE_SECONDS:g} s"
        except StorageUnavailable as exc:
            why = str(exc)
        if self._away_since is None:
            self._away_since = monotonic()
            _log.warning("%s", why)
        if not self._worked or monotonic() - self._away_since >= self._tolerated:
            raise StorageUnavailable(why)
        return why

    async def _check(self) -> None:
        await self._store.check()
        # Here and not where it is waited for: an answer that comes late is an answer.
        self._worked = True
        if self._away_since is not None:
            _log.warning("the cache's store can be used again, after %.0f s", monotonic() - self._away_since)
            self._away_since = None
