"""The lease machine without the database: what a key's state means for somebody who asks.

Everything here is a pure function of numbers that came from the database's clock. The service decides once on a
shared, unlocked read (which answers nearly everybody) and again inside the transaction before it changes anything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from neffcache_client.wire import AcquireRequest, Artifact, FailRequest, Failure, Holder

from neffcache_server.settings import ServerSettings

UNSHARED_SECONDS = 900.0
"""A store that took a result of a key no longer ago than this is not trusted to take the next."""


@dataclass(slots=True, frozen=True)
class Lease:
    """A lease as stored."""

    lease_id: str
    epoch: int
    namespace: str
    key: str
    status: Literal["live", "superseded", "released", "published", "failed"]
    confirmed: bool
    retry_failed: bool
    granted_at: float
    heartbeat_at: float | None
    expires_at: float
    holder: Holder
    outcome: str | None = None


@dataclass(slots=True, frozen=True)
class FailureRecord:
    """The round of a key: its transient failures, who yields, and the failure in force if there is one."""

    transient_count: int = 0
    last_failure_at: float = 0.0
    yield_host: str | None = None
    yield_until: float = 0.0
    failure: Failure | None = None
    retried_job: str | None = None
    unshared_at: float | None = None


@dataclass(slots=True, frozen=True)
class Snapshot:
    """All that decides about a key, read in one statement. `now` is the database's."""

    now: float
    artifact: Artifact | None = None
    live: Lease | None = None
    failures: FailureRecord | None = None
    usual_seconds: float | None = None
    """How long this key's compile took when it was last compiled."""
    usual_peak: int | None = None
    """And what memory."""

    @property
    def held(self) -> bool:
        """Somebody holds the lease and it has not run out."""
        return self.live is not None and self.live.expires_at > self.now

    @property
    def settled(self) -> bool:
        """True when waiting on makes sense: nothing to serve, nothing failed, somebody holds the lease."""
        return self.held and self.artifact is None and self.failure_in_force is None

    @property
    def unshared_seconds(self) -> float | None:
        """How long ago a result of this key first could not be handed over; None: none, or long ago."""
        at = self.failures.unshared_at if self.failures else None
        return self.now - at if at is not None and self.now - at < UNSHARED_SECONDS else None

    @property
    def failure_in_force(self) -> Failure | None:
        """The failure that is answered at present."""
        failure = self.failures.failure if self.failures else None
        return failure if failure is not None and failure.until > self.now else None


@dataclass(slots=True, frozen=True)
class Hit:
    artifact: Artifact


@dataclass(slots=True, frozen=True)
class Failed:
    failure: Failure


@dataclass(slots=True, frozen=True)
class Busy:
    """Wait. `retry_after` says when the answer may change without an event."""

    holder: Holder | None = None
    elapsed: float | None = None
    heartbeat_age: float | None = None
    eta: float | None = None
    retry_after: float | None = None
    unshared: float | None = None


@dataclass(slots=True, frozen=True)
class Grant:
    """The asker may have the lease. `how`: nobody has it, its holder ran out, its holder's host gives it up, own."""

    how: Literal["free", "expired", "takeover", "own"]


Decision = Hit | Failed | Busy | Grant


def decide(state: Snapshot, request: AcquireRequest, arrived: float) -> Decision:
    """What `request`, which reached the server at `arrived`, is told."""
    if state.artifact is not None:
        return Hit(state.artifact)
    live = state.live
    if live is not None and live.lease_id == request.lease_id:
        return Grant("own")
    failure = state.failure_in_force
    if failure is not None and not _passes_over(state.failures, failure, request, arrived):
        return Failed(failure)
    takeover = live is not None and request.supersedes == live.lease_id and request.holder.boot == live.holder.boot
    if live is not None and state.held and not takeover:
        return _busy(live, state)
    if not request.can_compile:
        return Busy()
    wait = _yield_seconds(state, request)
    if wait > 0:
        return Busy(retry_after=wait)
    if live is None:
        return Grant("free")
    return Grant("takeover" if takeover else "expired")


def _passes_over(record: FailureRecord | None, failure: Failure, request: AcquireRequest, arrived: float) -> bool:
    if request.from_spool:
        return True
    if not request.retry_failed or record is None:
        return False
    # 64 ranks all carry the flag. One of them tries again; its failure answers the other 63, or the job would
    # compile the broken graph 64 times in a row.
    retried = record.retried_job is not None and record.retried_job == request.holder.job
    return not retried and record.last_failure_at <= arrived


def _yield_seconds(state: Snapshot, request: AcquireRequest) -> float:
    record = state.failures
    if record is None or request.from_spool or record.yield_host != request.holder.host:
        return 0.0
    if request.retry_failed and state.failure_in_force is not None:
        # Told to wait it would ask again as anybody else, and be answered with the failure it was to pass over.
        return 0.0
    return record.yield_until - state.now


def _busy(live: Lease, state: Snapshot) -> Busy:
    elapsed = max(0.0, state.now - live.granted_at)
    usual = state.usual_seconds
    return Busy(
        holder=live.holder,
        elapsed=elapsed,
        heartbeat_age=max(0.0, state.now - (live.heartbeat_at or live.granted_at)),
        eta=max(0.0, usual - elapsed) if usual is not None else None,
        unshared=state.unshared_seconds,
    )


def _current_round(record: FailureRecord | None, now: float, settings: ServerSettings) -> FailureRecord:
    if record is None or record.last_failure_at + settings.round_seconds <= now:
        return FailureRecord()
    return record


def after_failure(
    record: FailureRecord | None, report: FailRequest, lease: Lease, now: float, settings: ServerSettings
) -> FailureRecord:
    """The round after `lease` reported a failure."""
    now_round = _current_round(record, now, settings)
    before = now_round.failure
    transient = report.kind == "transient"
    count = now_round.transient_count + transient
    exhausted = transient and count >= settings.transient_attempts
    failure = None
    if exhausted or not transient:
        failure = Failure(
            kind="exhausted" if exhausted else "deterministic",
            exit_code=report.exit_code,
            code=report.code,
            log_tail=report.log_tail,
            host=lease.holder.host,
            first_seen_at=before.first_seen_at if before is not None else now,
            until=now + (settings.exhausted_seconds if exhausted else settings.deterministic_seconds),
        )
    return replace(
        now_round,
        transient_count=count,
        last_failure_at=now,
        yield_host=lease.holder.host if transient else now_round.yield_host,
        yield_until=now + settings.yield_seconds if transient else now_round.yield_until,
        failure=failure or (before if transient else None),
        retried_job=lease.holder.job if lease.retry_failed and failure else now_round.retried_job,
    )


def after_loss(record: FailureRecord | None, now: float, settings: ServerSettings) -> FailureRecord:
    """The round after a working holder fell silent and was superseded.

    A loss is counted, but only a reported failure makes a key fail: five killed holders in a row say something
    about their hosts, and the sixth may well succeed.
    """
    now_round = _current_round(record, now, settings)
    return replace(now_round, transient_count=now_round.transient_count + 1, last_failure_at=now)
