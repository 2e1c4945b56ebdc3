"""Moving NEFFs: verified while they stream, in constant memory, with a time-out on silence and none on size."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from neffcache_client.bounded import TimeIsUp, bounded
from neffcache_client.errors import Aborted, CacheUnavailable, DigestMismatch, NeffInvalid, RequestRefused
from neffcache_client.local_tier import remove_quietly
from neffcache_client.neff import NeffChecker, NeffInfo
from neffcache_client.wire import LEASE_HEADER, Artifact, UploadRequest

if TYPE_CHECKING:
    from neffcache_client.api import CacheClient

CHUNK = 1 << 20
MIN_SECONDS = 10.0
"""A download is judged no earlier: speeds vary."""
UNKNOWN_COMPILE_SECONDS = 600.0


class TooSlow(CacheUnavailable):
    """The download would take longer than a compile takes."""


class _Pace:
    """Compares what is left of a download, at its speed so far, with what a compile took.

    Nobody starts a compile during a fetch that is quicker. But a link that lets a byte through now and then never
    stalls and never ends.
    """

    def __init__(self, artifact: Artifact) -> None:
        self._size = artifact.size
        self._compile = max(MIN_SECONDS, artifact.compile_seconds or UNKNOWN_COMPILE_SECONDS)
        self._began = time.monotonic()

    def check(self, got: int) -> None:
        """Raises TooSlow."""
        spent = time.monotonic() - self._began
        if spent > MIN_SECONDS and spent * (self._size - got) > self._compile * got:
            raise TooSlow(
                f"{got} of {self._size} bytes came in {spent:.0f} s; a compile takes about {self._compile:.0f} s"
            )


def download(client: CacheClient, artifact: Artifact, path: str, *, abort: threading.Event | None = None) -> None:
    """Write the artifact to the new file `path`; what stands there after a return is whole and right.

    Raises DigestMismatch or NeffInvalid for wrong bytes, CacheUnavailable or RequestRefused when they did not come,
    OSError when `path` cannot be written. After an error no file is left.
    """
    try:
        with open(path, "xb") as f:
            checker, pace = NeffChecker(), _Pace(artifact)
            with client.get(artifact.url) as chunks:
                for chunk in chunks:
                    if abort is not None and abort.is_set():
                        raise Aborted
                    checker.update(chunk)
                    if checker.size > artifact.size:
                        raise DigestMismatch(f"more than the announced {artifact.size} bytes came")
                    f.write(chunk)
                    pace.check(checker.size)
            _check(checker, artifact)
    except BaseException:
        remove_quietly(path)
        raise


def fetch(
    client: CacheClient, artifact: Artifact, path: str, *, abort: threading.Event, log: Callable[[str], None]
) -> tuple[str | None, int]:
    """Download to `path`, with one refetch since a broken transfer is not yet a broken artifact.

    Returns (None or why there is no file, damaged transfers seen); the reasons are `corrupt`, `download_failed`,
    `download_slow`, `blob_missing`, `refused`. Raises Aborted, and OSError when `path` cannot be written.
    """
    damaged = 0
    reason = ""
    for _ in range(2):
        try:
            bounded(lambda: download(client, artifact, path, abort=abort), seconds=None, abort=abort)
        except (DigestMismatch, NeffInvalid) as exc:
            damaged += 1
            reason = "corrupt"
            log(f"a damaged download was thrown away: {exc}")
        except RequestRefused as exc:
            return "blob_missing" if exc.status in (404, 410) else "refused", damaged
        except TooSlow as exc:
            log(f"a download was given up: {exc}")
            return "download_slow", damaged
        except CacheUnavailable as exc:
            reason = "download_failed"
            log(f"a download failed: {exc}")
        except Aborted:
            # The thread that downloads may sit in a read for a while yet.
            remove_quietly(path)
            raise
        else:
            return None, damaged
    return reason, damaged


def damage_is_the_servers(client: CacheClient, artifact: Artifact, *, seconds: float, abort: threading.Event) -> bool:
    """Report an artifact that came damaged; True when the server agrees and has withdrawn it. Raises Aborted."""

    def report() -> bool:
        return client.report_damage(artifact.sha256, url=artifact.url).verdict != "sound"

    try:
        return bounded(report, seconds=seconds, abort=abort)
    except (TimeIsUp, CacheUnavailable, RequestRefused):
        return False


def upload(client: CacheClient, lease_id: str, path: str, info: NeffInfo) -> None:
    """Send a checked NEFF under a lease. Raises CacheUnavailable, RequestRefused or OSError."""
    answer = client.upload_target(info.sha256, lease_id, UploadRequest(size=info.size))
    headers = dict(answer.headers)
    if answer.how == "stream":
        headers[LEASE_HEADER] = lease_id
    with open(path, "rb") as f:
        client.put(answer.url, _chunks(f.fileno()), info.size, headers)


def _check(checker: NeffChecker, artifact: Artifact) -> None:
    if checker.size != artifact.size:
        raise DigestMismatch(f"{checker.size} bytes came, {artifact.size} were announced")
    if checker.sha256 != artifact.sha256:
        raise DigestMismatch(f"the bytes have SHA-256 {checker.sha256}, expected {artifact.sha256}")
    checker.finish()


def _chunks(fd: int) -> Iterator[bytes]:
    while chunk := os.read(fd, CHUNK):
        yield chunk
