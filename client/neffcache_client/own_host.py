"""What a request has to do with the other processes of its host: one leads, the others wait for what it gets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from neffcache_client.host_lock import HostLock, lease_of_the_dead
from neffcache_client.local_tier import LocalTier
from neffcache_client.results import Obtained, Verdict
from neffcache_client.settings import ClientSettings

_GLANCE_SECONDS = 0.05


class OwnHost:
    """One key on this host. Whoever makes one releases its `lock`."""

    def __init__(
        self,
        settings: ClientSettings,
        tier: LocalTier,
        key: str,
        output: str,
        *,
        abort: threading.Event,
        log: Callable[[str], None],
        seconds: float,
    ) -> None:
        """`seconds`: so long a leader is waited for before the server is asked past it."""
        self.lock = HostLock(settings.lock_dir, settings.namespace, key)
        self.waited = False
        self.waited_seconds = 0.0
        self.corrupt = 0
        """Local copies that were found damaged."""
        self._tier = tier
        self._key = key
        self._output = output
        self._abort = abort
        self._log = log
        self._seconds = seconds
        self._dead: str | None = None

    def local(self, verdict: Verdict) -> Obtained | None:
        """The local tier's NEFF at the output. Raises LocalTierError when that cannot be written."""
        before = self._tier.corrupt
        artifact = self._tier.fetch(self._key, self._output)
        self.corrupt += self._tier.corrupt - before
        if artifact is None:
            return None
        return Obtained(verdict=verdict, bytes=artifact.size, saved_seconds=artifact.compile_seconds)

    def lead(self) -> Obtained | None:
        """Become the leader, or find that another one got the NEFF, or go on without after a while."""
        if self.lock.try_lock() is not False:
            return None
        self._log(f"waiting for {self._key[:12]}: another process of this host is getting it")
        return self.await_leader(lambda: False)

    def await_leader(self, patient: Callable[[], bool]) -> Obtained | None:
        """What the leader gets; None without one, and after `seconds` unless `patient`. Raises Aborted."""
        began = time.monotonic()
        try:
            while True:
                locked = self.lock.wait(self._seconds, abort=self._abort, peek=lambda: self._tier.contains(self._key))
                # Not for the moment in which a launcher looks whether somebody leads.
                self.waited = self.waited or time.monotonic() - began > _GLANCE_SECONDS
                if found := self.local("waited"):
                    return found
                if locked or not self.lock.contended or not patient():
                    return None
        finally:
            self.waited_seconds += time.monotonic() - began

    def leader_runs(self) -> bool:
        """The leader is alive and not stopped."""
        holder = self.lock.read()
        return holder is not None and holder.runs()

    def dead_lease(self) -> str | None:
        """The lease of a leader that died here, to be superseded: once found, named in every question."""
        if self.lock.held:
            self._dead = lease_of_the_dead(self.lock, self._abort) or self._dead
        return self._dead
