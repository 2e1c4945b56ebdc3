"""Keeps a lease alive while a compiler runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from neffcache_client.errors import CacheUnavailable, RequestRefused
from neffcache_client.wire import HEARTBEAT_SECONDS, HeartbeatRequest

if TYPE_CHECKING:
    from neffcache_client.api import CacheClient

_RETRY_SECONDS = 2.0


@dataclass(slots=True)
class LeaseView:
    """What a compile tells about itself, sent with each heartbeat, and what it is told meanwhile."""

    phase: str | None = None
    """What the compiler is doing, at most 64 characters."""
    rss_bytes: int | None = None
    """Memory of the compiler's process tree."""
    told: Callable[[int], None] | None = None
    """Is told the same."""
    lost: bool = False
    """Another holder has the lease: the result will serve this job alone."""
    not_needed: threading.Event = field(default_factory=threading.Event)
    """Set when the NEFF arrived from elsewhere: the compiler may be ended, its result is not used."""

    def tell(self, rss_bytes: int) -> None:
        """The compiler's process tree takes so much memory at present."""
        self.rss_bytes = rss_bytes
        if self.told is not None:
            self.told(rss_bytes)


class Heart:
    """Beats from a thread until `stop`: at once, since a grant is provisional, then every third of the TTL."""

    def __init__(self, client: CacheClient, lease_id: str, view: LeaseView, log: Callable[[str], None]) -> None:
        self._client = client
        self._lease_id = lease_id
        self._view = view
        self._log = log
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="neffcache-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No beat starts after this. One under way is left to itself."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            pause = self._beat()
            if pause is None or self._stop.wait(pause):
                return

    def _beat(self) -> float | None:
        """Seconds until the next beat, None when the lease is gone."""
        view = self._view
        request = HeartbeatRequest(phase=view.phase[:64] if view.phase else None, rss_bytes=view.rss_bytes)
        try:
            answer = self._client.heartbeat(self._lease_id, request)
        except RequestRefused as exc:
            if not self._stop.is_set():
                view.lost = True
                self._log(f"the lease was lost ({exc}); the compile goes on for this job alone")
            return None
        except CacheUnavailable:
            # An expired lease may still beat until somebody supersedes it, so there is no point at which to stop.
            return _RETRY_SECONDS
        return min(HEARTBEAT_SECONDS, max(1.0, answer.ttl_seconds / 3))
