"""The pure part of the lease machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from neffcache_client.wire import Artifact, FailRequest, Failure, Holder
from neffcache_server.leases.machine import (
    Busy,
    Failed,
    FailureRecord,
    Grant,
    Hit,
    Lease,
    Snapshot,
    after_failure,
    after_loss,
    decide,
)
from neffcache_server.settings import ServerSettings
from support.cache_state import lease_id, request

SETTINGS = ServerSettings(data_dir=Path("/nowhere"))
ARTIFACT = Artifact(sha256="c" * 64, size=1, url="/x")
TRANSIENT = FailRequest(kind="transient", exit_code=137)
DETERMINISTIC = FailRequest(kind="deterministic", exit_code=70, code="NCC_EOOM001", log_tail="too large")


def lease(number: int = 1, host: str = "h0", expires_at: float = 130.0, **given: Any) -> Lease:
    return Lease(
        lease_id=lease_id(number),
        epoch=number,
        namespace="default",
        key="a" * 64,
        status="live",
        confirmed=True,
        retry_failed=given.pop("retry_failed", False),
        granted_at=100.0,
        heartbeat_at=110.0,
        expires_at=expires_at,
        holder=Holder(host=host, boot=f"boot-{host}", pid=number, job=given.pop("job", None)),
    )


def failed(until: float, **given: Any) -> FailureRecord:
    failure = Failure(kind="deterministic", exit_code=70, until=until)
    return FailureRecord(failure=failure, last_failure_at=90.0, **given)


def test_present_artifact_is_a_hit_even_while_somebody_holds_the_lease() -> None:
    assert decide(Snapshot(now=100, artifact=ARTIFACT, live=lease()), request(2), 100) == Hit(ARTIFACT)


def test_busy_names_the_holder_and_estimates_from_history() -> None:
    answer = decide(Snapshot(now=115, live=lease(), usual_seconds=60.0), request(2, host="h1"), 115)
    assert answer == Busy(holder=lease().holder, elapsed=15.0, heartbeat_age=5.0, eta=45.0)


def test_estimate_never_goes_below_zero() -> None:
    answer = decide(Snapshot(now=115, live=lease(), usual_seconds=1.0), request(2), 115)
    assert isinstance(answer, Busy)
    assert answer.eta == 0.0


@pytest.mark.parametrize(("now", "expected"), [(129.9, Busy), (130.0, Grant)])
def test_lease_is_up_for_others_at_its_expiry_and_not_before(now: float, expected: type) -> None:
    assert isinstance(decide(Snapshot(now=now, live=lease(expires_at=130.0)), request(2), now), expected)


def test_repeated_request_gets_its_own_lease() -> None:
    assert decide(Snapshot(now=100, live=lease(1)), request(1), 100) == Grant("own")


def test_same_boot_may_take_over_a_lease_it_can_name() -> None:
    """UC-01: a next leader on the host does not wait for the TTL."""
    state = Snapshot(now=100, live=lease(1, host="h0"))
    assert decide(state, request(2, host="h0", supersedes=lease_id(1)), 100) == Grant("takeover")
    assert isinstance(decide(state, request(2, host="h1", supersedes=lease_id(1)), 100), Busy)
    assert isinstance(decide(state, request(2, host="h0", supersedes=lease_id(9)), 100), Busy)


def test_who_cannot_compile_only_waits() -> None:
    assert decide(Snapshot(now=100), request(1, can_compile=False), 100) == Busy()
    assert isinstance(decide(Snapshot(now=200, live=lease()), request(2, can_compile=False), 200), Busy)


def test_failure_in_force_is_answered_to_everybody_even_under_a_live_lease() -> None:
    """UC-02: all ranks fail together with the reason."""
    state = Snapshot(now=100, live=lease(), failures=failed(until=101))
    assert isinstance(decide(state, request(2, host="h9"), 100), Failed)
    assert isinstance(decide(Snapshot(now=101, failures=failed(until=101)), request(2), 101), Grant)


def test_spooled_result_passes_over_failures_and_yields() -> None:
    record = failed(until=200, yield_host="h0", yield_until=200)
    assert decide(Snapshot(now=100, failures=record), request(1, from_spool=True), 100) == Grant("free")


def test_failing_host_yields_and_others_may_try_at_once() -> None:
    record = FailureRecord(transient_count=1, last_failure_at=99, yield_host="h0", yield_until=101)
    assert decide(Snapshot(now=100, failures=record), request(1, host="h0"), 100) == Busy(retry_after=1.0)
    assert decide(Snapshot(now=100, failures=record), request(1, host="h1"), 100) == Grant("free")
    assert decide(Snapshot(now=101, failures=record), request(1, host="h0"), 101) == Grant("free")


def test_retry_failed_passes_over_a_failure_that_was_there_before() -> None:
    state = Snapshot(now=100, failures=failed(until=200))
    assert decide(state, request(1, retry_failed=True), 95) == Grant("free")


def test_retry_failed_does_not_pass_over_a_failure_that_came_while_waiting() -> None:
    """64 ranks with the flag compile a broken graph once, not 64 times."""
    state = Snapshot(now=100, failures=failed(until=200))
    assert isinstance(decide(state, request(1, retry_failed=True), 80), Failed)


def test_retry_failed_counts_once_per_job() -> None:
    state = Snapshot(now=100, failures=failed(until=200, retried_job="job-1"))
    assert isinstance(decide(state, request(1, retry_failed=True, job="job-1"), 95), Failed)
    assert decide(state, request(1, retry_failed=True, job="job-2"), 95) == Grant("free")


def test_compiler_error_is_kept_for_ten_minutes_with_its_log() -> None:
    record = after_failure(None, DETERMINISTIC, lease(host="h3"), 1000.0, SETTINGS)
    assert record.failure == Failure(
        kind="deterministic",
        exit_code=70,
        code="NCC_EOOM001",
        log_tail="too large",
        host="h3",
        first_seen_at=1000.0,
        until=1600.0,
    )
    assert record.yield_host is None


def test_transient_failures_are_never_kept_until_the_third_exhausts_the_round() -> None:
    """UC-02, UC-04."""
    first = after_failure(None, TRANSIENT, lease(host="h1"), 1000.0, SETTINGS)
    assert (first.failure, first.transient_count) == (None, 1)
    assert (first.yield_host, first.yield_until) == ("h1", 1002.0)
    second = after_failure(first, TRANSIENT, lease(host="h2"), 1010.0, SETTINGS)
    assert second.failure is None
    third = after_failure(second, TRANSIENT, lease(host="h3"), 1020.0, SETTINGS)
    assert third.failure is not None
    assert (third.failure.kind, third.failure.until) == ("exhausted", 1080.0)


def test_round_ends_ten_minutes_after_its_last_failure() -> None:
    second = FailureRecord(transient_count=2, last_failure_at=1000.0)
    assert after_failure(second, TRANSIENT, lease(), 1599.0, SETTINGS).transient_count == 3
    assert after_failure(second, TRANSIENT, lease(), 1600.0, SETTINGS).transient_count == 1


def test_lost_holders_count_but_do_not_make_a_key_fail() -> None:
    record = None
    for n in range(5):
        record = after_loss(record, 1000.0 + n, SETTINGS)
        assert record.failure is None
    assert record is not None
    reported = after_failure(record, TRANSIENT, lease(), 1010.0, SETTINGS)
    assert reported.failure is not None
    assert reported.failure.kind == "exhausted"


def test_failure_keeps_the_time_it_was_first_seen() -> None:
    first = after_failure(None, DETERMINISTIC, lease(), 1000.0, SETTINGS)
    again = after_failure(first, DETERMINISTIC, lease(retry_failed=True, job="j"), 1100.0, SETTINGS)
    assert again.failure is not None
    assert (again.failure.first_seen_at, again.failure.until) == (1000.0, 1700.0)
    assert again.retried_job == "j"


def test_transient_failure_does_not_hide_a_compiler_error() -> None:
    first = after_failure(None, DETERMINISTIC, lease(), 1000.0, SETTINGS)
    again = after_failure(first, TRANSIENT, lease(), 1001.0, SETTINGS)
    assert again.failure == first.failure
