"""What the server has: entries, and what is told of a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from neffcache_client.wire.base import MAX_SUMMARY_BYTES, NESTED
from neffcache_client.wire.leases import Holder


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


NESTED.update(
    {
        ("Entry", "holder"): Holder,
        ("EntryPage", "entries"): Entry,
    }
)
