"""How a request can end when no NEFF came from elsewhere."""

from __future__ import annotations

from neffcache_client.results import CACHE_FAULT_EXIT, CompileResult, Obtained, failure_text
from neffcache_client.settings import ClientSettings
from neffcache_client.wire import Failure

_UNPUBLISHED = ("spooled", "not_spooled", "publish_refused")


def missing(reason: str, why: str) -> Obtained:
    """A miss where the user allows none."""
    return Obtained(
        verdict="failed",
        exit_code=CACHE_FAULT_EXIT,
        reason=reason,
        message=f"{why} and NEFFCACHE_MODE=require forbids compiling",
    )


def refusal(settings: ClientSettings, reason: str, why: str) -> Obtained | None:
    """What forbids a compile without the cache, if anything does."""
    if settings.mode == "require":
        return missing(reason, f"the cache cannot be used ({why})")
    if not settings.strict:
        return None
    return Obtained(
        verdict="failed",
        exit_code=CACHE_FAULT_EXIT,
        reason=reason,
        message=f"the cache cannot be used: {why} (NEFFCACHE_STRICT=1, so nothing was compiled)",
    )


def own_result(result: CompileResult, verdict: str, reason: str | None, *, strict: bool) -> Obtained:
    """This process's own compile, shared or not."""
    obtained = Obtained(verdict="fallback" if verdict == "fallback" else "compiled", reason=reason, result=result)
    obtained.counted = verdict == "compiled" and reason is None
    if strict and reason in _UNPUBLISHED:
        obtained.verdict = "failed"
        obtained.exit_code = CACHE_FAULT_EXIT
        obtained.message = "the NEFF was compiled but could not be published (NEFFCACHE_STRICT=1)"
    return obtained


def own_failure(result: CompileResult, reason: str, *, counted: bool = False) -> Obtained:
    """This process's own compile failed."""
    return Obtained(verdict="failed", exit_code=result.exit_code, reason=reason, result=result, counted=counted)


def told_failure(failure: Failure) -> Obtained:
    """Somebody else's compile failed, and that is the answer."""
    return Obtained(
        verdict="failed",
        counted=True,
        exit_code=failure.exit_code or 1,
        reason=failure.kind,
        failure=failure,
        message=failure_text(failure),
    )
