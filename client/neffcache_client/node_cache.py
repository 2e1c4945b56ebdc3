"""One rank's way to a NEFF: local tier, host leader, server, compiler, in that order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from neffcache_client.settings import ClientSettings
from neffcache_client.wire import Failure

Verdict = Literal["local", "remote", "waited", "compiled", "failed", "fallback", "uncacheable"]


@dataclass(slots=True)
class LeaseView:
    """What the compile tells about itself, sent with every heartbeat, and what it is told."""

    phase: str | None = None
    rss_bytes: int | None = None
    lost: bool = False
    not_needed: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True, kw_only=True)
class CompileResult:
    """How one run of the compiler ended."""

    exit_code: int
    kind: Literal["ok", "deterministic", "transient"]
    output: str | None = None
    seconds: float = 0.0
    cpu_seconds: float | None = None
    peak_rss_bytes: int | None = None
    log_tail: str = ""
    code: str | None = None


@dataclass(slots=True, kw_only=True)
class Obtained:
    """What became of a request."""

    verdict: Verdict
    exit_code: int
    reason: str | None = None
    result: CompileResult | None = None
    failure: Failure | None = None
    message: str | None = None


class NodeCache:
    """Gets NEFFs for one process."""

    def __init__(self, settings: ClientSettings, *, log: Callable[[str], None], abort: threading.Event) -> None:
        self.settings = settings

    def obtain(
        self,
        key: str,
        factors: dict[str, Any],
        *,
        output: str,
        compile: Callable[[LeaseView], CompileResult],
        expect_version: str | None,
        expect_target: str | None,
        retry_failed: bool = False,
    ) -> Obtained:
        """Put the NEFF of `key` at `output`."""
        raise NotImplementedError
