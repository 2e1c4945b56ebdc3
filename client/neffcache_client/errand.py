"""One request for one key, from the local tier to the caller's file.

local tier -> host leader -> local tier -> server -> hit:     download
                                                     leased:  compile, publish
                                                     busy:    wait, ask again
                                                     failed:  hand the failure on
any fault of the server -> compile under the host lock, keep locally, spool
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from neffcache_client.asker import Asker
from neffcache_client.breaker import Breaker
from neffcache_client.contact import Contact, OutageTooLong
from neffcache_client.ends import missing, own_failure, own_result, refusal, told_failure
from neffcache_client.errors import (
    Aborted,
    CacheUnavailable,
    LeaseSuperseded,
    LocalTierError,
    NotAllowed,
    RequestRefused,
)
from neffcache_client.heartbeat import Heart, LeaseView
from neffcache_client.local_tier import LocalTier, describe, hand_over, remove_quietly, unique
from neffcache_client.neff import NeffInfo
from neffcache_client.own_host import OwnHost
from neffcache_client.publishing import Publisher, Warn, mismatch, report_failure, tell_unshared
from neffcache_client.results import CompileResult, Obtained, Patience, Verdict
from neffcache_client.room import Room
from neffcache_client.settings import ClientSettings
from neffcache_client.summary_sender import Summarise, SummarySender
from neffcache_client.transfer import damage_is_the_servers, fetch
from neffcache_client.uploader import start_in_background
from neffcache_client.wire import AcquireAnswer, Artifact

if TYPE_CHECKING:
    # httpx takes longer to import than a waiter takes to be served: 64 ranks of a host would burn seconds of CPU.
    from neffcache_client.api import CacheClient

Compile = Callable[[LeaseView], CompileResult]
_MAX_COMPILES = 3
_ELSEWHERE_SECONDS = 4.0
"""After the second compile that this host has too little memory for: so long another host may take it over."""
_SERVER_AWAY = ("unreachable", "breaker_open", "server_lost", "not_shared")
"""Reasons for a fallback that may be gone before the compile has ended."""


class Errand:
    """Everything `NodeCache.obtain` does for one key. Use once: `run`, then read the figures."""

    def __init__(
        self,
        settings: ClientSettings,
        tier: LocalTier,
        breaker: Breaker,
        key: str,
        factors: dict[str, Any],
        *,
        output: str,
        compile: Compile,
        expect_version: str | None,
        expect_target: str | None,
        retry_failed: bool,
        graph_bytes: int | None,
        summarise: Summarise | None,
        abort: threading.Event,
        log: Callable[[str], None],
        warn: Warn,
        patience: Patience,
    ) -> None:
        self.compile_seconds: float | None = None
        self.cpu_seconds: float | None = None
        self.peak_rss_bytes: int | None = None
        self._settings = settings
        self._tier = tier
        self._breaker = breaker
        self._key = key
        self._factors = factors
        self._output = output
        self._compile_callable = compile
        self._expect = {"expect_version": expect_version, "expect_target": expect_target}
        self._retry_failed = retry_failed
        self._room = Room(settings, key, graph_bytes)
        self._give_up_at: float | None = None
        self._summarise = summarise
        self._summary: SummarySender | None = None
        self._abort = abort
        self._log = log
        self._warn = warn
        self._patience = patience
        self._publisher = Publisher(settings, tier, abort=abort, warn=warn)
        self._host = OwnHost(settings, tier, key, output, abort=abort, log=log, seconds=patience.leader)
        self._lock = self._host.lock
        self._client: CacheClient | None = None
        self._contact: Contact
        self._may_be_leased = False
        self._waited_seconds: float | None = None
        self._damaged = 0
        self._superseded = False
        self._compiles = 0
        self._last: CompileResult | None = None

    @property
    def waited_seconds(self) -> float:
        """For this host's leader and for the server's answer."""
        return self._host.waited_seconds + (self._waited_seconds or 0.0)

    @property
    def corrupt(self) -> int:
        """Copies that were found damaged, here and in transit."""
        return self._host.corrupt + self._damaged

    def run(self) -> Obtained:
        """Do it. Raises Aborted, LocalTierError when `output` cannot be written, and what `compile` raises."""
        try:
            return self._host.local("local") or self._host.lead() or self._ask()
        except BaseException:
            if self._may_be_leased:
                self._may_be_leased = not self._contact.release()
            raise
        finally:
            # A lease that may live on keeps its record: the next leader supersedes it once this process is gone.
            self._lock.release(clean=not self._may_be_leased)
            self._room.leave()
            if self._summary is not None and not self._abort.is_set():
                self._summary.finish()
            if self._client is not None:
                self._client.close()

    # The server

    def _ask(self) -> Obtained:
        if not self._breaker.allow():
            return self._fallback("breaker_open", self._breaker.why or "the cache server could not be used just now")
        try:
            answer = self._first_contact()
        except (CacheUnavailable, NotAllowed) as exc:
            if isinstance(exc, NotAllowed) and exc.code == "write_needed":
                # The server is well and has hits for us; only this key's compile stays ours, and is not spooled.
                self._breaker.succeeded()
                return self._fallback("refused", str(exc))
            self._breaker.failed(str(exc))
            return self._fallback("not_allowed" if isinstance(exc, NotAllowed) else "unreachable", str(exc))
        except RequestRefused as exc:
            self._breaker.succeeded()
            return self._fallback("refused", str(exc))
        except BaseException:
            self._breaker.given_up()
            raise
        self._breaker.succeeded()
        if self._settings.mode == "readwrite":
            start_in_background(self._settings)
        return self._follow(answer)

    def _first_contact(self) -> AcquireAnswer:
        self._connect()
        return self._acquire(retry_failed=self._retry_failed)

    def _connect(self) -> Contact:
        if self._client is None:
            from neffcache_client.api import CacheClient

            self._client = CacheClient(self._settings)
            given = (self._client, self._settings, self._key, self._factors)
            self._contact = Contact(*given, abort=self._abort, patience=self._patience, log=self._log)
            self._contact.waited_before = self.waited_seconds
        return self._contact

    def _connect_as_leader(self) -> Contact:
        """As in `_acquire`: a lease has its name on this host before it is asked for."""
        contact = self._connect()
        self._lock.write(contact.lease_id)
        return contact

    def _acquire(self, *, retry_failed: bool = False) -> AcquireAnswer:
        dead = self._host.dead_lease()
        # Written down before it is asked for: a death from here on leaves a name to supersede.
        self._lock.write(self._contact.lease_id)
        self._may_be_leased = True
        self._contact.may_compile = self._give_up_at is None and (
            self._settings.mode != "readwrite" or self._room.enter()
        )
        answer = self._contact.first(supersedes=dead, retry_failed=retry_failed)
        self._may_be_leased = answer.state in ("leased", "busy")
        if answer.state != "leased":
            self._room.give_up_unused()
        return answer

    def _room_came(self) -> bool:
        if not self._room.came():
            return False
        self._contact.may_compile = True
        return True

    def _follow(self, answer: AcquireAnswer) -> Obtained:
        blob_missing = 0
        while True:
            if answer.state == "hit" and answer.artifact is not None:
                self._may_be_leased = False
                found, reason = self._fetch(answer.artifact)
                if found is not None:
                    return found
                blob_missing += reason == "blob_missing"
                if reason != "blob_missing" or blob_missing > 1:
                    return self._fallback(reason, "the artifact on the server cannot be used")
                next_answer = self._again()
            elif answer.state == "leased":
                if self._room.keeps_lease(answer):
                    done = self._compile_leased()
                    if done is not None:
                        return done
                else:
                    self._log(f"no room on this host to compile {self._key[:12]} now: waiting for it, or for others")
                    self._may_be_leased = not self._contact.release()
                next_answer = self._again()
            elif answer.state == "failed" and answer.failure is not None:
                return self._failed(answer)
            else:
                if self._settings.mode != "readwrite" and answer.holder is None:
                    return self._nobody_compiles()
                if self._settings.mode == "readwrite" and (answer.unshared_seconds or 0.0) > self._patience.outage:
                    return self._fallback("not_shared", "for a minute no result of this graph could be handed over")
                if self._given_up(answer):
                    assert self._last is not None
                    return own_failure(self._last, "out_of_memory", counted=True)
                next_answer = self._wait(answer)
            if isinstance(next_answer, Obtained):
                return next_answer
            answer = next_answer

    def _again(self) -> AcquireAnswer | Obtained:
        """Ask under a new lease id, as somebody who never had one."""
        self._contact.renew()
        try:
            return self._acquire()
        except (CacheUnavailable, RequestRefused) as exc:
            if self._last is not None:
                return own_failure(self._last, "unreachable")
            return self._fallback("unreachable", str(exc))

    def _wait(self, busy: AcquireAnswer) -> AcquireAnswer | Obtained:
        began = time.monotonic()

        def supersedes() -> str | None:
            dead = self._host.dead_lease()
            if self._lock.held:
                self._lock.write(self._contact.lease_id)
            return dead

        trouble: OutageTooLong | RequestRefused
        try:
            answer = self._contact.wait(
                busy, supersedes=supersedes, interrupt=lambda: self._lock.arrived() or self._room_came()
            )
        except (OutageTooLong, RequestRefused) as exc:
            trouble = exc
        else:
            if answer.state != "leased":
                self._room.give_up_unused()
            return answer
        finally:
            self._waited_seconds = (self._waited_seconds or 0.0) + time.monotonic() - began
        return self._waited_in_vain(trouble)

    def _waited_in_vain(self, trouble: OutageTooLong | RequestRefused) -> AcquireAnswer | Obtained:
        why = str(trouble)
        if isinstance(trouble, OutageTooLong):
            if self._give_up_at is not None and self._last is not None:
                return own_failure(self._last, "out_of_memory")
            return self._refusal("server_lost", why) or self._compile_while_asking("server_lost")
        if isinstance(trouble, LeaseSuperseded) and not self._superseded:
            # Granted in an answer that never came, and taken from us since: ask as any other, once.
            self._superseded = True
            return self._again()
        return self._fallback("refused", why)

    def _failed(self, answer: AcquireAnswer) -> Obtained:
        failure = answer.failure
        assert failure is not None
        self._may_be_leased = False
        if failure.kind == "exhausted" and self._last is not None:
            return own_failure(self._last, "exhausted", counted=True)
        return told_failure(failure)

    def _nobody_compiles(self) -> Obtained:
        self._may_be_leased = False
        self._tell_miss("nobody compiles it")
        if self._settings.mode == "require":
            return missing("required", f"no NEFF for key {self._key} is in the cache")
        return self._compile_privately("compiled", "readonly")

    # A hit

    def _fetch(self, artifact: Artifact) -> tuple[Obtained | None, str]:
        """The artifact at `output`, or why not."""
        assert self._client is not None
        if (why := mismatch(artifact.compiler_version, artifact.target, **self._expect)) is not None:
            # Only a key or a server that is broken can bring this about.
            self._warn("mismatch", f"the artifact of {self._key[:12]} is not used: its {why}")
            return None, "mismatch"
        temp = os.path.join(os.path.dirname(self._output) or ".", unique(".neffcache"))
        try:
            reason, damaged = fetch(self._client, artifact, temp, abort=self._abort, log=self._log)
        except OSError as exc:
            raise LocalTierError(f"{self._output} cannot be written: {describe(exc)}") from exc
        self._damaged += damaged
        if reason == "corrupt" and damage_is_the_servers(
            self._client, artifact, seconds=self._patience.report, abort=self._abort
        ):
            self._log(f"the server's copy of {self._key[:12]} was damaged and is withdrawn")
            reason = "blob_missing"
        if reason is not None:
            return None, reason
        self._publisher.keep_artifact(self._key, temp, artifact)
        try:
            hand_over(temp, self._output)
        finally:
            remove_quietly(temp)
        waited = self._host.waited or self._waited_seconds is not None
        verdict: Verdict = "waited" if waited else "remote"
        found = Obtained(verdict=verdict, bytes=artifact.size, saved_seconds=artifact.compile_seconds, counted=True)
        return found, ""

    # A miss

    def _tell_miss(self, what: str) -> None:
        """Name the key for whoever wants to know why it missed, and let the server know its graph."""
        if self._summary is not None:
            return
        assert self._client is not None
        self._log(f"miss {self._key[:16]}, {what}; why: neffcache explain {self._key[:16]}")
        self._summary = SummarySender(self._client, self._key, self._summarise, self._log)
        self._summary.start()

    # A compile

    def _compile(self, view: LeaseView) -> CompileResult:
        self._room.wait(view, self._abort)
        self._compiles += 1
        try:
            result = self._compile_callable(view)
        finally:
            self._room.leave()
        self.compile_seconds = (self.compile_seconds or 0.0) + result.seconds
        if self._abort.is_set():
            raise Aborted
        self.cpu_seconds, self.peak_rss_bytes = result.cpu_seconds, result.peak_rss_bytes
        self._room.learn(result)
        self._last = result
        return result

    def _given_up(self, answer: AcquireAnswer) -> bool:
        return self._give_up_at is not None and answer.holder is None and time.monotonic() > self._give_up_at

    def _compile_leased(self) -> Obtained | None:
        """Compile under the lease; None when the lease went back and this process asks like any other."""
        assert self._client is not None
        self._tell_miss("compiling it here")
        view = LeaseView()
        heart = Heart(self._client, self._contact.lease_id, view, self._log)
        try:
            result = self._compile(view)
            return self._shared(result, view)
        finally:
            heart.stop()

    def _finish(self, result: CompileResult, view: LeaseView) -> Obtained:
        """Copies first, then the caller's file: the copies need it where it is."""
        info, reason = self._publisher.judge(result, **self._expect)
        if info is not None:
            self._publisher.keep(self._key, result.output or "", info, result.seconds)
            reason = "lease_lost" if view.lost else self._publish(result, info)
        if reason in (None, "lease_lost"):
            self._may_be_leased = False
        else:
            # Or the hosts that wait would compile one after the other, each in the hope that its result is shared.
            tell_unshared(self._contact.client, self._contact.lease_id, seconds=self._patience.release)
            if reason != "spooled":
                self._may_be_leased = not self._contact.release()
        hand_over(result.output, self._output)
        return own_result(result, "compiled", reason, strict=self._settings.strict)

    def _publish(self, result: CompileResult, info: NeffInfo) -> str | None:
        assert self._client is not None
        entry = self._publisher.entry(self._key, self._factors, result, self._contact.lease_id)
        why = self._publisher.publish(self._client, entry, result.output or "", info, self._patience)
        if why == "spooled":
            # The uploader goes on with this very lease, so that nobody compiles this again.
            start_in_background(self._settings)
        return why

    def _report(self, result: CompileResult) -> Obtained | None:
        assert self._client is not None
        trouble = report_failure(
            self._client, self._contact.lease_id, result, seconds=self._patience.publish, abort=self._abort
        )
        if trouble is not None:
            self._log(f"the failed compile could not be reported: {trouble}")
            return own_failure(result, "unreachable")
        self._may_be_leased = False
        if result.kind == "deterministic" or self._compiles >= _MAX_COMPILES:
            return own_failure(result, result.kind, counted=True)
        if self._room.starved > 1:
            self._log("this host has too little memory for the compile, twice: leaving it to another host")
            self._give_up_at = time.monotonic() + _ELSEWHERE_SECONDS - 1.0
            self._contact.poll = _ELSEWHERE_SECONDS
            return None
        self._log(f"the compile ended with {result.exit_code} for no reason of its own; asking again")
        return None

    def _compile_while_asking(self, reason: str) -> Obtained:
        """Compile without a lease, and get one, or somebody else's NEFF, as soon as the server can be used."""
        view = LeaseView()
        asker = Asker(self._connect_as_leader, self._breaker, view, self._log)
        try:
            try:
                result = self._compile(view)
            finally:
                asker.stop()
                self._may_be_leased = self._may_be_leased or asker.may_be_leased
            done = self._shared(result, view) if asker.leased else None
        finally:
            asker.stop_heart()
        if done is not None:
            return done
        if result.kind == "ok":
            return self._keep_alone(result, "fallback", reason)
        if asker.artifact is not None:
            found, _ = self._fetch(asker.artifact)
            if found is not None:
                return found
        if not asker.leased:
            return own_failure(result, reason)
        answer = self._again()
        return answer if isinstance(answer, Obtained) else self._follow(answer)

    def _shared(self, result: CompileResult, view: LeaseView) -> Obtained | None:
        return self._finish(result, view) if result.kind == "ok" else self._report(result)

    # Without the server

    def _refusal(self, reason: str, why: str) -> Obtained | None:
        """What forbids a compile without the cache, if anything does; otherwise the one warning."""
        if (refused := refusal(self._settings, reason, why)) is not None:
            return refused
        self._warn("fallback", f"the cache cannot be used, compiling without it: {why}")
        return None

    def _fallback(self, reason: str, why: str) -> Obtained:
        return self._refusal(reason, why) or self._compile_privately("fallback", reason)

    def _compile_privately(self, verdict: str, reason: str) -> Obtained:
        if self._lock.contended and (found := self._host.await_leader(self._host.leader_runs)):
            return found
        if self._lock.held:
            if self._tier.writable():
                self._lock.write("")
            else:
                # Nothing will be left for the others of this host to find: let them compile side by side.
                self._lock.release()
        if reason in _SERVER_AWAY and self._settings.mode == "readwrite":
            return self._compile_while_asking(reason)
        result = self._compile(LeaseView())
        if result.kind != "ok":
            return own_failure(result, reason)
        return self._keep_alone(result, verdict, reason)

    def _keep_alone(self, result: CompileResult, verdict: str, reason: str) -> Obtained:
        info, unusable = self._publisher.judge(result, **self._expect)
        if info is not None:
            self._publisher.keep(self._key, result.output or "", info, result.seconds)
            # A bad artifact and a refusal would meet the upload as they met this process.
            if self._settings.mode == "readwrite" and reason not in ("refused", "corrupt", "mismatch"):
                entry = self._publisher.entry(self._key, self._factors, result)
                self._publisher.spool(entry, result.output or "")
        hand_over(result.output, self._output)
        return own_result(result, verdict, unusable or reason, strict=self._settings.strict)
