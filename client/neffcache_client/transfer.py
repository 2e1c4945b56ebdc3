"""Moving NEFFs: verified while they stream, in constant memory, with a time-out on silence and none on size."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

from neffcache_client.api import CacheClient
from neffcache_client.errors import Aborted, DigestMismatch, NeffInvalid
from neffcache_client.neff import NeffChecker, NeffInfo
from neffcache_client.wire import Artifact, UploadRequest

CHUNK = 1 << 20


def download(client: CacheClient, artifact: Artifact, path: str, *, abort: threading.Event | None = None) -> None:
    """Write the artifact to the new file `path`; what stands there after a return is whole and right.

    Raises DigestMismatch or NeffInvalid for wrong bytes, CacheUnavailable or RequestRefused when they did not come,
    OSError when `path` cannot be written. After an error no file is left.
    """
    try:
        with open(path, "xb") as f:
            checker = NeffChecker()
            with client.get(artifact.url) as chunks:
                for chunk in chunks:
                    if abort is not None and abort.is_set():
                        raise Aborted
                    checker.update(chunk)
                    if checker.size > artifact.size:
                        raise DigestMismatch(f"more than the announced {artifact.size} bytes came")
                    f.write(chunk)
            _check(checker, artifact)
    except BaseException:
        _remove(path)
        raise


def upload(client: CacheClient, lease_id: str, path: str, info: NeffInfo) -> None:
    """Send a checked NEFF under a lease. Raises CacheUnavailable, RequestRefused or OSError."""
    answer = client.upload_target(info.sha256, lease_id, UploadRequest(size=info.size))
    headers = dict(answer.headers)
    if answer.how == "stream":
        headers["neffcache-lease"] = lease_id
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


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return


WrongBytes = (DigestMismatch, NeffInvalid)
"""What `download` raises for bytes that are not the artifact."""
