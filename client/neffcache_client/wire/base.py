"""What every message has in common: limits, checks, reading JSON, the error answer."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
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


NESTED: dict[tuple[str, str], type[Any]] = {}
"""Fields that hold dataclasses themselves, for `from_json`; each module adds its own."""


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


VERDICTS = ("local", "remote", "waited", "compiled", "failed", "fallback", "uncacheable", "pushed")
MAX_REPORTS = 1000

Role = Literal["read", "write", "admin"]

ROLES = ("read", "write", "admin")


@dataclass(slots=True, kw_only=True)
class Problem:
    """An error answer (RFC 9457). `code` is stable and meant for programs, `detail` for people."""

    title: str
    status: int
    code: str
    detail: str = ""
    type: str = "about:blank"
