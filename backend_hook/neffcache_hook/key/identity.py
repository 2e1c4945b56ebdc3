"""Which compiler it is, told from what is installed.

A path and an mtime are no identity: images normalise mtimes, and an upgrade in place keeps the path. A compiler that
comes from a wheel is never run: its METADATA has the version with the git suffix, its RECORD the SHA-256 of every
file. Any other executable is its own SHA-256 and what `--version` prints; that answer is kept under the digest of
the executable and of the packages installed beside it. A script that runs some other program cannot be seen
through: what its `--version` prints must change with that program.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time

from neffcache_client.errors import NeffcacheError

_DISTRIBUTION = "neuronx_cc-"
_VERSION_SECONDS = 60.0
_SITE_FOLDERS = ("lib", "lib64", "local/lib")


class IdentityUnknown(NeffcacheError):
    """The compiler does not tell its version; its results are not cached."""


class CompilerIdentity:
    """`version` with its git suffix, `digest` of what is installed, `text` for folder names, `kind` of evidence."""

    __slots__ = ("digest", "kind", "text", "version")

    def __init__(self, version: str, digest: str, kind: str) -> None:
        self.version = version
        self.digest = digest
        self.kind = kind
        self.text = hashlib.sha256(f"{kind}\n{version}\n{digest}".encode()).hexdigest()[:16]


def identify(executable: str, cache_dir: str) -> CompilerIdentity:
    """Identify the compiler at `executable`; `cache_dir` keeps what `--version` printed.

    Raises IdentityUnknown when the file cannot be read or does not tell a version.
    """
    try:
        real = os.path.realpath(executable)
        script = _digest(real)
        sites = _site_folders(executable, real)
    except OSError as exc:
        raise IdentityUnknown(f"cannot read the compiler {executable}: {exc.strerror}") from exc
    return _from_wheel(sites, real, script) or _from_executable(sites, real, script, cache_dir)


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _site_folders(executable: str, real: str) -> list[str]:
    """Where the packages live that a program in <prefix>/bin imports: beside it, and beside its interpreter."""
    bins = [os.path.dirname(os.path.abspath(executable)), os.path.dirname(real)]
    with open(real, "rb") as file:
        first = file.readline(4096)
    if first.startswith(b"#!"):
        words = os.fsdecode(first[2:]).split()
        if words and "/" in words[0]:
            # Not resolved: a venv's python is a link, and the venv is what counts.
            bins.append(os.path.dirname(os.path.abspath(words[0])))
    found: list[str] = []
    for prefix in dict.fromkeys(os.path.dirname(folder) for folder in bins):
        for lib in _SITE_FOLDERS:
            found += _sites_in(os.path.join(prefix, lib))
    return list(dict.fromkeys(os.path.realpath(folder) for folder in found))


def _sites_in(lib: str) -> list[str]:
    try:
        versions = sorted(name for name in os.listdir(lib) if name.startswith("python"))
    except OSError:
        return []
    folders = [os.path.join(lib, v, kind) for v in versions for kind in ("site-packages", "dist-packages")]
    return [folder for folder in folders if os.path.isdir(folder)]


def _dist_infos(site: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(site) if name.endswith(".dist-info"))
    except OSError:
        return []


def _from_wheel(sites: list[str], real: str, script: str) -> CompilerIdentity | None:
    """The identity by every installed neuronx-cc wheel that can be meant; None when there is none."""
    versions, parts = [], []
    listed = False
    for site in sites:
        for name in _dist_infos(site):
            if not name.startswith(_DISTRIBUTION):
                continue
            folder = os.path.join(site, name)
            try:
                with open(os.path.join(folder, "RECORD"), encoding="utf-8") as file:
                    record = file.read()
                version = _metadata_version(os.path.join(folder, "METADATA"))
            except (OSError, UnicodeDecodeError):
                continue
            versions.append(version)
            parts.append(_record_digest(record))
            listed = listed or _lists(record, os.path.basename(real), script)
    if not versions:
        return None
    if not listed:
        # Somebody replaced the program that the wheel installed: it is a part of what compiles.
        parts.append(script)
    return CompilerIdentity(versions[0], hashlib.sha256("\n".join(parts).encode()).hexdigest(), "wheel")


def _metadata_version(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.startswith("Version:"):
                return line.partition(":")[2].strip()
            if not line.strip():
                break
    raise OSError("no version in METADATA")


def _record_digest(record: str) -> str:
    """The digest of what the wheel brought, the same in every environment it is installed into.

    Left out are the lines that installers write: scripts (their first line names the environment), byte code,
    and notes such as INSTALLER. Otherwise two venvs with one compiler would never share a NEFF.
    """
    lines = []
    for line in record.splitlines():
        path, _, rest = line.partition(",")
        name = path.rpartition("/")[2]
        if path.startswith(("../", "/")) or not rest.startswith("sha256=") or path.endswith(".pyc"):
            continue
        if ".dist-info/" in path and name in ("INSTALLER", "REQUESTED", "direct_url.json", "RECORD", "uv_cache.json"):
            continue
        lines.append(line)
    if not lines:
        # A RECORD without digests says nothing about the files; take it as it is.
        lines = record.splitlines()
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def _lists(record: str, name: str, digest: str) -> bool:
    """Whether RECORD says that the script `name` has this SHA-256."""
    for line in record.splitlines():
        path, _, rest = line.partition(",")
        if path.endswith(f"/{name}") and rest.startswith("sha256="):
            encoded = rest[len("sha256=") :].partition(",")[0]
            return _urlsafe_hex(encoded) == digest
    return False


def _urlsafe_hex(encoded: str) -> str:
    import binascii

    try:
        text = encoded.replace("-", "+").replace("_", "/")
        return binascii.a2b_base64(text + "=" * (-len(text) % 4)).hex()
    except (binascii.Error, ValueError):
        return ""


def _from_executable(sites: list[str], real: str, script: str, cache_dir: str) -> CompilerIdentity:
    packages = "\n".join(name for site in sites for name in _dist_infos(site))
    evidence = hashlib.sha256(f"1\n{script}\n{packages}".encode()).hexdigest()
    path = os.path.join(cache_dir, f"version-{evidence}.txt")
    printed = _read(path)
    if printed is None:
        with _Turn(os.path.join(cache_dir, "version.lock")):
            printed = _read(path)
            if printed is None:
                printed = _run_version(real)
                _write(path, printed)
    digest = hashlib.sha256(f"{script}\n{printed}".encode()).hexdigest()
    return CompilerIdentity(_first_version(printed), digest, "executable")


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
        deadline = time.monotonic() + _VERSION_SECONDS
        while time.monotonic() < deadline:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                time.sleep(0.02)

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
            timeout=_VERSION_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise IdentityUnknown(f"{real} --version took more than {_VERSION_SECONDS:.0f} s") from exc
    except OSError as exc:
        raise IdentityUnknown(f"{real} --version could not be run: {exc.strerror}") from exc
    printed = done.stdout.decode("utf-8", "replace").strip()
    if done.returncode != 0 or not printed:
        raise IdentityUnknown(f"{real} --version ended with exit code {done.returncode} and told no version")
    return printed


def _first_version(printed: str) -> str:
    """The first word that looks like a version, such as 2.23.6484.0+3b612583; the first line when none does."""
    for word in printed.split():
        digits = word.lstrip("v")
        if digits[:1].isdigit() and "." in digits:
            return digits.rstrip(",;)")
    return printed.splitlines()[0][:80]
