"""Any interleaving of calls, time and restarts, checked against a model of one dictionary per key."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from neffcache_client.wire import FailRequest, HeartbeatRequest, PublishRequest
from neffcache_server.app import open_state
from neffcache_server.problems import BlobMissing, LeaseEnded, LeaseSuperseded
from neffcache_server.state import State
from support.backends import Embedded, current
from support.cache_state import (
    StoppedClock,
    acquire,
    lease_id,
    migrated,
    neff,
    rows,
    server_settings,
    upload,
)

KEYS = ("a" * 64, "b" * 64)
HOSTS = ("h0", "h1", "h2")
NEFFS = (neff("one"), neff("one", uuid=bytes(range(16))), neff("two"))
TTL, PROVISIONAL, YIELD, EXHAUSTED, DETERMINISTIC, ROUND = 30.0, 5.0, 2.0, 60.0, 600.0, 600.0


@dataclass
class ModelLease:
    """What the model remembers of a lease."""

    number: int
    key: str
    host: str
    epoch: int
    expires: float
    confirmed: bool = False
    status: str = "live"


@dataclass
class ModelKey:
    """What the model knows of a key."""

    served: str | None = None
    live: ModelLease | None = None
    count: int = 0
    last_failure: float = -1e9
    yield_host: str | None = None
    yield_until: float = 0.0
    failed: str | None = None
    failed_until: float = 0.0
    blobs: dict[str, bytes] = field(default_factory=dict)

    def end_round(self) -> None:
        self.count, self.last_failure = 0, -1e9
        self.yield_host, self.yield_until, self.failed, self.failed_until = None, 0.0, None, 0.0


class LeaseMachine(RuleBasedStateMachine):
    """One server, three hosts, two keys."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(mkdtemp(prefix="lease-machine-"))
        self.clock = StoppedClock()
        self.runner = asyncio.Runner()
        # Replicas see an outage in a common pulse, and a clock that jumps looks like one. It has tests of its own.
        self.shared = current().shared
        given = {"outage_seconds": 1e9} if self.shared else {}
        self.settings = migrated(server_settings(self.folder, **given))
        self.state = self._opened()
        self.keys = {key: ModelKey() for key in KEYS}
        self.number = 0
        self.epochs: list[int] = []

    def _opened(self) -> State:
        async def start() -> State:
            state = open_state(self.settings, self.clock)
            await state.leases.start()
            return state

        return self.runner.run(start())

    def teardown(self) -> None:
        self.runner.run(self.state.database.close())
        self.runner.close()
        current().release(self.folder)
        shutil.rmtree(self.folder)

    def call(self, awaitable: Any) -> Any:
        return self.runner.run(awaitable)

    @property
    def now(self) -> float:
        return self.clock.value

    # What clients do

    @rule(
        target=leases,
        key=st.sampled_from(KEYS),
        host=st.sampled_from(HOSTS),
        can_compile=st.sampled_from([True, True, True, False]),
        over_live=st.booleans(),
        retry_failed=st.sampled_from([False, False, True]),
        from_spool=st.sampled_from([False, False, False, True]),
    )
    def ask(
        self, key: str, host: str, can_compile: bool, over_live: bool, retry_failed: bool, from_spool: bool
    ) -> Any:
        model = self.keys[key]
        self.number += 1
        live = model.live
        given: dict[str, Any] = {"can_compile": can_compile, "retry_failed": retry_failed, "from_spool": from_spool}
        if over_live and live is not None:
            given["supersedes"] = lease_id(live.number)
        answer = self.call(acquire(self.state, key, self.number, host=host, **given))
        expected = self._expected(model, host, can_compile, over_live, retry_failed, from_spool)
        assert answer.state == expected, (answer, expected)
        if answer.state == "hit":
            assert answer.artifact.sha256 == model.served
        if answer.state == "busy" and answer.holder is not None:
            assert live is not None
            assert answer.holder.pid == live.number
        if answer.state != "leased":
            return multiple()
        assert answer.epoch > max(self.epochs, default=0)
        self.epochs.append(answer.epoch)
        if live is not None:
            live.status = "superseded"
            expired = live.expires <= self.now
            takeover = over_live and live.host == host
            if expired and live.confirmed and not takeover:
                self._count_loss(model)
        model.live = ModelLease(self.number, key, host, answer.epoch, self.now + PROVISIONAL)
        return model.live

    def _expected(
        self, model: ModelKey, host: str, can_compile: bool, over_live: bool, retry: bool, spool: bool
    ) -> str:
        if model.served is not None:
            return "hit"
        if model.failed_until > self.now and not spool and not retry:
            return "failed"
        live = model.live
        takeover = live is not None and over_live and live.host == host
        if live is not None and live.expires > self.now and not takeover:
            return "busy"
        if not can_compile:
            return "busy"
        if not spool and model.yield_host == host and model.yield_until > self.now:
            return "busy"
        return "leased"

    def _count_loss(self, model: ModelKey) -> None:
        if model.last_failure + ROUND <= self.now:
            model.end_round()
        model.count += 1
        model.last_failure = self.now

    @rule(lease=leases)
    def ask_again_after_a_lost_answer(self, lease: ModelLease) -> None:
        model = self.keys[lease.key]
        before = self._everything()
        try:
            answer = self.call(acquire(self.state, lease.key, lease.number, host=lease.host))
        except (LeaseSuperseded, LeaseEnded):
            # Only where it would have been granted: an ended lease id is never granted again.
            assert lease.status != "live"
            assert self._everything() == before
            return
        if lease.status == "live" and model.served is None:
            assert (answer.state, answer.epoch) == ("leased", lease.epoch)
            lease.expires = max(lease.expires, self.now + PROVISIONAL)
        else:
            assert answer.state != "leased"
            assert self._everything() == before

    @rule(lease=leases)
    def heartbeat(self, lease: ModelLease) -> None:
        call = self.state.leases.heartbeat("default", lease_id(lease.number), HeartbeatRequest(phase="compile"))
        if self._allowed(lease, call):
            lease.expires, lease.confirmed = self.now + TTL, True

    @rule(lease=leases)
    def release(self, lease: ModelLease) -> None:
        before = self._everything()
        self.call(self.state.leases.release("default", lease_id(lease.number)))
        if lease.status == "live":
            self._end(lease, "released")
        else:
            assert self._everything() == before

    @rule(lease=leases, kind=st.sampled_from(["transient", "transient", "deterministic"]))
    def fail(self, lease: ModelLease, kind: Any) -> None:
        report = FailRequest(kind=kind, exit_code=70, log_tail="why")
        call = self.state.leases.fail("default", lease_id(lease.number), report)
        if lease.status == "failed":
            before = self._everything()
            self.call(call)
            assert self._everything() == before
            return
        if not self._allowed(lease, call):
            return
        model = self.keys[lease.key]
        self._end(lease, "failed")
        if model.last_failure + ROUND <= self.now:
            model.end_round()
        model.last_failure = self.now
        if kind == "deterministic":
            model.failed, model.failed_until = "deterministic", self.now + DETERMINISTIC
            return
        model.count += 1
        model.yield_host, model.yield_until = lease.host, self.now + YIELD
        if model.count >= 3:
            model.failed, model.failed_until = "exhausted", self.now + EXHAUSTED

    @rule(lease=leases, data=st.sampled_from(NEFFS))
    def publish(self, lease: ModelLease, data: bytes) -> None:
        model = self.keys[lease.key]
        before = self._everything()
        try:
            sha256 = self.call(upload(self.state, lease.number, data))
            answer = self.call(
                self.state.publishing.publish(
                    "default",
                    lease_id(lease.number),
                    PublishRequest(sha256=sha256, size=len(data), compile_seconds=1.0),
                )
            )
        except (LeaseSuperseded, LeaseEnded):
            assert lease.status != "live"
            assert self._everything() == before
            return
        assert lease.status == "live"
        self._end(lease, "published")
        for other in self.keys.values():
            # The upload brought back what other keys had lost.
            if sha256 in other.blobs:
                other.served = sha256
                other.blobs.clear()
        if model.served is None:
            model.served = sha256
            assert answer.outcome == "published"
        else:
            assert answer.outcome in ("already_present", "nondeterministic")
        model.blobs.clear()
        model.end_round()
        assert answer.artifact.sha256 == model.served
        again = self.call(
            self.state.publishing.publish(
                "default", lease_id(lease.number), PublishRequest(sha256=sha256, size=len(data), compile_seconds=1.0)
            )
        )
        assert again == answer

    # What happens to them

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 6.0, 20.0, 31.0, 61.0, 601.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.value += seconds

    @rule()
    def server_restarts(self) -> None:
        self.runner.run(self.state.database.close())
        self.state = self._opened()
        if self.shared:
            return
        for model in self.keys.values():
            live = model.live
            if live is not None and live.expires > self.now - 7200:
                live.expires = max(live.expires, self.now + (TTL if live.confirmed else PROVISIONAL))

    @rule(key=st.sampled_from(KEYS))
    def blob_disappears(self, key: str) -> None:
        model = self.keys[key]
        if model.served is None:
            return
        sha256 = model.served
        self.call(self.state.store.delete("default", sha256))
        try:
            self.call(self.state.blobs.open("default", sha256))
        except BlobMissing:
            for other in self.keys.values():
                if other.served == sha256:
                    other.served = None
                    other.blobs = {sha256: b""}
        else:
            raise AssertionError("a blob that is gone was opened")

    @rule(lease=consumes(leases))
    def holder_is_forgotten(self, lease: ModelLease) -> None:
        """The process is gone; only time or its host can free the key."""

    # What holds whatever happens

    @invariant()
    def at_most_one_live_lease_per_key(self) -> None:
        live = rows(self.folder, "SELECT key, epoch FROM leases WHERE status = 'live'")
        assert len({key for key, _ in live}) == len(live)
        assert dict(live) == {key: model.live.epoch for key, model in self.keys.items() if model.live is not None}

    @invariant()
    def one_artifact_per_key_and_it_is_readable(self) -> None:
        served = dict(rows(self.folder, "SELECT key, sha256 FROM entries WHERE state = 'present'"))
        assert served == {key: model.served for key, model in self.keys.items() if model.served is not None}
        for sha256 in served.values():
            assert self.call(self.state.store.size("default", sha256)) > 0

    def _allowed(self, lease: ModelLease, call: Any) -> bool:
        """Run a holder's call: it goes through for a live lease, and changes nothing for any other."""
        before = self._everything()
        try:
            self.call(call)
        except (LeaseSuperseded, LeaseEnded) as exc:
            refused = exc.code
        else:
            refused = None
        expected = {"live": None, "superseded": "lease_superseded"}.get(lease.status, "lease_ended")
        assert refused == expected
        if refused is not None:
            assert self._everything() == before
            return False
        assert lease.status == "live"
        return True

    def _end(self, lease: ModelLease, status: str) -> None:
        lease.status = status
        self.keys[lease.key].live = None

    def _everything(self) -> Any:
        tables = ("leases", "entries", "failures", "blobs", "uploads", "differences")
        return {table: rows(self.folder, f"SELECT * FROM {table} ORDER BY 1, 2") for table in tables}


SETTINGS = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck), database=None
)


def test_every_interleaving_agrees_with_the_model(backend: Embedded) -> None:
    run_state_machine_as_test(
        LeaseMachine, settings=settings(SETTINGS, max_examples=15) if backend.shared else SETTINGS
    )
