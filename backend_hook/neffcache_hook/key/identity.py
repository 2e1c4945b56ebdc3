"""Which compiler it is, told from what is installed.

A path and an mtime are no identity: images normalise mtimes, and an upgrade in place keeps the path. A compiler that
comes from a wheel is never run: its METADATA has the version with the git suffix, its RECORD the SHA-256 of every
file. Any other executable is its own SHA-256 and what `--version` prints; that answer is kept under the digest of
the executable, of the programs that a script names by absolute path, and of the packages installed beside them. A
script that finds its program in some other way cannot be seen through.
"""

from __future__ import annotations

import hashlib
import os

from neffcache_hook.key.version import IdentityUnknown, printed_version

__all__ = ["CompilerIdentity", "IdentityUnknown", "identify"]

_DISTRIBUTION = "neuronx_cc-"
_PACKAGE = "neuronxcc"
_SITE_FOLDERS = ("lib", "lib64", "local/lib")
_LARGEST_SCRIPT = 1 << 16
_DEEPEST_SCRIPT = 4
_APART = str.maketrans(dict.fromkeys("\"'`=;&|(){}<>$", " "))


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

    Raises IdentityUnknown when the file cannot be read or does not tell a version, or when PYTHONPATH puts a compiler
    before it that nothing describes.
    """
    try:
        real = os.path.realpath(executable)
        script = _digest(real)
        sites = _site_folders(executable, real)
        wheels = [wheel for site in sites for wheel in _wheels(site)]
        if wheels:
            return _from_wheels([*_wheels_ahead(sites), *wheels], real, script)
        evidence = "\n".join(_evidence(executable, real, _DEEPEST_SCRIPT))
    except OSError as exc:
        raise IdentityUnknown(f"cannot read the compiler {executable}: {exc.strerror}") from exc
    note = os.path.join(cache_dir, f"version-{hashlib.sha256(evidence.encode()).hexdigest()}.txt")
    printed = printed_version(real, note)
    digest = hashlib.sha256(f"{script}\n{printed}".encode()).hexdigest()
    return CompilerIdentity(_first_version(printed), digest, "executable")


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _site_folders(executable: str, real: str) -> list[str]:
    """Where the packages live that a program in <prefix>/bin imports: beside it, and beside its interpreter."""
    bins = [os.path.dirname(os.path.abspath(executable)), os.path.dirname(real)]
    with open(real, "rb") as file:
        first = file.readline(4096)
    if first.startswith(b"#!"):
        interpreter = _interpreter(os.fsdecode(first[2:]).split())
        if interpreter is not None:
            # Not resolved: a venv's python is a link, and the venv is what counts.
            bins.append(os.path.dirname(os.path.abspath(interpreter)))
    found: list[str] = []
    for prefix in dict.fromkeys(os.path.dirname(folder) for folder in bins):
        for lib in _SITE_FOLDERS:
            found += _sites_in(os.path.join(prefix, lib))
    return list(dict.fromkeys(os.path.realpath(folder) for folder in found))


def _interpreter(words: list[str]) -> str | None:
    """The program that a `#!` line names, also through `env`."""
    if not words or "/" not in words[0]:
        return None
    if os.path.basename(words[0]) != "env":
        return words[0]
    name = next((word for word in words[1:] if not word.startswith("-") and "=" not in word), None)
    if name is None or "/" in name:
        return name
    found = (os.path.join(folder, name) for folder in os.environ.get("PATH", os.defpath).split(os.pathsep))
    return next((path for path in found if os.access(path, os.X_OK)), None)


def _wheels_ahead(sites: list[str]) -> list[tuple[str, str]]:
    """The wheels in folders that Python looks into before `sites`: PYTHONPATH, and the user's own outside of a venv.

    Raises IdentityUnknown for a compiler there that is no installed wheel.
    """
    path = os.environ.get("PYTHONPATH", "")
    folders = [os.path.realpath(entry) for entry in path.split(os.pathsep)] if path else []
    base = os.environ.get("PYTHONUSERBASE") or os.path.expanduser("~/.local")
    for site in sites:
        python = os.path.dirname(site)
        if not os.path.exists(os.path.join(python, "../..", "pyvenv.cfg")):
            folders.append(os.path.realpath(os.path.join(base, "lib", os.path.basename(python), "site-packages")))
    found: list[tuple[str, str]] = []
    for folder in dict.fromkeys(folder for folder in folders if folder not in sites):
        wheels = _wheels(folder)
        if not wheels and os.path.isdir(os.path.join(folder, _PACKAGE)):
            raise IdentityUnknown(
                f"{folder} is searched before the installed compiler and holds a {_PACKAGE} that is no installed "
                "wheel, so nothing tells which compiler it is"
            )
        found += wheels
    return found


def _evidence(executable: str, real: str, depth: int) -> list[str]:
    """What has to be the same for an answer to `--version` to hold."""
    lines = [_digest(real)]
    lines += [name for site in _site_folders(executable, real) for name in _dist_infos(site)]
    with open(real, "rb") as file:
        text = file.read(_LARGEST_SCRIPT)
    if not text.startswith(b"#!") or not depth:
        return lines
    for word in os.fsdecode(text.partition(b"\n")[2]).translate(_APART).split():
        # Programs only: a log that it writes to would change with every question.
        program = word.startswith("/") and os.path.isfile(word) and os.access(word, os.X_OK)
        if program and os.path.realpath(word) != real:
            lines += _evidence(word, os.path.realpath(word), depth - 1)
    return lines


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


def _wheels(site: str) -> list[tuple[str, str]]:
    """(version, RECORD) of the compiler's wheels in one folder."""
    found = []
    for name in _dist_infos(site):
        if name.startswith(_DISTRIBUTION):
            folder = os.path.join(site, name)
            try:
                with open(os.path.join(folder, "RECORD"), encoding="utf-8") as file:
                    record = file.read()
                found.append((_metadata_version(os.path.join(folder, "METADATA")), record))
            except (OSError, UnicodeDecodeError):
                continue
    return found


def _from_wheels(wheels: list[tuple[str, str]], real: str, script: str) -> CompilerIdentity:
    """The identity by every installed wheel that can be meant; the version is the first one's."""
    parts = [_record_digest(record) for _, record in wheels]
    if not any(_lists(record, os.path.basename(real), script) for _, record in wheels):
        # Somebody replaced the program that the wheel installed: it is a part of what compiles.
        parts.append(script)
    return CompilerIdentity(wheels[0][0], hashlib.sha256("\n".join(parts).encode()).hexdigest(), "wheel")


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


def _first_version(printed: str) -> str:
    """The first word that looks like a version, such as 2.23.6484.0+3b612583; the first line when none does."""
    for word in printed.split():
        digits = word.lstrip("v")
        if digits[:1].isdigit() and "." in digits:
            return digits.rstrip(",;)")
    return printed.splitlines()[0][:80]
