"""What happens to a NEFF that was just compiled: judged, kept locally, published, or spooled for later.

Nothing here fails a job: the caller gets its file whatever becomes of the copies.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from neffcache_client.bounded import TimeIsUp, bounded
from neffcache_client.errors import (
    CacheUnavailable,
    DigestMismatch,
    LeaseSuperseded,
    LocalTierError,
    NeffChecksumMismatch,
    NeffEmpty,
    NeffInvalid,
    NeffNotAContainer,
    NeffTruncated,
    RequestRefused,
)
from neffcache_client.local_tier import LocalTier, describe
from neffcache_client.neff import TARGET_OF_ARCHITECTURE, NeffInfo, check_neff
from neffcache_client.results import CompileResult, Patience
from neffcache_client.settings import ClientSettings
from neffcache_client.spool import Spool, SpoolEntry
from neffcache_client.transfer import upload
from neffcache_client.wire import Artifact, FailRequest, HeartbeatRequest, PublishRequest

if TYPE_CHECKING:
    from neffcache_client.api import CacheClient

Warn = Callable[[str, str], None]
"""Takes a kind and a sentence; each kind is said once per process."""


_UPLOAD_AGAIN = frozenset(
    kind.code
    for kind in (DigestMismatch, NeffChecksumMismatch, NeffEmpty, NeffInvalid, NeffNotAContainer, NeffTruncated)
) | {"upload_cut", "blob_not_uploaded"}
"""What the server says of a NEFF that was whole when it left here: the way or the store damaged it, or lost it."""


class Publisher:
    """Copies of one compile's result. Every method returns instead of raising, Aborted apart."""

    def __init__(self, settings: ClientSettings, tier: LocalTier, *, abort: threading.Event, warn: Warn) -> None:
        self._settings = settings
        self._tier = tier
        self._spool = Spool(settings.tier_dir)
        self._abort = abort
        self._warn = warn

    def judge(
        self, result: CompileResult, *, expect_version: str | None, expect_target: str | None
    ) -> tuple[NeffInfo | None, str | None]:
        """(what the NEFF says, None), or (None, why it may be given to nobody but the caller)."""
        if not result.output:
            return None, "no_output"
        if result.unpublishable:
            self._warn("unpublishable", f"the NEFF is used but not shared: {result.unpublishable}")
            return None, "unpublishable"
        try:
            info = check_neff(result.output)
        except (NeffInvalid, OSError) as exc:
            words = describe(exc) if isinstance(exc, OSError) else str(exc)
            self._warn("not_a_neff", f"the compiler's output is not shared, it cannot be verified: {words}")
            return None, "not_a_neff"
        if (why := mismatch(info.compiler_version, info.target, expect_version, expect_target)) is not None:
            self._warn("mismatch", f"the NEFF is not shared: its {why}")
            return None, "mismatch"
        return info, None

    def keep(self, key: str, path: str, info: NeffInfo, compile_seconds: float | None) -> bool:
        """Copy a verified NEFF into the local tier; False (and one warning) when it cannot be."""
        meta = {
            "sha256": info.sha256,
            "size": info.size,
            "compiler_version": info.compiler_version,
            "target": info.target,
            "compile_seconds": compile_seconds,
        }
        return self._store(key, path, meta)

    def keep_artifact(self, key: str, path: str, artifact: Artifact) -> bool:
        """The same for a download."""
        fields = ("sha256", "size", "compiler_version", "target", "compile_seconds")
        return self._store(key, path, {name: getattr(artifact, name) for name in fields})

    def publish(
        self, client: CacheClient, entry: SpoolEntry, path: str, info: NeffInfo, patience: Patience
    ) -> str | None:
        """Upload under `entry.lease_id` and publish. None when the lease has ended well, otherwise why it has not.

        `spooled` means that the result waits on disk and a later process will try. Raises Aborted, having spooled.
        """
        assert entry.lease_id is not None
        deadline = time.monotonic() + patience.publish
        pause = 0.25
        sending = _Sending(client, entry, path, info)
        try:
            while True:
                try:
                    bounded(sending.go_on, seconds=None, abort=self._abort)
                    return None
                except LeaseSuperseded:
                    return "lease_lost"
                except (CacheUnavailable, RequestRefused, OSError) as exc:
                    if isinstance(exc, RequestRefused) and exc.code not in _UPLOAD_AGAIN:
                        self._warn("publish_refused", f"the NEFF was not published: {exc}")
                        return "publish_refused"
                    if time.monotonic() >= deadline or self._abort.wait(pause):
                        why = self.spool(entry, path)
                        kept = "it will be uploaded later" if why == "spooled" else "and not kept for later"
                        self._warn("publish_failed", f"the NEFF was not published, {kept}: {exc}")
                        return why
                pause = min(2 * pause, 2.0)
        except BaseException:
            self.spool(entry, path)
            raise

    def spool(self, entry: SpoolEntry, path: str) -> str:
        """Keep a result for a later upload: `spooled`, or `not_spooled` (and one warning)."""
        stored = self._tier.path(entry.key)
        try:
            if self._tier.contains(entry.key):
                self._spool.add(entry, stored, link=True)
            else:
                # The caller gets this very file and may change it, so no link.
                self._spool.add(entry, path, link=False)
        except LocalTierError as exc:
            self._warn("spool", f"the NEFF cannot be kept for a later upload: {exc}")
            return "not_spooled"
        return "spooled"

    def entry(
        self, key: str, factors: dict[str, Any], result: CompileResult, lease_id: str | None = None
    ) -> SpoolEntry:
        """What has to be known to publish a result, now or later."""
        return SpoolEntry(
            key=key,
            factors=factors,
            compile_seconds=max(0.0, result.seconds),
            cpu_seconds=result.cpu_seconds,
            peak_rss_bytes=result.peak_rss_bytes,
            url=self._settings.url,
            namespace=self._settings.namespace,
            lease_id=lease_id,
        )

    def _store(self, key: str, path: str, meta: dict[str, Any]) -> bool:
        try:
            self._tier.store(key, path, meta)
        except LocalTierError as exc:
            self._warn("local_tier", f"{exc}; the NEFF is used but not kept on this host")
            return False
        return True


def mismatch(
    version: str | None, target: str | None, expect_version: str | None, expect_target: str | None
) -> str | None:
    """In what a NEFF differs from what was asked for, where both are known; None: in nothing."""
    # An architecture that we have no `--target` name for proves nothing either way.
    known = target if target in TARGET_OF_ARCHITECTURE.values() else None
    for what, found, expected in (("compiler version", version, expect_version), ("target", known, expect_target)):
        if expected and found and expected != found:
            return f"{what} is {found}, expected {expected}"
    return None


class _Sending:
    """Upload and publish, repeated until both were answered."""

    def __init__(
        self, client: CacheClient, entry: SpoolEntry, path: str, info: NeffInfo, *, from_spool: bool = False
    ) -> None:
        self._client, self._entry, self._path, self._info = client, entry, path, info
        self._from_spool = from_spool
        self._uploaded = False

    def go_on(self) -> str:
        """One try; returns the outcome. Raises CacheUnavailable, RequestRefused, OSError."""
        entry, info = self._entry, self._info
        assert entry.lease_id is not None
        if not self._uploaded:
            upload(self._client, entry.lease_id, self._path, info)
            # Not again after a publish whose answer was lost: it may have ended the lease, which no upload survives.
            self._uploaded = True
        request = PublishRequest(
            sha256=info.sha256,
            size=info.size,
            compile_seconds=entry.compile_seconds,
            peak_rss_bytes=entry.peak_rss_bytes,
            cpu_seconds=entry.cpu_seconds,
            from_spool=self._from_spool,
        )
        try:
            return self._client.publish(entry.lease_id, request).outcome
        except RequestRefused as exc:
            self._uploaded = exc.code not in _UPLOAD_AGAIN
            raise


def send(client: CacheClient, entry: SpoolEntry, path: str, info: NeffInfo, *, from_spool: bool = False) -> str:
    """One try: upload, publish. Returns the outcome. Raises CacheUnavailable, RequestRefused, OSError."""
    return _Sending(client, entry, path, info, from_spool=from_spool).go_on()


def tell_unshared(client: CacheClient, lease_id: str, *, seconds: float) -> None:
    """Tell whoever waits for this compile's result not to count on it. Never raises."""
    beat = HeartbeatRequest(phase="not shared", unshared=True)
    try:
        bounded(lambda: client.heartbeat(lease_id, beat), seconds=seconds, abort=None)
    except (TimeIsUp, CacheUnavailable, RequestRefused):
        return


def report_failure(
    client: CacheClient, lease_id: str, result: CompileResult, *, seconds: float, abort: threading.Event
) -> str | None:
    """End a lease with the failure of its compile. None when the server knows, else why not. Raises Aborted."""
    request = FailRequest(
        kind="deterministic" if result.kind == "deterministic" else "transient",
        exit_code=result.exit_code,
        code=(result.code or "")[:64] or None,
        log_tail=result.log_tail,
    )
    try:
        bounded(lambda: client.fail(lease_id, request), seconds=seconds, abort=abort)
    except RequestRefused:
        # Superseded: others have moved on.
        return None
    except TimeIsUp:
        return f"no answer within {seconds:g} s"
    except CacheUnavailable as exc:
        return str(exc)
    return None
