"""The lease protocol: acquire, heartbeat, release, fail. (Publishing is in `publish`.)"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from time import monotonic

from neffcache_client.wire import (
    MAX_FACTORS_BYTES,
    AcquireAnswer,
    AcquireRequest,
    FailAnswer,
    FailRequest,
    Failure,
    HeartbeatAnswer,
    HeartbeatRequest,
    from_json,
)

from neffcache_server.database.engine import Database, ReadConnection, WriteConnection
from neffcache_server.explain.misses import MissLog
from neffcache_server.kit.hub import EventHub
from neffcache_server.kit.tracing import span
from neffcache_server.leases.gate import Gate, Gates
from neffcache_server.leases.machine import (
    Busy,
    Decision,
    Failed,
    Grant,
    Hit,
    Lease,
    Snapshot,
    after_failure,
    after_loss,
    decide,
)
from neffcache_server.leases.outage import Guard, OutageGuard
from neffcache_server.leases.pulse import SharedOutageGuard
from neffcache_server.leases.repository import LeaseRepository
from neffcache_server.problems import (
    ClientGone,
    FactorsTooLarge,
    LeaseEnded,
    LeaseIdReused,
    LeaseSuperseded,
    LeaseUnknown,
    ServerProblem,
    ShuttingDown,
)
from neffcache_server.recording.events import known_reason, of_holder
from neffcache_server.recording.recorder import Recorder
from neffcache_server.settings import ServerSettings
from neffcache_server.stats.counters import Counts, HitCounter, add_counts

_FOREVER = 3600.0


class _Granted:
    """The lease is the asker's."""

    def __init__(self, epoch: int, state: Snapshot) -> None:
        self.epoch = epoch
        self.state = state


class _OutageFound(Exception):
    """The server stood still just now; look again after leases were extended."""


class LeaseService:
    """Transitions of keys, each in one transaction."""

    def __init__(
        self,
        database: Database,
        hub: EventHub,
        counter: HitCounter,
        settings: ServerSettings,
        misses: MissLog,
        recorder: Recorder,
    ) -> None:
        self._db = database
        self._recorder = recorder
        self._misses = misses
        self._hub = hub
        self._counter = counter
        self._settings = settings
        self._repo = LeaseRepository(database)
        self.stopping = False
        self.gates = Gates(self._read, hub, settings.poll_seconds)
        self.outage: Guard
        if settings.embedded:
            self.outage = OutageGuard(settings.outage_seconds, self._extend_leases)
        else:
            self.outage = SharedOutageGuard(database, settings.outage_seconds, self._extend_leases_in)
        database.on_fault = self.outage.fault

    async def start(self) -> None:
        """Leases that ran out while no server was there go on for one TTL."""
        await self.outage.start()

    def stop(self) -> None:
        """From now on waiters and newcomers are told to go elsewhere."""
        self.stopping = True
        self.gates.wake_all()

    async def acquire(
        self, namespace: str, key: str, request: AcquireRequest, gone: Callable[[], Awaitable[bool]]
    ) -> AcquireAnswer:
        """The artifact, the lease, the failure, or who holds the lease after `wait_seconds` of waiting.

        `gone` tells whether the asker has hung up; then nothing is granted. Raises ServerProblem.
        """
        factors = _factors_text(request)
        began = monotonic()
        deadline = began + request.wait_seconds
        waited = False
        with self.gates.enter(namespace, key) as gate, ExitStack() as waiting:
            seen = gate.generation
            state = await gate.read()
            arrived = state.now
            state = await self._with_trusted(namespace, key, state)
            while True:
                self._check_running()
                decision: Decision | _Granted | None = decide(state, request, arrived)
                if isinstance(decision, Grant):
                    if await gone():
                        raise ClientGone
                    decision = await gate.attempt(lambda: self._try_grant(namespace, key, request, arrived, factors))
                left = deadline - monotonic()
                if decision is None:
                    seen, state = gate.generation, await gate.read()
                    continue
                if isinstance(decision, Busy) and not waited:
                    self._note_waiter(namespace, key, request, decision, factors)
                if not isinstance(decision, Busy) or left <= 0:
                    seconds = monotonic() - began if waited else 0.0
                    self._record(namespace, key, request, decision, request.waited_seconds + seconds)
                    return self._answer(namespace, key, decision, waited or request.waited_seconds > 0)
                if not waited:
                    waiting.enter_context(span("neffcache.wait"))
                waited = True
                seen, state = await self._next(gate, seen, state, min(left, decision.retry_after or _FOREVER))

    async def _with_trusted(self, namespace: str, key: str, state: Snapshot) -> Snapshot:
        """`state`, with the artifact of the trusted namespace where this one has none. Never leases over there."""
        trusted = self._settings.trusted_by(namespace)
        if trusted is None or state.artifact is not None:
            return state
        with self.gates.enter(trusted, key) as gate:
            artifact = (await gate.read()).artifact
        if artifact is None:
            return state
        self._counter.touch(trusted, key)
        return replace(state, artifact=artifact)

    async def _next(self, gate: Gate, seen: int, state: Snapshot, seconds: float) -> tuple[int, Snapshot]:
        """Wait for news; the generation and state to go on with."""
        await gate.wait(seen, seconds)
        news, seen_now = gate.latest, gate.generation
        # A wake may stem from a read that is older than this waiter's own.
        if seen_now == seen or news is None or news.now < state.now:
            self._check_running()
            news = await gate.read()
        return seen_now, news

    def _note_waiter(
        self, namespace: str, key: str, request: AcquireRequest, busy: Busy, factors: str | None
    ) -> None:
        self._misses.waits(namespace, key, request.holder)
        if busy.holder is None:
            self._misses.nobody_compiles(namespace, key, request.factors, factors)

    def _check_running(self) -> None:
        if self.stopping:
            raise ShuttingDown

    async def _read(self, namespace: str, key: str) -> Snapshot:
        async with self._db.read() as db:
            return await self._repo.snapshot(db, namespace, key)

    async def _try_grant(
        self, namespace: str, key: str, request: AcquireRequest, arrived: float, factors: str | None
    ) -> Decision | _Granted:
        while True:
            await self.outage.settle()
            try:
                async with self._db.write() as db:
                    decision = await self._grant(db, namespace, key, request, arrived, factors)
            except _OutageFound:
                await self.outage.resume()
                continue
            if decision is None:
                continue
            if isinstance(decision, _Granted):
                await self._hub.announce((namespace, key))
            return decision

    async def _grant(
        self,
        db: WriteConnection,
        namespace: str,
        key: str,
        request: AcquireRequest,
        arrived: float,
        factors: str | None,
    ) -> Decision | _Granted | None:
        """Decide again with the key locked, and grant. None: something moved, start over."""
        await self._repo.lock_key(db, namespace, key)
        own = await self._repo.find(db, request.lease_id)
        if own is not None and (own.namespace, own.key) != (namespace, key):
            raise LeaseIdReused
        state = await self._repo.snapshot(db, namespace, key)
        decision = decide(state, request, arrived)
        if not isinstance(decision, Grant):
            return decision
        if decision.how == "own" and state.live is not None:
            if not await self._repo.extend(db, state.live.epoch, self._settings.provisional_seconds):
                return None
            return _Granted(state.live.epoch, state)
        if own is not None:
            raise ended(own)
        if state.live is not None and not await self._take_over(db, state.live, state, decision.how == "expired"):
            return None
        epoch = await self._repo.grant(db, namespace, key, request, self._settings.provisional_seconds)
        await self._repo.asked(db, namespace, key, factors)
        await self._misses.granted(db, namespace, key, request.holder, request.factors)
        self._counter.miss(namespace)
        return _Granted(epoch, state)

    async def _take_over(self, db: WriteConnection, live: Lease, state: Snapshot, expired: bool) -> bool:
        if not await self._repo.supersede(db, live.epoch, only_expired=expired):
            return False
        if not expired:
            return True
        if await self.outage.interrupted(db):
            raise _OutageFound
        # A grant that was never confirmed is a waiter that hung up, no lost compile.
        if live.confirmed:
            round_now = after_loss(state.failures, state.now, self._settings)
            await self._repo.put_failures(db, live.namespace, live.key, round_now)
            self._record_failure(live, "lost", state.now)
        return True

    def _record_failure(self, lease: Lease, reason: str, now: float) -> None:
        event = of_holder(lease.namespace, lease.key, lease.holder, "failed")
        event.reason = known_reason(reason)
        event.spent_seconds = max(0.0, now - lease.granted_at)
        self._recorder.note(event)

    def _record(
        self, namespace: str, key: str, request: AcquireRequest, decision: Decision | _Granted, waited: float
    ) -> None:
        """What the answer means for the statistics; a lease means nothing before it ends."""
        if isinstance(decision, Hit):
            event = of_holder(namespace, key, request.holder, "waited" if waited > 0 else "remote")
            event.saved_seconds = decision.artifact.compile_seconds or 0.0
            event.bytes = decision.artifact.size
        elif isinstance(decision, Failed):
            event = of_holder(namespace, key, request.holder, "failed")
            event.reason = known_reason(decision.failure.kind)
        else:
            return
        event.waited_seconds = waited
        self._recorder.note(event)

    def _answer(self, namespace: str, key: str, decision: Decision | _Granted, waited: bool) -> AcquireAnswer:
        match decision:
            case Hit(artifact=artifact):
                self._counter.hit(namespace, key, waited=waited)
                return AcquireAnswer(state="hit", artifact=artifact)
            case Failed(failure=failure):
                return AcquireAnswer(state="failed", failure=failure)
            case Busy():
                return AcquireAnswer(
                    state="busy",
                    holder=decision.holder,
                    elapsed_seconds=decision.elapsed,
                    heartbeat_age_seconds=decision.heartbeat_age,
                    eta_seconds=decision.eta,
                    retry_after_seconds=decision.retry_after,
                    unshared_seconds=decision.unshared,
                )
            case _Granted(epoch=epoch, state=state):
                return AcquireAnswer(
                    state="leased",
                    epoch=epoch,
                    ttl_seconds=self._settings.ttl_seconds,
                    usual_seconds=state.usual_seconds,
                    usual_peak_rss_bytes=state.usual_peak,
                )
        raise AssertionError(decision)

    async def heartbeat(self, namespace: str, lease_id: str, beat: HeartbeatRequest) -> HeartbeatAnswer:
        """Renew a lease; an expired one that nobody superseded too. Raises LeaseUnknown, -Superseded, -Ended."""
        ttl = self._settings.ttl_seconds
        async with self._db.write() as db:
            if beat.unshared:
                lease = await self.find(db, namespace, lease_id)
                await self._repo.lock_key(db, namespace, lease.key)
                if lease.status == "live":
                    await self._repo.note_unshared(db, namespace, lease.key)
            epoch = await self._repo.heartbeat(db, namespace, lease_id, beat, ttl)
            if epoch is None:
                raise ended(await self.find(db, namespace, lease_id))
        return HeartbeatAnswer(epoch=epoch, ttl_seconds=ttl)

    async def release(self, namespace: str, lease_id: str) -> None:
        """End a lease without a result. Nothing happens when it has ended already. Raises LeaseUnknown."""
        async with self._db.write() as db:
            lease = await self.find(db, namespace, lease_id)
            await self._repo.lock_key(db, namespace, lease.key)
            released = await self._repo.end(db, lease.epoch, "released")
        if released:
            await self._hub.announce((namespace, lease.key))

    async def fail(self, namespace: str, lease_id: str, report: FailRequest) -> FailAnswer:
        """End a lease with a failure; a repeated report gets the first one's answer. Raises as `heartbeat`."""
        async with self._db.write() as db:
            lease = await self.find(db, namespace, lease_id)
            await self._repo.lock_key(db, namespace, lease.key)
            state = await self._repo.snapshot(db, namespace, lease.key)
            round_now = after_failure(state.failures, report, lease, state.now, self._settings)
            answer = FailAnswer(failure=round_now.failure)
            if not await self._repo.end(db, lease.epoch, "failed", json.dumps(asdict(answer))):
                return _repeated_failure(await self.find(db, namespace, lease_id))
            await self._repo.put_failures(db, namespace, lease.key, round_now)
            await add_counts(db, self._db.dialect, namespace, Counts(failures=1))
        self._record_failure(lease, report.kind, state.now)
        await self._hub.announce((namespace, lease.key))
        return answer

    async def find(self, db: ReadConnection, namespace: str, lease_id: str) -> Lease:
        """The lease of that id in that namespace. Raises LeaseUnknown."""
        lease = await self._repo.find(db, lease_id)
        if lease is None or lease.namespace != namespace:
            raise LeaseUnknown
        return lease

    async def _extend_leases(self, since: float) -> None:
        async with self._db.write() as db:
            await self._extend_leases_in(db, since)

    async def _extend_leases_in(self, db: WriteConnection, since: float) -> None:
        await self._repo.extend_after_outage(
            db, since, self._settings.ttl_seconds, self._settings.provisional_seconds
        )

    async def purge_every(self, seconds: float) -> None:
        """Forget old leases, for ever."""
        while True:
            await asyncio.sleep(seconds)
            try:
                async with self._db.write() as db:
                    await self._repo.purge(db, self._settings.keep_leases_seconds)
            except ServerProblem:
                continue


def ended(lease: Lease) -> ServerProblem:
    """What a lease that is not live any more is answered."""
    return LeaseSuperseded() if lease.status == "superseded" else LeaseEnded()


def _repeated_failure(lease: Lease) -> FailAnswer:
    if lease.status != "failed" or lease.outcome is None:
        raise ended(lease)
    stored = json.loads(lease.outcome)["failure"]
    return FailAnswer(failure=from_json(Failure, stored) if stored is not None else None)


def _factors_text(request: AcquireRequest) -> str | None:
    if request.factors is None:
        return None
    text = json.dumps(request.factors, separators=(",", ":"))
    if len(text) > MAX_FACTORS_BYTES:
        raise FactorsTooLarge(f"the factors of the key take {len(text)} bytes, at most {MAX_FACTORS_BYTES} are kept")
    return text
