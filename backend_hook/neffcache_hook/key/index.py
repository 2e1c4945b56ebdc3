"""The local index: what a graph was found to be, under the SHA-256 of its bytes.

Spares a local hit the parsers. It leads to the canonical digest and the paths that the graph names, never to a
key: options, compiler and the files themselves are looked at every time. Small files, written whole and renamed; one
that is damaged or of another recipe is as good as none.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PATIENCE_SECONDS = 10.0
_LOOK_SECONDS = 0.05

_FIELDS = {
    "kind": str,
    "canonicaliser": str,
    "digest": str,
    "kernels": list,
    "mentions": list,
    "unclear": bool,
    "ops": dict,
}


class Index:
    """Entries of one recipe and one set of canonicalisers under `folder`. Reading and writing never raise."""

    __slots__ = ("_folder",)

    def __init__(self, folder: str, version: str) -> None:
        self._folder = os.path.join(folder, version)

    def _path(self, raw_digest: str) -> str:
        return os.path.join(self._folder, raw_digest[:2], f"{raw_digest}.json")

    def get(self, raw_digest: str) -> dict[str, Any] | None:
        """What is known of a graph, or None."""
        try:
            with open(self._path(raw_digest), "rb") as file:
                checksum, _, body = file.read().partition(b"\n")
            if hashlib.sha256(raw_digest.encode() + body).hexdigest().encode() != checksum:
                return None
            found = json.loads(body)
        except (OSError, ValueError, RecursionError):
            return None
        return found if is_description(found) else None

    def one_reader(self, raw_digest: str) -> OneReader:
        """To be held while a graph is parsed: 64 ranks that meet it at once load the parsers once, not 64 times."""
        # A fixed set of files: one per graph would stay behind for good, and removing it would split the lock.
        return OneReader(os.path.join(self._folder, "locks", raw_digest[:2]))

    def put(self, raw_digest: str, found: dict[str, Any]) -> None:
        """Remember a graph; a folder that cannot be written costs the next process a parse."""
        path = self._path(raw_digest)
        body = json.dumps(found, sort_keys=True).encode()
        checksum = hashlib.sha256(raw_digest.encode() + body).hexdigest().encode()
        # Ranks of different hosts may share the folder and have equal pids.
        temporary = f"{path}.{os.uname().nodename}.{os.getpid()}.{time.monotonic_ns()}.tmp"
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(temporary, "wb") as file:
                file.write(checksum + b"\n" + body)
            os.replace(temporary, path)
        except OSError:
            try:
                os.unlink(temporary)
            except OSError:
                pass


class OneReader:
    """A lock that is waited for for 10 s at most, and done without where there can be none."""

    __slots__ = ("_fd", "_path")

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd: int | None = None

    def __enter__(self) -> None:
        from neffcache_client.host_lock import open_private

        self._fd = open_private(self._path)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._fd is not None and time.monotonic() < deadline:
            try:
                return fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_LOOK_SECONDS)
            except OSError:
                return None
        return None

    def __exit__(self, *exc: object) -> None:
        if self._fd is not None:
            os.close(self._fd)


def is_description(found: object) -> bool:
    """Whether `found` has the shape of what `ir.canonicalise` returns."""
    return isinstance(found, dict) and all(isinstance(found.get(name), kind) for name, kind in _FIELDS.items())
