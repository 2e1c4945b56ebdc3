"""What a compiler's `--version` printed, kept in a file: the answer takes seconds and 64 ranks ask at once.

Light imports: on the path of a local hit.
"""

from __future__ import annotations

import fcntl
import os
import time

from neffcache_client.errors import NeffcacheError

SECONDS = 60.0


class IdentityUnknown(NeffcacheError):
    """The compiler does not tell its version; its results are not cached."""


def printed_version(program: str, note: str) -> str:
    """What `program --version` prints; from the file `note` when it is whole. Raises IdentityUnknown."""
    printed = _read(note)
    if printed is None:
        with _Turn(os.path.join(os.path.dirname(note), "version.lock")):
            printed = _read(note)
            if printed is None:
                printed = _run_version(program)
                _write(note, printed)
    return printed


_END = "\n-- end\n"


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError):
        return None
    return text.removesuffix(_END) if text.endswith(_END) else None


def _write(path: str, printed: str) -> None:
    """Keep the answer; a folder that cannot be written only costs the next process a run."""
    temporary = f"{path}.{os.getpid()}.{time.monotonic_ns()}"
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(printed + _END)
        os.replace(temporary, path)
    except OSError:
        pass


class _Turn:
    """64 ranks that start at once run `--version` once. Only a courtesy: who waits too long goes ahead."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1

    def __enter__(self) -> None:
        try:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError:
            return
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:
                return  # no locks on this file system: everybody asks

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def _run_version(real: str) -> str:
    import subprocess

    environ = {**os.environ, "NEFFCACHE_INNER": "1"}
    try:
        done = subprocess.run(
            [real, "--version"],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise IdentityUnknown(f"{real} --version took more than {SECONDS:.0f} s") from exc
    except OSError as exc:
        raise IdentityUnknown(f"{real} --version could not be run: {exc.strerror}") from exc
    printed = done.stdout.decode("utf-8", "replace").strip()
    if done.returncode != 0 or not printed:
        raise IdentityUnknown(f"{real} --version ended with exit code {done.returncode} and told no version")
    return printed
