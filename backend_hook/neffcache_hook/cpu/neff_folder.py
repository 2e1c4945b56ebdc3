"""The folder of NEFFs that TorchNeuron keeps, done again: `<dir>/ab/cd/<32 hex>.neff`, one lock per key and host.

Like the original: the key knows no compiler version, any non-empty file is taken, failed compiles are not kept, and
the lock holds on one host only and is passed by when its holder takes longer than
TORCH_NEURONX_NEFF_CACHE_LOCK_TIMEOUT seconds (1200). One difference: TorchNeuron hashes with XXH3-128, this with
BLAKE2b of 128 bits, which Python brings along.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator

from neffcache_client.settings import DEFAULT_CACHE_DIR, DEFAULT_LOCK_DIR, vendor_cache_disabled

from neffcache_hook.cpu.errors import CompilerFailed

TARGET = "trn2"
LNC = "2"
_OPT_LEVEL = "-O2"
_LOCK_POLL_SECONDS = 0.05
_TAIL = 2000


class Obtained:
    """A NEFF file for one graph."""

    __slots__ = ("from_folder", "key", "path")

    def __init__(self, key: str, path: str, *, from_folder: bool) -> None:
        self.key = key
        self.path = path
        self.from_folder = from_folder
        """True when the file was there and `neuronx-cc` was not called."""


def file_key(op_digest: str, bytecode: bytes) -> str:
    """32 hex over the op key (location-free digest, target, lnc, -O, raw flags) and the raw bytes."""
    op_key = "\0".join((op_digest, TARGET, LNC, _OPT_LEVEL, os.environ.get("NEURON_CC_FLAGS", "")))
    return hashlib.blake2b(op_key.encode() + b"\0" + bytecode, digest_size=16).hexdigest()


@contextlib.contextmanager
def obtain(op_digest: str, bytecode: bytes) -> Iterator[Obtained]:
    """The NEFF of a graph, from the folder or from `neuronx-cc`; the environment is read now, not at import.

    With the cache switched off (either spelling) the compiler runs every time, without a lock, and the file lives
    only as long as the context. Raises CompilerFailed or OSError.
    """
    key = file_key(op_digest, bytecode)
    if vendor_cache_disabled():
        with tempfile.TemporaryDirectory(prefix="neuron-") as work:
            yield Obtained(key, run_compiler(bytecode, work), from_folder=False)
        return
    path = neff_path(key)
    if _usable(path):
        yield Obtained(key, path, from_folder=True)
        return
    with _host_lock(key):
        there = _usable(path)
        if not there:
            with tempfile.TemporaryDirectory(prefix="neuron-") as work:
                _put(run_compiler(bytecode, work), path)
    yield Obtained(key, path, from_folder=there)


def neff_path(key: str) -> str:
    """Where the folder keeps the NEFF of a key."""
    root = os.environ.get("TORCH_NEURONX_NEFF_CACHE_DIR") or DEFAULT_CACHE_DIR
    return os.path.join(root, key[:2], key[2:4], f"{key}.neff")


def compiler_command(work: str) -> list[str]:
    """TorchNeuron's command line for `torch.compile`, word for word."""
    return [
        "neuronx-cc",
        "compile",
        os.path.join(work, "module.mlir"),
        "--framework",
        "XLA",
        "--target",
        TARGET,
        "--lnc",
        LNC,
        _OPT_LEVEL,
        "--model-type",
        "transformer",
        "--auto-cast=none",
        *os.environ.get("NEURON_CC_FLAGS", "").split(),
        "--output",
        os.path.join(work, "module.neff"),
    ]


def run_compiler(bytecode: bytes, work: str) -> str:
    """Compile in the folder `work` with the `neuronx-cc` that PATH names; returns the NEFF's path.

    Drains stdout to its end before stderr, as TorchNeuron does: a compiler that fills the stderr pipe first hangs
    here as it would there. Raises CompilerFailed.
    """
    command = compiler_command(work)
    with open(command[2], "wb") as f:
        f.write(bytecode)
    try:
        process = subprocess.Popen(command, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as exc:
        raise CompilerFailed(f"neuronx-cc could not be started: {exc.strerror}", exit_code=127) from exc
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        out, err = process.stdout.read(), process.stderr.read()
    if process.returncode:
        raise _failure(process.returncode, (out + err).decode("utf-8", "replace"))
    if not _usable(command[-1]):
        raise CompilerFailed("neuronx-cc ended without an error and left no NEFF behind", exit_code=0)
    return command[-1]


def _failure(exit_code: int, text: str) -> CompilerFailed:
    import re

    lines = [line for line in text.strip().splitlines() if line.strip()]
    coded = next((line for line in lines if "NCC_" in line or "[F137]" in line), None)
    said = coded or "\n".join(lines)[-_TAIL:] or "it said nothing"
    code = re.search(r"NCC_[A-Z0-9]+", said)
    message = f"neuronx-cc failed with exit code {exit_code}: {said.strip()}"
    return CompilerFailed(message, exit_code=exit_code, code=code.group(0) if code else None)


def _usable(path: str) -> bool:
    try:
        return os.stat(path).st_size > 0
    except OSError:
        return False


def _put(source: str, path: str) -> None:
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    fd, own = tempfile.mkstemp(dir=folder, prefix=".neff-")
    try:
        with os.fdopen(fd, "wb") as out, open(source, "rb") as f:
            while chunk := f.read(1 << 20):
                out.write(chunk)
        os.replace(own, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(own)
        raise


@contextlib.contextmanager
def _host_lock(key: str) -> Iterator[None]:
    folder = os.environ.get("TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR") or DEFAULT_LOCK_DIR
    os.makedirs(folder, exist_ok=True)
    deadline = time.monotonic() + float(os.environ.get("TORCH_NEURONX_NEFF_CACHE_LOCK_TIMEOUT") or 1200)
    with open(os.path.join(folder, f"{key}.lock"), "a", encoding="utf-8") as lock:
        while not _try_lock(lock.fileno()) and time.monotonic() < deadline:
            time.sleep(_LOCK_POLL_SECONDS)
        yield


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        if exc.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True
