"""What goes into and comes out of the node cache."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from neffcache_client.wire import MAX_WAIT_SECONDS, TTL_SECONDS, Failure

Verdict = Literal["local", "remote", "waited", "compiled", "failed", "fallback", "uncacheable"]

CACHE_FAULT_EXIT = 75
"""Exit code for what the compiler never said: a miss under NEFFCACHE_MODE=require, a fault under NEFFCACHE_STRICT
(EX_TEMPFAIL; the compiler's own codes are 1, 70 and above 125)."""


@dataclass(slots=True, kw_only=True)
class CompileResult:
    """How one run of the compiler ended."""

    exit_code: int
    """By shell convention: 128+N for signal N."""
    kind: Literal["ok", "deterministic", "transient"]
    output: str | None = None
    """Path of a private finished file, not yet verified."""
    seconds: float = 0.0
    cpu_seconds: float | None = None
    peak_rss_bytes: int | None = None
    log_tail: str = ""
    code: str | None = None
    """The compiler's own code, such as NCC_EOOM001."""
    out_of_memory: bool = False
    """The host had too little memory for it."""
    unpublishable: str | None = None
    """Why nobody but the caller may have the output: it may not belong to the key that was asked for."""


@dataclass(slots=True, kw_only=True)
class Obtained:
    """What became of a request; with exit code 0 the NEFF is at the output path."""

    verdict: Verdict
    exit_code: int = 0
    reason: str | None = None
    """Short and stable, for counting: why there was a fallback, or why a result was not published."""
    result: CompileResult | None = None
    """Set when this process's own compile gave the answer."""
    failure: Failure | None = None
    """Set when the answer is a failure of somebody else's compile."""
    message: str | None = None
    """For the user, when no compiler of this process said it."""
    bytes: int | None = None
    saved_seconds: float | None = None
    counted: bool = False
    """The server saw this outcome itself, so that nobody has to report it."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Patience:
    """How long to wait for what, in seconds. Tests shorten these."""

    first_contact: float = 2.0
    """All of it, DNS included: what a dead server may cost a job."""
    first_answer: float = 8.0
    """More for a server that has taken the question: one that is hung costs a host this once per probe."""
    leader: float = TTL_SECONDS
    """For this host's leader, before the server is asked past it."""
    poll: float = MAX_WAIT_SECONDS
    outage: float = 60.0
    """Of continuous failure while another host compiles."""
    publish: float = 5.0
    """For a server that fails after the compile. Then the spool takes over."""
    release: float = 1.5
    report: float = 5.0
    """For the server to read a blob again that came damaged."""


def failure_text(failure: Failure) -> str:
    """What a rank is told when another's failed compile is its answer."""
    first = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(failure.first_seen_at))
    what = failure.code or f"exit code {failure.exit_code}"
    return (
        f"{failure.log_tail.rstrip()}\nneffcache: {what} ({failure.kind}), served from neffcache: first compiled at "
        f"{first} on host {failure.host or 'unknown'}"
    ).lstrip()
