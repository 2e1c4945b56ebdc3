"""Keys, leases, blobs: the way from a miss to an artifact."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from neffcache_client.wire.base import (
    MAX_LOG_TAIL,
    MAX_LOOKUP_KEYS,
    MAX_WAIT_SECONDS,
    NESTED,
    check_key,
    check_lease_id,
)


@dataclass(slots=True, kw_only=True)
class Holder:
    """Who asks: enough for a person to find the process."""

    host: str
    boot: str
    pid: int
    rank: int | None = None
    job: str | None = None

    def __post_init__(self) -> None:
        for name in ("host", "boot", "job"):
            value = getattr(self, name)
            if value is not None and len(value) > 255:
                raise ValueError(f"holder.{name} is longer than 255 characters")


@dataclass(slots=True, kw_only=True)
class AcquireRequest:
    """Ask for the artifact of a key, or for the right to compile it.

    The client makes `lease_id` (a secret) and keeps it before it asks, so a repeated request is the same
    request. `supersedes` names the lease of a dead process on the same boot.
    """

    lease_id: str
    holder: Holder
    factors: dict[str, Any] | None = None
    wait_seconds: float = 0.0
    can_compile: bool = True
    supersedes: str | None = None
    retry_failed: bool = False
    """Pass over a stored failure once (`--retry_failed_compilation`)."""
    from_spool: bool = False
    """The result exists already and only wants publishing: failures and yields do not apply."""
    waited_seconds: float = 0.0
    """How long this process has waited for the key before this call; for the statistics only."""

    def __post_init__(self) -> None:
        check_lease_id(self.lease_id)
        if self.supersedes is not None:
            check_lease_id(self.supersedes)
        if not 0 <= self.wait_seconds <= MAX_WAIT_SECONDS:
            raise ValueError(f"wait_seconds must be between 0 and {MAX_WAIT_SECONDS:g}")


@dataclass(slots=True, kw_only=True)
class Artifact:
    """A published NEFF. `url` is relative to the server unless it starts with a scheme."""

    sha256: str
    size: int
    url: str
    compiler_version: str | None = None
    target: str | None = None
    compile_seconds: float | None = None
    created_at: float = 0.0


FailureKind = Literal["deterministic", "transient", "exhausted"]


@dataclass(slots=True, kw_only=True)
class Failure:
    """Why a key cannot be had at present, and until when this answer holds."""

    kind: FailureKind
    exit_code: int
    code: str | None = None
    """The compiler's own code, such as `NCC_EOOM001`, when its log had one."""
    log_tail: str = ""
    host: str = ""
    first_seen_at: float = 0.0
    until: float = 0.0


AcquireState = Literal["hit", "leased", "busy", "failed"]


@dataclass(slots=True, kw_only=True)
class AcquireAnswer:
    """`hit` carries artifact; `leased` epoch and ttl; `busy` the holder and times; `failed` the failure."""

    state: AcquireState
    artifact: Artifact | None = None
    epoch: int | None = None
    ttl_seconds: float | None = None
    holder: Holder | None = None
    elapsed_seconds: float | None = None
    heartbeat_age_seconds: float | None = None
    eta_seconds: float | None = None
    retry_after_seconds: float | None = None
    """With `busy` and no holder: nobody compiles, but this caller has to wait (a yield after a failure)."""
    usual_seconds: float | None = None
    """With `leased`: how long this key took when it was last compiled."""
    usual_peak_rss_bytes: int | None = None
    """With `leased`: and what memory."""
    unshared_seconds: float | None = None
    """With `busy`: so long ago a compile of this key ended well, and its result could not be handed over since."""
    failure: Failure | None = None


@dataclass(slots=True, kw_only=True)
class LookupRequest:
    """Which of these keys are present? Never leases. At most 1000 keys."""

    keys: list[str]

    def __post_init__(self) -> None:
        if len(self.keys) > MAX_LOOKUP_KEYS:
            raise ValueError(f"at most {MAX_LOOKUP_KEYS} keys a look-up, got {len(self.keys)}")
        for key in self.keys:
            check_key(key)


@dataclass(slots=True, kw_only=True)
class LookupAnswer:
    """Artifacts of the keys that are present; absent keys are left out."""

    present: dict[str, Artifact] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class HeartbeatRequest:
    """A sign of life, with what the holder is doing."""

    phase: str | None = None
    rss_bytes: int | None = None
    unshared: bool = False
    """The compile has ended well, and its result cannot be handed over at present: nobody shall count on it."""

    def __post_init__(self) -> None:
        if self.phase is not None and len(self.phase) > 64:
            raise ValueError("phase is longer than 64 characters")


@dataclass(slots=True, kw_only=True)
class HeartbeatAnswer:
    """The lease lives for another `ttl_seconds`."""

    epoch: int
    ttl_seconds: float


@dataclass(slots=True, kw_only=True)
class UploadRequest:
    """How shall this blob be sent? `size` in bytes."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError("size must not be negative")


@dataclass(slots=True, kw_only=True)
class UploadAnswer:
    """Where to send the blob: `stream` = PUT to the server, `presigned` = PUT to `url` with `headers`."""

    how: Literal["stream", "presigned"]
    url: str
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class BlobAnswer:
    """A blob is stored and verified; what its NEFF says of itself."""

    sha256: str
    size: int
    compiler_version: str | None = None
    target: str | None = None


@dataclass(slots=True, kw_only=True)
class BlobReport:
    """What the server found when it read a blob again that a client had called damaged.

    `sound`: the damage happened on the way. Otherwise the keys that it was served for are compiled again.
    """

    verdict: Literal["sound", "quarantined", "missing"]


@dataclass(slots=True, kw_only=True)
class PublishRequest:
    """Make an uploaded blob the artifact of the lease's key, and end the lease."""

    sha256: str
    size: int
    compile_seconds: float
    peak_rss_bytes: int | None = None
    cpu_seconds: float | None = None
    from_spool: bool = False
    """Compiled earlier, while the server was away, and reported as such: not one more compile."""

    def __post_init__(self) -> None:
        check_key(self.sha256, "sha256")
        if self.size < 0 or self.compile_seconds < 0:
            raise ValueError("size and compile_seconds must not be negative")


@dataclass(slots=True, kw_only=True)
class PublishAnswer:
    """What is served for the key from now on.

    `already_present`: somebody else's equal artifact came first; `nondeterministic`: theirs differs and
    stays, the difference is recorded.
    """

    outcome: Literal["published", "already_present", "nondeterministic"]
    artifact: Artifact


@dataclass(slots=True, kw_only=True)
class FailRequest:
    """End a lease without a result."""

    kind: Literal["deterministic", "transient"]
    exit_code: int
    code: str | None = None
    log_tail: str = ""

    def __post_init__(self) -> None:
        self.log_tail = self.log_tail[-MAX_LOG_TAIL:]
        if self.code is not None and len(self.code) > 64:
            raise ValueError("code is longer than 64 characters")


@dataclass(slots=True, kw_only=True)
class FailAnswer:
    """`failure` is what others are told now; None when another host may try."""

    failure: Failure | None = None


NESTED.update(
    {
        ("AcquireRequest", "holder"): Holder,
        ("AcquireAnswer", "artifact"): Artifact,
        ("AcquireAnswer", "holder"): Holder,
        ("AcquireAnswer", "failure"): Failure,
        ("PublishAnswer", "artifact"): Artifact,
        ("FailAnswer", "failure"): Failure,
    }
)
