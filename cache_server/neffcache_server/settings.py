"""The server's settings: `NEFFCACHE_SERVER_*` in the environment, options of `neffcache serve` over them."""

from __future__ import annotations

import difflib
import ipaddress
import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from neffcache_client import wire
from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from neffcache_server.problems import SetupError

PREFIX = "NEFFCACHE_SERVER_"


def _default_data_dir() -> Path:
    base = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return Path(base) / "neffcache"


class ServerSettings(BaseSettings):
    """What a server can be told. Durations are seconds, sizes bytes. Make one with `load_settings`."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True)

    host: str = Field(
        "127.0.0.1", description="Address to listen on. Beyond loopback callers need a token, see ALLOW_ANONYMOUS."
    )
    port: int = Field(8765, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    data_dir: Path = Field(
        default_factory=_default_data_dir,
        description="Folder of the embedded database and blob store. Default: ~/.local/share/neffcache.",
    )
    database_url: str = Field(
        "", description="SQLAlchemy URL of the database. Default: SQLite in the data folder, migrated at start."
    )
    storage_url: str = Field(
        "", description="Where blobs live: file:///folder or s3://bucket/prefix. Default: blobs/ in the data folder."
    )
    s3_endpoint_url: str = Field("", description="Address of an S3 that is not Amazon's.")
    s3_public_endpoint_url: str = Field(
        "", description="Address that ranks know it by, named in presigned URLs. Default: the server's own."
    )
    s3_region: str = Field("", description="Region of the bucket. Default: what the AWS configuration says.")
    s3_addressing: Literal["auto", "path", "virtual"] = Field(
        "auto", description="How the bucket is named: in the path, in the host name, or as boto3 decides."
    )
    s3_ca_file: Path | None = Field(
        None, description="Certificates to trust for S3. Default: the AWS configuration's."
    )
    s3_presign: Literal["all", "download", "none"] = Field(
        "all",
        description="What ranks exchange with the store directly, by presigned URL; the rest goes through us. "
        "Direct uploads need a store that honours If-None-Match and x-amz-checksum-sha256.",
    )
    s3_presign_seconds: int = Field(
        3600, ge=60, le=604800, description="How long a presigned URL may be used to begin a transfer."
    )
    s3_connections: int = Field(32, ge=1, le=1000, description="Calls to S3 that run at the same time, per process.")
    s3_timeout_seconds: float = Field(
        20.0, gt=0, description="An answer of S3 that stalls for this long is given up."
    )
    admin_token: SecretStr | None = Field(
        None, description="A token with every right, to make the others with. At least 20 characters."
    )
    allow_anonymous: str = Field(
        "",
        description="What requests without a token may do: off, read or write, in every namespace. Default: "
        "everything while the server listens on a loopback address and has no admin token, else off.",
    )
    read_chain: dict[str, str] = Field(
        {},
        description="Namespaces whose misses are looked up in a trusted one, which they never write: JSON such as "
        '`{"pr": "main"}`; the left side may hold `*`.',
    )
    requests_per_minute: int = Field(
        60000, ge=0, description="Requests a minute that one token may make of one process; 0: no bound."
    )
    session_seconds: int = Field(43200, ge=60, description="How long a browser stays logged in.")
    max_blob_bytes: int = Field(5 << 30, ge=1, description="Largest NEFF that is taken.")
    namespace_max_bytes: int = Field(
        0, ge=0, description="Bytes that a namespace may hold; more is refused. 0: no bound."
    )
    namespace_quotas: dict[str, int] = Field(
        {}, description='The same for some namespaces: JSON such as `{"pr-*": 50000000000}`; 0: no bound.'
    )
    ttl_seconds: float = Field(
        wire.TTL_SECONDS, gt=0, description="A lease without a heartbeat for this long may be given to another host."
    )
    provisional_seconds: float = Field(
        wire.PROVISIONAL_SECONDS, gt=0, description="The same for a lease that has not had its first heartbeat."
    )
    yield_seconds: float = Field(
        2.0, ge=0, description="After a transient failure the host waits this long so that another may try."
    )
    transient_attempts: int = Field(
        3, ge=1, description="With this many transient failures in a round a key counts as failed."
    )
    exhausted_seconds: float = Field(60.0, ge=0, description="How long it then counts as failed.")
    deterministic_seconds: float = Field(
        600.0, ge=0, description="How long a compiler error is answered to everybody."
    )
    round_seconds: float = Field(600.0, ge=0, description="A round ends this long after its last failure.")
    outage_seconds: float = Field(
        3.0,
        gt=0,
        description="When the server itself stood still for this long, leases that ran out meanwhile go on.",
    )
    store_outage_seconds: float = Field(
        60.0,
        ge=0,
        description="A replica whose store is away stays ready for this long: leases and waiting go on without it.",
    )
    poll_seconds: float = Field(
        5.0, gt=0, description="Keys that somebody waits for are looked at this often anyway."
    )
    flush_seconds: float = Field(1.0, gt=0, description="Counts of hits are written this often.")
    recording: bool = Field(True, description="Keep what became of each request: statistics, jobs, savings.")
    keep_events_days: float = Field(3.0, gt=0, description="Single requests are kept this long.")
    keep_events_rows: int = Field(2_000_000, ge=1000, description="And at most this many of them.")
    keep_ranks_days: float = Field(
        30.0, gt=0, description="Figures of a job's single ranks, and which host had which graph, are kept this long."
    )
    keep_hours_days: float = Field(35.0, gt=0, description="Hourly sums are kept this long; daily ones for good.")
    keep_jobs_days: float = Field(400.0, gt=0, description="Figures of jobs are kept this long.")
    price_per_host_hour: float | None = Field(
        None, ge=0, description="What an hour of one host costs you, to show savings as money. Default: not shown."
    )
    price_currency: str = Field("", max_length=8, description="Its currency, as it shall be shown, such as USD.")
    busy_seconds: float = Field(30.0, gt=0, description="How long a statement waits for SQLite's lock.")
    database_pool_size: int = Field(
        10, ge=1, le=1000, description="Connections to PostgreSQL per process; waiting requests hold none."
    )
    database_pool_seconds: float = Field(
        10.0, gt=0, description="How long a request waits for one of them before it is answered 503."
    )
    database_connect_seconds: float = Field(
        5.0, gt=0, description="How long a new connection to PostgreSQL may take."
    )
    database_statement_seconds: float = Field(
        15.0, gt=0, description="How long a statement in PostgreSQL may take, waiting for locks included."
    )
    gc_interval_seconds: float = Field(
        3600.0, ge=0, description="Garbage is collected this often, by one replica; 0: by `neffcache gc` alone."
    )
    gc_max_bytes: int = Field(
        0, ge=0, description="A namespace above this loses the entries unused for longest; 0: no bound."
    )
    gc_unused_seconds: float = Field(0.0, ge=0, description="Entries without a hit for this long go; 0: they stay.")
    gc_age_seconds: float = Field(0.0, ge=0, description="Entries published this long ago go; 0: they stay.")
    gc_compilers: list[str] = Field(
        [], description='Entries made by these compiler versions go: JSON such as `["2.19.*"]`.'
    )
    gc_history_seconds: float = Field(
        180 * 86400.0,
        ge=0,
        description="What is known of a key without an artifact (its factors, how long it took to compile) goes when "
        "nobody asked for it this long; 0: it stays.",
    )
    gc_grace_seconds: float = Field(
        7200.0,
        ge=0,
        description="What was stored or used within it stays, and bytes stay for it after their last entry went; "
        "longer than a presigned URL lasts and than a compile takes to publish what it uploaded.",
    )
    keep_leases_seconds: float = Field(
        86400.0, ge=3600, description="How long the record of an ended lease is kept, to answer repeated requests."
    )
    shutdown_seconds: int = Field(10, ge=0, description="Grace for running transfers after SIGTERM.")
    access_log: bool = Field(False, description="Log every request (lease ids are blotted out).")
    log_level: str = Field("warning", description="debug, info, warning or error.")
    log_format: Literal["text", "json"] = Field("text", description="Form of log lines; json is one object a line.")
    workers: int = Field(
        1, ge=1, le=64, description="Serving processes on this host. More than one needs PostgreSQL."
    )
    forwarded_allow_ips: str = Field(
        "127.0.0.1",
        description="Proxies whose X-Forwarded-For and -Proto are believed: addresses or networks, separated "
        "by commas, or *.",
    )

    @field_validator("admin_token")
    @classmethod
    def _long_enough(cls, value: SecretStr | None) -> SecretStr | None:
        # The message never shows the value.
        if value is not None and (len(value.get_secret_value()) < 20 or not value.get_secret_value().isascii()):
            raise ValueError("must have at least 20 characters, all ASCII: `openssl rand -hex 24` makes one")
        return value

    @field_validator("allow_anonymous")
    @classmethod
    def _known_access(cls, value: str) -> str:
        if value.lower() not in ("", "off", "read", "write"):
            raise ValueError("must be off, read or write")
        return value.lower()

    @field_validator("read_chain")
    @classmethod
    def _names_namespaces(cls, value: dict[str, str]) -> dict[str, str]:
        for pattern, parent in value.items():
            wire.check_namespace(parent)
            wire.check_namespace(pattern.replace("*", "x"))
            if pattern == parent:
                raise ValueError(f"{parent} cannot trust itself")
        return value

    @field_validator("log_level")
    @classmethod
    def _known_level(cls, value: str) -> str:
        if value.lower() not in ("debug", "info", "warning", "error"):
            raise ValueError("must be debug, info, warning or error")
        return value.lower()

    @model_validator(mode="after")
    def _grace_outlives_urls(self) -> ServerSettings:
        if self.gc_grace_seconds < self.s3_presign_seconds and self.effective_storage_url.startswith("s3:"):
            raise ValueError("gc_grace_seconds must not be smaller than s3_presign_seconds")
        return self

    @model_validator(mode="after")
    def _provisional_is_shorter(self) -> ServerSettings:
        if self.provisional_seconds > self.ttl_seconds:
            raise ValueError("provisional_seconds must not be larger than ttl_seconds")
        return self

    @property
    def loopback(self) -> bool:
        """True when only this machine can reach the server."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def anonymous(self) -> Literal["off", "read", "write", "local"]:
        """What requests without a token may do; `local`: everything, this machine's own."""
        if self.allow_anonymous in ("off", "read", "write"):
            return self.allow_anonymous  # type: ignore[return-value]  # checked by the validator
        return "local" if self.loopback and self.admin_token is None else "off"

    def quota_of(self, namespace: str) -> int:
        """Bytes that a namespace may hold, 0 for no bound."""
        matching = (quota for pattern, quota in self.namespace_quotas.items() if fnmatchcase(namespace, pattern))
        return next(matching, self.namespace_max_bytes)

    def trusted_by(self, namespace: str) -> str | None:
        """The namespace whose artifacts are served to `namespace` too, None when it reads only its own."""
        for pattern, parent in self.read_chain.items():
            if parent != namespace and fnmatchcase(namespace, pattern):
                return parent
        return None

    @property
    def effective_database_url(self) -> str:
        """The database that is used."""
        return self.database_url or f"sqlite:///{self.data_dir.absolute() / 'neffcache.sqlite3'}"

    @property
    def effective_storage_url(self) -> str:
        """The store that is used."""
        return self.storage_url or f"file://{self.data_dir.absolute() / 'blobs'}"

    @property
    def embedded(self) -> bool:
        """True when the database is SQLite: one process, migrated by itself."""
        return self.effective_database_url.startswith("sqlite")


def make_data_dir(folder: Path) -> None:
    """Make the data folder if need be. Raises SetupError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise SetupError(f"the data folder {folder} cannot be used: {exc.strerror}") from exc


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Sentences about names that start with the prefix and mean nothing."""
    known = {PREFIX + name.upper() for name in ServerSettings.model_fields}
    sentences = []
    for name in sorted(n for n in environ if n.upper().startswith(PREFIX) and n.upper() not in known):
        near = difflib.get_close_matches(name.upper(), known, n=1)
        sentences.append(f"{name} is no setting of this server" + (f"; did you mean {near[0]}?" if near else ""))
    return sentences


def load_settings(**given: Any) -> ServerSettings:
    """Settings from the environment, with `given` over them. Raises SetupError with one sentence per mistake."""
    mistakes = unknown_variables(os.environ)
    try:
        settings = ServerSettings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as exc:
        for error in exc.errors(include_url=False, include_context=False):
            name = PREFIX + "_".join(str(part) for part in error["loc"]).upper() if error["loc"] else "settings"
            mistakes.append(f"{name}: {error['msg']}")
    if mistakes:
        raise SetupError("\n".join(mistakes))
    return settings
