"""The local tier: verified NEFFs in a folder of this host (or of a shared file system), found without a server.

    <tier_dir>/artifacts/ab/<key>.neff    the bytes
    <tier_dir>/artifacts/ab/<key>.json    sha256, size, compiler_version, target, compile_seconds, stored_at
    <tier_dir>/tmp/                       unfinished files, unique per host, process and use

The JSON file is written last and read first, so its presence says that the bytes are whole; both appear by rename.
Nothing is trusted: every fetch compares length and SHA-256 while it copies. A reader copies from an open file, so
eviction may unlink under it. Light imports: on the path of a local hit.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time

from neffcache_client.errors import LocalTierError
from neffcache_client.identity import host_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

CHUNK = 1 << 20
_STALE_TEMP_SECONDS = 3600.0
_EVICT_TO = 0.9


class LocalArtifact:
    """What is known of a NEFF in the local tier."""

    __slots__ = ("compile_seconds", "compiler_version", "sha256", "size", "target")

    def __init__(self, meta: Mapping[str, Any]) -> None:
        """Raises ValueError when the meta data lack a usable digest or size."""
        sha256, size, seconds = meta.get("sha256"), meta.get("size"), meta.get("compile_seconds")
        if not isinstance(sha256, str) or len(sha256) != 64 or not isinstance(size, int):
            raise ValueError("no digest or size")
        self.sha256: str = sha256
        self.size: int = size
        self.compiler_version: str | None = meta.get("compiler_version")
        self.target: str | None = meta.get("target")
        self.compile_seconds: float | None = seconds if isinstance(seconds, (int, float)) else None


class LocalTier:
    """The artifacts of one folder. `max_bytes` bounds them; the least recently used go first."""

    __slots__ = ("corrupt", "max_bytes", "tier_dir")

    def __init__(self, tier_dir: str, max_bytes: int | None = None) -> None:
        self.tier_dir = tier_dir
        self.max_bytes = max_bytes
        self.corrupt = 0
        """Damaged artifacts that this object met and removed."""

    def path(self, key: str) -> str:
        """Where the bytes of a key are, whether or not they exist."""
        return os.path.join(self.tier_dir, "artifacts", key[:2], key + ".neff")

    def contains(self, key: str) -> bool:
        """Cheap and unverified: worth a `fetch`."""
        return os.path.exists(_meta_path(self.path(key)))

    def fetch(self, key: str, output: str) -> LocalArtifact | None:
        """Put a verified copy at `output` by rename and say what it is; None is a miss.

        A damaged artifact is removed, counted in `corrupt` and a miss. Raises LocalTierError when `output` itself
        cannot be written.
        """
        for attempt in (1, 2):
            opened = self._open(key)
            if opened is None:
                return None
            artifact, fd = opened
            try:
                whole = _copy_verified(fd, artifact, output)
                if whole:
                    _touch(fd)
                    return artifact
            finally:
                os.close(fd)
            # A writer may have replaced the bytes between the two opens: damage is what is still there at the
            # second look.
            if attempt == 2:
                self.corrupt += 1
                self.remove(key)
        return None

    def store(self, key: str, source: str, meta: Mapping[str, Any]) -> None:
        """Keep a copy of the verified NEFF `source`. `meta` needs sha256 and size.

        What is already there stays. Raises LocalTierError, leaving nothing half-written.
        """
        artifact = LocalArtifact(meta)
        path = self.path(key)
        if self.max_bytes is not None and artifact.size > self.max_bytes:
            raise LocalTierError(
                f"a NEFF of {artifact.size} bytes exceeds NEFFCACHE_LOCAL_MAX_BYTES={self.max_bytes}"
            )
        opened = self._open(key)
        if opened is not None:
            os.close(opened[1])
            return
        temp: str | None = None
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            temp = self.temp_path(key)
            _copy_file(source, temp, artifact)
            os.replace(temp, path)
            temp = self.temp_path(key)
            with open(temp, "w", encoding="utf-8") as f:
                json.dump({**meta, "stored_at": time.time()}, f)
            os.replace(temp, _meta_path(path))
        except OSError as exc:
            if temp is not None:
                remove_quietly(temp)
            raise LocalTierError(f"the local folder {self.tier_dir} cannot take a NEFF: {describe(exc)}") from exc
        self._sweep_temp()
        if self.max_bytes is not None:
            self.evict(keep=key)

    def remove(self, key: str) -> None:
        """Forget a key. Readers that have it open keep their bytes."""
        remove_quietly(_meta_path(self.path(key)))
        remove_quietly(self.path(key))

    def temp_path(self, key: str) -> str:
        """A name in this tier that no other process, host or thread uses. Raises OSError."""
        folder = os.path.join(self.tier_dir, "tmp")
        os.makedirs(folder, exist_ok=True)
        return os.path.join(folder, unique(key[:16]))

    def writable(self) -> bool:
        """True when a file can be made here."""
        try:
            path = self.temp_path("probe")
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        except OSError:
            return False
        remove_quietly(path)
        return True

    def evict(self, keep: str | None = None) -> int:
        """Remove least recently used artifacts until the bound holds; returns how many went. Never raises OSError."""
        if self.max_bytes is None:
            return 0
        found = [(mtime, size, key) for key, size, mtime in self.usage()]
        total = sum(size for _, size, _ in found)
        if total <= self.max_bytes:
            return 0
        gone = 0
        for _, size, key in sorted(found):
            if total <= self.max_bytes * _EVICT_TO:
                break
            if key != keep:
                self.remove(key)
                total -= size
                gone += 1
        return gone

    def usage(self) -> list[tuple[str, int, float]]:
        """(key, bytes, last use) of every artifact."""
        root = os.path.join(self.tier_dir, "artifacts")
        found = []
        for folder in _listdir(root):
            for name in _listdir(os.path.join(root, folder)):
                if not name.endswith(".neff"):
                    continue
                try:
                    st = os.stat(os.path.join(root, folder, name))
                except OSError:
                    continue
                found.append((name[:-5], st.st_size, st.st_mtime))
        return found

    def _open(self, key: str) -> tuple[LocalArtifact, int] | None:
        path = self.path(key)
        try:
            with open(_meta_path(path), "rb") as f:
                artifact = LocalArtifact(json.loads(f.read()))
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        except (ValueError, AttributeError):
            self.corrupt += 1
            self.remove(key)
            return None
        return artifact, fd

    def _sweep_temp(self) -> None:
        folder = os.path.join(self.tier_dir, "tmp")
        remove_stale(os.path.join(folder, name) for name in _listdir(folder))


def unique(stem: str) -> str:
    """A file name no other host, process or thread makes: pids alone repeat over a shared file system."""
    return f"{stem}.{host_name()}.{os.getpid()}.{os.urandom(6).hex()}.tmp"


def place(source: str, output: str) -> None:
    """Move a finished file to `output` so that a reader sees nothing or all of it. Raises OSError."""
    if _renamed(source, output):
        return
    temp = os.path.join(os.path.dirname(output) or ".", unique("." + os.path.basename(output)[:64]))
    try:
        with open(source, "rb") as src, open(temp, "xb") as dst:
            while chunk := src.read(CHUNK):
                dst.write(chunk)
        os.replace(temp, output)
    except OSError:
        remove_quietly(temp)
        raise
    remove_quietly(source)


def hand_over(source: str | None, output: str) -> None:
    """`place` for the caller's own output; nothing for no source. Raises LocalTierError."""
    if not source:
        return
    try:
        place(source, output)
    except OSError as exc:
        raise LocalTierError(f"{output} cannot be written: {describe(exc)}") from exc


def remove_quietly(path: str) -> None:
    """Unlink; a file that cannot be removed is somebody else's problem, never this job's."""
    try:
        os.unlink(path)
    except OSError:
        return


def remove_stale(paths: Iterable[str]) -> None:
    """Remove those that killed processes left half-written. A live one writes all the time, so an hour is long."""
    horizon = time.time() - _STALE_TEMP_SECONDS
    for path in paths:
        try:
            # Not the time of the bytes: a fresh link to an old artifact is as old as that.
            if os.stat(path).st_ctime < horizon:
                os.unlink(path)
        except OSError:
            continue


def describe(exc: OSError) -> str:
    """An OSError in words, without Python's `[Errno 28]`."""
    text = exc.strerror or str(exc)
    return f"{text}: {exc.filename}" if exc.filename else text


def _copy_verified(fd: int, artifact: LocalArtifact, output: str) -> bool:
    """Copy the open file to `output`, hashing what is written; False when it is not the artifact."""
    if os.fstat(fd).st_size != artifact.size:
        return False
    temp = os.path.join(os.path.dirname(output) or ".", unique("." + os.path.basename(output)[:64]))
    digest = hashlib.sha256()
    try:
        out = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            while chunk := _read(fd):
                digest.update(chunk)
                _write_all(out, chunk)
        finally:
            os.close(out)
        if digest.hexdigest() != artifact.sha256:
            remove_quietly(temp)
            return False
        os.replace(temp, output)
    except OSError as exc:
        remove_quietly(temp)
        raise LocalTierError(f"{output} cannot be written: {describe(exc)}") from exc
    return True


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, CHUNK)
    except OSError as exc:
        # A bad sector is damage, not a reason to fail: short data fail the digest.
        if exc.errno in (errno.EIO, errno.ESTALE):
            return b""
        raise


def _copy_file(source: str, target: str, artifact: LocalArtifact) -> None:
    digest = hashlib.sha256()
    with open(source, "rb") as src, open(target, "xb") as dst:
        while chunk := src.read(CHUNK):
            digest.update(chunk)
            dst.write(chunk)
    if digest.hexdigest() != artifact.sha256:
        raise OSError(errno.EIO, "the file changed while it was copied", source)


def _renamed(source: str, target: str) -> bool:
    try:
        os.replace(source, target)
    except OSError as exc:
        if exc.errno in (errno.EXDEV, errno.EACCES, errno.EPERM):
            return False
        raise
    return True


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _touch(fd: int) -> None:
    try:
        os.utime(fd)
    except OSError:
        return


def _meta_path(path: str) -> str:
    return path[:-5] + ".json"


def _listdir(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []
