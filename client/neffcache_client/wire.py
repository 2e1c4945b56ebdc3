"""What client and server say to each other: the protocol, written once.

Plain dataclasses; the server hands them to FastAPI as they are, the client fills them from JSON with
`from_json`. Instants are Unix seconds by the database's clock, durations are seconds, sizes are bytes,
digests are 64 lower-case hex digits. A field that is added later has a default, so that an older peer
can leave it out; unknown fields are ignored when reading.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

LEASE_HEADER = "neffcache-lease"
"""Names the lease an upload belongs to. A header and not a query: URLs end up in access logs."""

TTL_SECONDS = 30.0
HEARTBEAT_SECONDS = 10.0
PROVISIONAL_SECONDS = 5.0
MAX_WAIT_SECONDS = 25.0
MAX_LOG_TAIL = 64 * 1024
MAX_LOOKUP_KEYS = 1000
MAX_FACTORS_BYTES = 256 * 1024
MAX_SUMMARY_BYTES = 256 * 1024
MIN_KEY_PREFIX = 8

_HEX64 = re.compile(r"[0-9a-f]{64}")
_LEASE_ID = re.compile(r"[0-9a-f]{32,64}")
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")

T = TypeVar("T")


def check_key(value: str, what: str = "key") -> str:
    """Return `value` if it is 64 lower-case hex digits, raise ValueError otherwise."""
    if not _HEX64.fullmatch(value):
        raise ValueError(f"{what} must be 64 lower-case hex digits, got {value[:80]!r}")
    return value


def check_lease_id(value: str) -> str:
    """Return `value` if it is 32 to 64 lower-case hex digits; the value is secret, so never echoed."""
    if not _LEASE_ID.fullmatch(value):
        raise ValueError("lease_id must be 32 to 64 lower-case hex digits")
    return value


def check_namespace(value: str) -> str:
    """Return `value` if it can name a namespace, raise ValueError otherwise."""
    if not _NAMESPACE.fullmatch(value):
        raise ValueError(
            f"a namespace is 1 to 63 of a-z 0-9 . _ - and starts and ends with a letter or digit, got {value[:80]!r}"
        )
    return value


def from_json(kind: type[T], data: Any) -> T:
    """Build dataclass `kind` from decoded JSON, ignoring fields it does not know.

    Raises ValueError when `data` is no object or misses a required field.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{kind.__name__}: expected a JSON object, got {type(data).__name__}")
    known = {}
    for f in fields(kind):  # type: ignore[arg-type]
        if f.name in data:
            value = data[f.name]
            nested = NESTED.get((kind.__name__, f.name))
            if nested is not None and value is not None:
                value = [from_json(nested, v) for v in value] if isinstance(value, list) else from_json(nested, value)
            known[f.name] = value
    try:
        return kind(**known)
    except TypeError as exc:
        raise ValueError(f"{kind.__name__}: {exc}") from exc


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


@dataclass(slots=True, kw_only=True)
class Entry:
    """One published key as `entries` shows it."""

    key: str
    state: str
    sha256: str
    size: int
    created_at: float
    compiler_version: str | None = None
    target: str | None = None
    compile_seconds: float | None = None
    peak_rss_bytes: int | None = None
    hits: int = 0
    last_hit_at: float | None = None
    holder: Holder | None = None
    factors: dict[str, Any] | None = None
    pinned: bool = False


@dataclass(slots=True, kw_only=True)
class SummaryRequest:
    """What a graph consists of, see `graph_summary`: sent after a miss, never part of a key."""

    summary: str

    def __post_init__(self) -> None:
        if len(self.summary) > MAX_SUMMARY_BYTES:
            raise ValueError(f"summary is longer than {MAX_SUMMARY_BYTES} characters")


@dataclass(slots=True, kw_only=True)
class EntryPage:
    """A page of entries, newest first; `next` goes into `?after=`."""

    entries: list[Entry]
    total: int
    next: str | None = None


@dataclass(slots=True, kw_only=True)
class Stats:
    """Figures of one namespace, or of all. Counters are since the database was made."""

    namespace: str | None
    entries: int = 0
    bytes: int = 0
    hits: int = 0
    misses: int = 0
    waits: int = 0
    publishes: int = 0
    failures: int = 0
    nondeterministic: int = 0
    live_leases: int = 0
    compile_seconds_spent: float = 0.0
    compile_seconds_saved: float = 0.0
    waited_seconds: float = 0.0
    bytes_served: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)
    """How requests ended, those that clients reported included; see `records.VERDICTS`."""
    since: float | None = None
    """When counting began, for figures of a period. Then the counters above it are of that period as well."""
    job: str | None = None


VERDICTS = ("local", "remote", "waited", "compiled", "failed", "fallback", "uncacheable", "pushed")
MAX_REPORTS = 1000


@dataclass(slots=True, kw_only=True)
class Report:
    """How a request ended that the server did not answer. Told as an age, since clocks of hosts differ."""

    verdict: str
    age_seconds: float = 0.0
    host: str = ""
    rank: int | None = None
    job: str | None = None
    key: str | None = None
    reason: str | None = None
    waited_seconds: float = 0.0
    compile_seconds: float = 0.0
    bytes: int = 0

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict must be one of {', '.join(VERDICTS)}")
        if self.key is not None:
            check_key(self.key)
        if min(self.age_seconds, self.waited_seconds, self.compile_seconds, self.bytes) < 0:
            raise ValueError("durations and sizes must not be negative")


@dataclass(slots=True, kw_only=True)
class RunReport:
    """What a rank says when its process ends. Its verdicts were counted one by one already."""

    host: str
    job: str
    age_seconds: float = 0.0
    rank: int | None = None
    ready_seconds: float | None = None
    """From the activation of the cache to the end of the last request."""
    fetch_seconds: float | None = None
    """Spent on hits, waiting not included."""


@dataclass(slots=True, kw_only=True)
class ReportsRequest:
    """What clients noted since they last reported. A batch that is sent twice counts once."""

    batch: str
    reports: list[Report] = field(default_factory=list)
    runs: list[RunReport] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_key(self.batch, "batch")
        if len(self.reports) + len(self.runs) > MAX_REPORTS:
            raise ValueError(f"at most {MAX_REPORTS} reports and runs a batch")


@dataclass(slots=True, kw_only=True)
class ReportsAnswer:
    """`taken` is 0 for a batch that was taken before."""

    taken: int


@dataclass(slots=True, kw_only=True)
class JobRow:
    """A job's figures, or those of one of its ranks (then `host` is set, and `rank` unless it had none)."""

    job: str
    namespace: str
    first_at: float
    last_at: float
    hosts: int = 0
    ranks: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    waited_seconds: float = 0.0
    spent_seconds: float = 0.0
    saved_seconds: float = 0.0
    host: str | None = None
    rank: int | None = None
    ready_seconds: float | None = None
    fetch_seconds: float | None = None


@dataclass(slots=True, kw_only=True)
class JobList:
    """Jobs of a namespace, latest first."""

    jobs: list[JobRow]


@dataclass(slots=True, kw_only=True)
class JobShow:
    """A job and its ranks, those that took longest first."""

    job: JobRow
    ranks: list[JobRow] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class LiveLease:
    """A compile under way, as anybody may see it: without its lease id."""

    namespace: str
    key: str
    holder: Holder
    age_seconds: float
    heartbeat_age_seconds: float
    usual_seconds: float | None = None
    """How long this key took when it was last compiled."""
    phase: str | None = None
    rss_bytes: int | None = None
    waiters: int = 0
    """Requests that wait for it at the server process that answered."""
    stuck: bool = False
    """Silent for longer than two heartbeats."""


@dataclass(slots=True, kw_only=True)
class Live:
    """What goes on at present, and how much happened in the last minute."""

    now: float
    leases: list[LiveLease] = field(default_factory=list)
    waiters: int = 0
    failures: int = 0
    last_minute: dict[str, int] = field(default_factory=dict)


Role = Literal["read", "write", "admin"]


@dataclass(slots=True, kw_only=True)
class WhoAmI:
    """What a token allows: a role in one namespace or all (`*`), and reading the trusted one."""

    id: str
    name: str
    role: Role
    namespace: str
    trusted: str | None = None
    now: float = 0.0
    """What the database's clock shows."""

    def may(self, role: Role, namespace: str) -> bool:
        """True when the token has `role` in `namespace`."""
        if role == "read" and namespace == self.trusted:
            return True
        return self.namespace in ("*", namespace) and ROLES.index(self.role) >= ROLES.index(role)


ROLES = ("read", "write", "admin")


@dataclass(slots=True, kw_only=True)
class TokenRequest:
    """A token to be made."""

    name: str
    role: Role
    namespace: str
    expires_in_seconds: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.name) <= 255 or not self.name.isprintable():
            raise ValueError("name must have 1 to 255 printable characters")
        if self.namespace != "*":
            check_namespace(self.namespace)
        if self.expires_in_seconds is not None and not 1 <= self.expires_in_seconds <= 1e9:
            raise ValueError("expires_in_seconds must be between 1 and 1e9")


@dataclass(slots=True, kw_only=True)
class TokenInfo:
    """A token without its secret."""

    id: str
    name: str
    role: Role
    namespace: str
    created_by: str
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None


@dataclass(slots=True, kw_only=True)
class NewToken:
    """A token just made: this answer is the only place where it is shown."""

    token: str
    info: TokenInfo


@dataclass(slots=True, kw_only=True)
class TokenList:
    """Tokens, newest first."""

    tokens: list[TokenInfo]


@dataclass(slots=True, kw_only=True)
class LoginRequest:
    """A token to be exchanged for a session cookie."""

    token: str

    def __post_init__(self) -> None:
        if len(self.token) > 512:
            raise ValueError("token is longer than 512 characters")


@dataclass(slots=True, kw_only=True)
class Problem:
    """An error answer (RFC 9457). `code` is stable and meant for programs, `detail` for people."""

    title: str
    status: int
    code: str
    detail: str = ""
    type: str = "about:blank"


NESTED: dict[tuple[str, str], type[Any]] = {
    ("AcquireRequest", "holder"): Holder,
    ("AcquireAnswer", "artifact"): Artifact,
    ("AcquireAnswer", "holder"): Holder,
    ("AcquireAnswer", "failure"): Failure,
    ("PublishAnswer", "artifact"): Artifact,
    ("FailAnswer", "failure"): Failure,
    ("Entry", "holder"): Holder,
    ("EntryPage", "entries"): Entry,
    ("NewToken", "info"): TokenInfo,
    ("TokenList", "tokens"): TokenInfo,
    ("ReportsRequest", "reports"): Report,
    ("ReportsRequest", "runs"): RunReport,
    ("JobList", "jobs"): JobRow,
    ("JobShow", "job"): JobRow,
    ("JobShow", "ranks"): JobRow,
    ("LiveLease", "holder"): Holder,
    ("Live", "leases"): LiveLease,
}
"""Fields that hold dataclasses themselves, for `from_json`."""
