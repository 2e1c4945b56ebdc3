"""Asking the server for a key, within bounds: what a hang, an outage or an abort may cost is decided here."""

from __future__ import annotations

import math
import os
import random
import secrets
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from neffcache_client.bounded import Interrupted, TimeIsUp, bounded
from neffcache_client.errors import (
    Aborted,
    AnswerLost,
    CacheUnavailable,
    NeffcacheError,
    RequestRefused,
    ServerBusy,
    ServerDown,
    ServerUnreachable,
)
from neffcache_client.identity import boot_id, host_name
from neffcache_client.results import Patience
from neffcache_client.settings import ClientSettings
from neffcache_client.wire import AcquireAnswer, AcquireRequest, Holder

if TYPE_CHECKING:
    from neffcache_client.api import CacheClient

Log = Callable[[str], None]
_RETRY_SECONDS = (0.25, 0.5, 1.0, 2.0)
_BUSY_SECONDS = 0.25
_WARN_AT = 0.9
_CUT_SECONDS = 2.0
_TELL_SECONDS = 60.0
"""A waiter says so again after this: watchdogs over collectives run from 240 s upwards."""


class OutageTooLong(CacheUnavailable):
    """The server was lost while another host compiled, for longer than a waiter's patience."""


def this_holder(settings: ClientSettings) -> Holder:
    """How this process introduces itself."""
    job = settings.job[:255] if settings.job else None
    return Holder(host=host_name(), boot=boot_id(), pid=os.getpid(), rank=settings.rank, job=job)


class Contact:
    """One key's conversation with the server under one lease id."""

    def __init__(
        self,
        client: CacheClient,
        settings: ClientSettings,
        key: str,
        factors: dict[str, Any] | None,
        *,
        abort: threading.Event,
        patience: Patience,
        log: Log,
    ) -> None:
        self.client = client
        self.key = key
        self.lease_id = secrets.token_hex(16)
        self._factors = factors
        self._holder = this_holder(settings)
        self._can_compile = settings.mode == "readwrite"
        self.may_compile = True
        """False while this host has no room for another compile: then the question is for a result only."""
        self.poll = patience.poll
        self._abort = abort
        self._patience = patience
        self._log = log
        self._told_at: float | None = None
        self._lock_timeout = settings.lock_timeout
        self.waited_before = 0.0
        """Seconds that this process waited for its host's leader; for the statistics."""
        self._waiting_since: float | None = None

    def renew(self) -> None:
        """A new lease id, for another try after a lease of ours has ended."""
        self.lease_id = secrets.token_hex(16)

    def first(self, *, supersedes: str | None, retry_failed: bool) -> AcquireAnswer:
        """One question without waiting. Raises CacheUnavailable, RequestRefused or Aborted.

        It has 2 s in all to reach a server, which outlasts most restarts. One that has taken it may need longer:
        where 64 ranks start at once on few processors, everybody's answer is late, and a compile costs minutes.
        """
        seconds, extra = self._patience.first_contact, self._patience.first_answer
        deadline = time.monotonic() + seconds
        request = self.request(0.0, supersedes=supersedes, retry_failed=retry_failed)
        taken = threading.Event()

        def ask() -> AcquireAnswer:
            lost = False
            while True:
                try:
                    return self.client.acquire(self.key, request, seconds=seconds + extra, sent=taken.set)
                except (AnswerLost, ServerBusy, ServerDown) as exc:
                    taken.clear()
                    if isinstance(exc, AnswerLost) and not lost:
                        # The lease may have been granted, and the same question gets the same answer: ask, however
                        # late it is.
                        lost = True
                        continue
                    # A server that restarts is back in a moment, and for one that stops another one takes over.
                    if time.monotonic() + 2 * _BUSY_SECONDS > deadline or self._abort.wait(_BUSY_SECONDS):
                        raise

        try:
            return bounded(
                ask,
                seconds=seconds,
                abort=self._abort,
                late=self._undo,
                more=lambda: extra if taken.is_set() else 0.0,
            )
        except TimeIsUp:
            within = seconds + extra if taken.is_set() else seconds
            raise ServerUnreachable(f"the cache server did not answer within {within:g} s") from None

    def wait(
        self, busy: AcquireAnswer, *, supersedes: Callable[[], str | None], interrupt: Callable[[], bool]
    ) -> AcquireAnswer:
        """The next answer after `busy`, asked for through errors.

        `interrupt` is looked at all the time; when it is true the question is asked anew, with what `supersedes`
        then says. Raises OutageTooLong after `Patience.outage` of nothing but errors, RequestRefused, Aborted.
        """
        self._tell(busy)
        if self._waiting_since is None:
            self._waiting_since = time.monotonic()
        trouble_since: float | None = None
        tries = 0
        while True:
            request = self.request(self.poll, supersedes=supersedes())
            asked = time.monotonic()
            try:
                answer = bounded(
                    lambda request=request: self.client.acquire(self.key, request),  # type: ignore[misc]
                    seconds=None,
                    abort=self._abort,
                    interrupt=interrupt,
                )
            except Interrupted:
                continue
            except CacheUnavailable as exc:
                # From the failure on, not from the question: a server that holds a waiter for 25 s is well.
                trouble_since = trouble_since if trouble_since is not None else time.monotonic()
                if (held := time.monotonic() - asked) > _CUT_SECONDS:
                    # Something on the way ends connections that are silent for so long: ask for less than that.
                    self.poll = min(self.poll, held / 2)
                if time.monotonic() - trouble_since >= self._patience.outage:
                    raise OutageTooLong(f"{exc}, for {self._patience.outage:g} s") from exc
                self._sleep(_RETRY_SECONDS[min(tries, len(_RETRY_SECONDS) - 1)] * random.uniform(0.75, 1.25))
                tries += 1
                continue
            if answer.state == "busy" and time.monotonic() - asked < 0.2:
                # A server that does not wait shall not be asked in circles.
                self._sleep(0.2)
            return answer

    def release(self) -> bool:
        """Give the lease back, granted or not; True when the server confirmed. Bounded, never raises."""
        seconds = self._patience.release
        try:
            bounded(lambda: self.client.release(self.lease_id, seconds=seconds), seconds=seconds, abort=None)
        except RequestRefused:
            return True
        except (TimeIsUp, NeffcacheError):
            return False
        return True

    def request(self, wait: float, *, supersedes: str | None = None, retry_failed: bool = False) -> AcquireRequest:
        """The question, always under the same lease id."""
        waited = 0.0 if self._waiting_since is None else time.monotonic() - self._waiting_since
        return AcquireRequest(
            waited_seconds=self.waited_before + waited,
            lease_id=self.lease_id,
            holder=self._holder,
            factors=self._factors,
            wait_seconds=wait,
            can_compile=self._can_compile and self.may_compile,
            supersedes=supersedes,
            retry_failed=retry_failed,
        )

    def _undo(self, answer: AcquireAnswer) -> None:
        # Nobody waits for this answer any more. Unreleased, the grant would hold others up until it runs out.
        if answer.state == "leased":
            self.release()

    def _sleep(self, seconds: float) -> None:
        if self._abort.wait(seconds):
            raise Aborted

    def _tell(self, busy: AcquireAnswer) -> None:
        now = time.monotonic()
        waited = self.waited_before + (now - self._waiting_since if self._waiting_since is not None else 0.0)
        if waited + self._patience.poll > self._lock_timeout * _WARN_AT:
            self._log(
                f"WARNING: has waited {waited:.0f} s for {self.key[:12]}; TORCH_NEURONX_NEFF_CACHE_LOCK_TIMEOUT is "
                f"{self._lock_timeout:g} s, after which the other processes of this host stop waiting for this one. "
                "They will wait here instead, and nothing is compiled twice. A larger value avoids it."
            )
            self._lock_timeout = math.inf
        if self._told_at is not None and now - self._told_at < _TELL_SECONDS:
            return
        self._told_at = now
        self._log(waiting_text(self.key, busy))


def waiting_text(key: str, busy: AcquireAnswer) -> str:
    """Who compiles, for how long, and when it may end."""
    who = busy.holder
    if who is None:
        return f"waiting for {key[:12]}: nobody compiles it at present"
    text = f"waiting for {key[:12]}: compiled by pid {who.pid} on {who.host}"
    if who.rank is not None:
        text += f", rank {who.rank}"
    if who.job:
        text += f", job {who.job}"
    if busy.elapsed_seconds is not None:
        text += f", for {busy.elapsed_seconds:.0f} s"
    if busy.heartbeat_age_seconds is not None:
        text += f", last heartbeat {busy.heartbeat_age_seconds:.0f} s ago"
    if busy.eta_seconds is not None:
        text += f", expected in {busy.eta_seconds:.0f} s"
    return text
