"""The client's settings: one object, read once from the environment.

Every variable is a line of `VARIABLES`; docs/settings.md is tested against it. On the launcher's path of a
local hit, so nothing but `os` is imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from neffcache_client.errors import SettingsError

VARIABLES: dict[str, str] = {
    "NEFFCACHE_URL": "Address of the cache server, such as http://cache:8765. Unset: neffcache does nothing.",
    "NEFFCACHE_TOKEN": "Bearer token sent to the server.",
    "NEFFCACHE_NAMESPACE": "Namespace of keys and artifacts. Default: default.",
    "NEFFCACHE_MODE": "readwrite (default), readonly (never publish), require (a miss is an error), off.",
    "NEFFCACHE_JOB": "Name of the job, shown to whoever waits for it. Default: the scheduler's job id if known.",
    "NEFFCACHE_HOST": "Name of this host as others see it, such as the node's name in a pod. Default: the host name.",
    "NEFFCACHE_STRICT": "1: a cache fault is an error instead of a local compile.",
    "NEFFCACHE_LOG": "File that the launcher's own messages go to; `stderr` for the terminal. "
    "Default: <local folder>/neffcache/log/<host>.log.",
    "NEFFCACHE_LOCAL_MAX_BYTES": "Upper bound of the local tier in bytes; K, M, G, T accepted. Default: no bound.",
    "NEFFCACHE_HOST_COMPILES": "At most this many compilers at once on this host. Default: no bound.",
    "NEFFCACHE_RETRY_FAILED": "1: pass over a stored failure once per job.",
    "NEFFCACHE_LOCAL_DIR": "Set by neffcache itself: the user's TORCH_NEURONX_NEFF_CACHE_DIR before it was "
    "pointed at a folder per compiler.",
    "NEFFCACHE_RUN": "Set by neffcache itself: the process that sums up this rank's compiles at its end.",
    "NEFFCACHE_INNER": "Set by neffcache itself: a launcher inside a launcher passes through.",
    "NEFFCACHE_CPU_COMPILER_LOG": "Demo toolchain only: file to which the CPU stand-in compiler appends a line per "
    "compile.",
    "NEFFCACHE_LAUNCHER_DIR": "Set by neffcache itself: the folder that holds the launcher.",
}
SERVER_PREFIX = "NEFFCACHE_SERVER_"

MODES = ("readwrite", "readonly", "require", "off")
DEFAULT_CACHE_DIR = "/tmp/neff_cache"
DEFAULT_LOCK_DIR = "/tmp/local_cache"
DEFAULT_LOCK_TIMEOUT = 1200.0
BY_COMPILER = "by-compiler"

_JOB_VARIABLES = ("SLURM_JOB_ID", "AWS_BATCH_JOB_ID", "TORCHELASTIC_RUN_ID", "KUBERNETES_JOB_NAME")
_RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_TRUE = ("1", "true", "yes", "on")
_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_bytes(text: str, name: str) -> int:
    """`10G` -> 10737418240. Raises SettingsError naming the variable."""
    t = text.strip().lower().removesuffix("ib").removesuffix("b")
    factor = _UNITS.get(t[-1:], 0)
    try:
        value = int(float(t[:-1]) * factor) if factor else int(t)
    except (ValueError, OverflowError):
        raise SettingsError(f"{name}={text!r}: expected a number of bytes such as 50G") from None
    if value < 0:
        raise SettingsError(f"{name}={text!r}: must not be negative")
    return value


def flag(env: Mapping[str, str], name: str) -> bool:
    """True when a variable is switched on."""
    return env.get(name, "").strip().lower() in _TRUE


def _number(text: str) -> int | None:
    """A plain decimal number that fits into a database; None for anything else, `²` included."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _token(text: str) -> str | None:
    """Without the line end of the file it was mounted from. Raises SettingsError, which never shows it."""
    token = text.strip()
    if not all(" " <= character <= "~" for character in token):
        # Told by the HTTP library instead, the whole header would end up in the log.
        raise SettingsError("NEFFCACHE_TOKEN holds a line end or something else that is no printable ASCII")
    return token or None


def _seconds(text: str | None, default: float) -> float:
    # The vendor's variable, and the vendor's to complain about.
    try:
        return float(text) if text else default
    except ValueError:
        return default


def user_cache_dir(env: Mapping[str, str]) -> str:
    """The folder the user named, without the `by-compiler/<identity>` that neffcache put behind it."""
    own = env.get("NEFFCACHE_LOCAL_DIR")
    if own:
        return own
    path = env.get("TORCH_NEURONX_NEFF_CACHE_DIR") or DEFAULT_CACHE_DIR
    head, tail = os.path.split(path.rstrip("/"))
    if os.path.basename(head) == BY_COMPILER and tail:
        return os.path.dirname(head)
    return path


def unknown_variables(env: Mapping[str, str]) -> list[str]:
    """Names that start with NEFFCACHE_ and mean nothing: most likely typing errors."""
    return sorted(
        n for n in env if n.startswith("NEFFCACHE_") and n not in VARIABLES and not n.startswith(SERVER_PREFIX)
    )


class ClientSettings:
    """What a rank's environment says about the cache. Make one with `from_env`."""

    __slots__ = (
        "cache_dir",
        "host_compiles",
        "job",
        "local_max_bytes",
        "lock_dir",
        "lock_timeout",
        "log",
        "mode",
        "namespace",
        "rank",
        "retry_failed",
        "strict",
        "token",
        "url",
    )

    url: str
    """Without a trailing slash; empty when the cache is not switched on."""
    token: str | None
    namespace: str
    mode: str
    job: str | None
    rank: int | None
    strict: bool
    retry_failed: bool
    log: str | None
    local_max_bytes: int | None
    host_compiles: int | None
    cache_dir: str
    """The user's TORCH_NEURONX_NEFF_CACHE_DIR; the local tier is its `neffcache/` folder."""
    lock_dir: str
    """Host-only locks: TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR."""
    lock_timeout: float
    """After so many seconds the vendor's code breaks its own lock, whoever holds it."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> ClientSettings:
        """Read the settings. Raises SettingsError for a value that cannot be used."""
        env = os.environ if env is None else env
        s = cls()
        s.url = env.get("NEFFCACHE_URL", "").strip().rstrip("/")
        if s.url and not s.url.startswith(("http://", "https://")):
            raise SettingsError(f"NEFFCACHE_URL={s.url!r}: must start with http:// or https://")
        s.token = _token(env.get("NEFFCACHE_TOKEN", ""))
        s.namespace = env.get("NEFFCACHE_NAMESPACE") or "default"
        s.mode = (env.get("NEFFCACHE_MODE") or "readwrite").strip().lower()
        if s.mode not in MODES:
            raise SettingsError(f"NEFFCACHE_MODE={s.mode!r}: must be one of {', '.join(MODES)}")
        s.job = env.get("NEFFCACHE_JOB") or next((env[n] for n in _JOB_VARIABLES if env.get(n)), None)
        s.rank = _number(next((env[n] for n in _RANK_VARIABLES if env.get(n)), ""))
        s.strict = flag(env, "NEFFCACHE_STRICT")
        s.retry_failed = flag(env, "NEFFCACHE_RETRY_FAILED")
        s.log = env.get("NEFFCACHE_LOG") or None
        limit = env.get("NEFFCACHE_LOCAL_MAX_BYTES")
        s.local_max_bytes = parse_bytes(limit, "NEFFCACHE_LOCAL_MAX_BYTES") if limit else None
        compiles = env.get("NEFFCACHE_HOST_COMPILES", "").strip()
        s.host_compiles = _number(compiles)
        if compiles and not s.host_compiles:
            raise SettingsError(f"NEFFCACHE_HOST_COMPILES={compiles[:40]!r}: must be a number of at least 1")
        s.cache_dir = user_cache_dir(env)
        s.lock_dir = env.get("TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR") or DEFAULT_LOCK_DIR
        s.lock_timeout = _seconds(env.get("TORCH_NEURONX_NEFF_CACHE_LOCK_TIMEOUT"), DEFAULT_LOCK_TIMEOUT)
        return s

    @property
    def active(self) -> bool:
        """True when compiles shall go through the cache."""
        return bool(self.url) and self.mode != "off"

    @property
    def tier_dir(self) -> str:
        """Folder of the local tier, the spool, the index and the records."""
        return os.path.join(self.cache_dir, "neffcache")

    def __repr__(self) -> str:
        shown = ((n, "***" if n == "token" and self.token else getattr(self, n)) for n in self.__slots__)
        return "ClientSettings(" + ", ".join(f"{n}={v!r}" for n, v in shown) + ")"


def vendor_cache_disabled(env: Mapping[str, str] | None = None) -> bool:
    """True when the user switched the vendor's NEFF cache off, in either spelling."""
    env = os.environ if env is None else env
    return flag(env, "TORCH_NEURONX_NEFF_DISABLE_CACHE") or flag(env, "TORCH_NEURONX_DISABLE_NEFF_CACHE")
