"""Questions to a server that was away, asked while the compile runs that it could not prevent."""

from __future__ import annotations

import threading
from collections.abc import Callable

from neffcache_client.breaker import Breaker
from neffcache_client.contact import Contact, Log
from neffcache_client.errors import CacheUnavailable, LeaseSuperseded, RequestRefused
from neffcache_client.heartbeat import Heart, LeaseView
from neffcache_client.wire import Artifact

ASK_SECONDS = 2.0


class Asker:
    """Keeps asking while a compile runs that nobody could be asked for.

    A lease that is granted meanwhile is kept alive and makes the result publishable; a hit makes the compile
    unnecessary. The breaker says when to ask, so that a host's compiles do not all knock at an absent server.
    """

    def __init__(self, connect: Callable[[], Contact], breaker: Breaker, view: LeaseView, log: Log) -> None:
        self.may_be_leased = False
        """A lease was asked for, and nothing that came says that there is none."""
        self.leased = False
        self.artifact: Artifact | None = None
        self._connect = connect
        self._breaker = breaker
        self._view = view
        self._log = log
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._heart: Heart | None = None
        self._thread = threading.Thread(target=self._run, name="neffcache-asker", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No more questions, and nothing changes after this. The heart of a granted lease goes on."""
        self._stop.set()
        self._thread.join(1.0)
        with self._lock:
            # A question that is still under way undoes what it is granted.
            self._breaker.given_up()

    def stop_heart(self) -> None:
        """The lease has ended."""
        if self._heart is not None:
            self._heart.stop()

    def _run(self) -> None:
        while not self._stop.wait(ASK_SECONDS):
            if self._breaker.allow() and self._ask():
                return

    def _ask(self) -> bool:
        """True when there is nothing more to ask."""
        try:
            with self._lock:
                if self._stop.is_set():
                    return True
                contact = self._connect()
                self.may_be_leased = True
            answer = contact.client.acquire(contact.key, contact.request(0.0))
        except CacheUnavailable as exc:
            self._breaker.failed(str(exc))
            return False
        except RequestRefused as exc:
            self._breaker.succeeded()
            self.may_be_leased = False
            if isinstance(exc, LeaseSuperseded):
                contact.renew()
            return not isinstance(exc, LeaseSuperseded)
        self._breaker.succeeded()
        self.may_be_leased = answer.state == "leased"
        with self._lock:
            late = self._stop.is_set()
            if answer.state == "leased" and not late:
                self._log(f"the cache server is back: the NEFF of {contact.key[:12]} will be shared")
                self._heart = Heart(contact.client, contact.lease_id, self._view, self._log)
                self.leased = True
            elif answer.state == "hit" and not late:
                self.artifact = answer.artifact
                self._view.not_needed.set()
        if answer.state == "leased" and late:
            contact.release()
        return answer.state in ("leased", "hit")
