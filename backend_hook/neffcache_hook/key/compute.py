"""The key of one compile: SHA-256 over named factors, each of which can be shown and compared.

On the path of a local hit: where the index knows the graph, no parser is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping

from neffcache_hook.key.command import UNKNOWN
from neffcache_hook.key.index import Index

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from neffcache_hook.key.command import CompileCommand
    from neffcache_hook.key.identity import CompilerIdentity

RECIPE = 1
"""Raised with every change of what enters a key or how; docs/compile-key.md has the history."""

CANONICALISERS = ("hlo-1", "mlir-1")
"""What this version's parsers call their output; the index forgets everything when one changes."""

ENVIRONMENT = ("NEURON_PLATFORM_TARGET_OVERRIDE", "NEURON_LOGICAL_NC_CONFIG", "XLA_FLAGS")
ENVIRONMENT_PREFIX = "NEURON_CC_"
FLAGS_VARIABLE = "NEURON_CC_FLAGS"
"""Enters by its options, see `command`, since it also carries what only wrappers read."""

_OFF = ("", "0", "false", "no", "off")
_SEPARATORS = " \t\n=,"
_AROUND_PATHS = ":;'\"()[]{}"
"""A path may hold these too, so what stands between separators is tried whole first."""


class ComputedKey:
    """`key` is None when the compile cannot be cached, and `uncacheable` says why.

    `factors` is what was hashed. `about` describes the graph outside the key: op counts, and why it was hashed raw.
    """

    __slots__ = ("about", "factors", "key", "raw_digest", "uncacheable")

    def __init__(self) -> None:
        self.key: str | None = None
        self.factors: dict[str, Any] = {}
        self.uncacheable: str | None = None
        self.raw_digest = ""
        self.about: dict[str, Any] = {}


class _Uncacheable(Exception):
    """Carries the reason."""


def compute_key(
    cmd: CompileCommand,
    *,
    cwd: str,
    environ: Mapping[str, str],
    compiler: CompilerIdentity,
    index_dir: str,
) -> ComputedKey:
    """The key of `cmd`, run in `cwd` by `compiler`. Never raises for what the files hold."""
    computed = ComputedKey()
    try:
        _check(cmd, environ)
        graph = _describe(cmd, cwd, index_dir, computed)
        computed.factors = _factors(cmd, cwd, environ, compiler, graph)
    except _Uncacheable as exc:
        computed.uncacheable = str(exc)
        return computed
    computed.key = key_of(computed.factors)
    return computed


def key_of(factors: dict[str, Any]) -> str:
    """The SHA-256 of the factors as canonical JSON."""
    encoded = json.dumps(factors, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(b"neffcache key\n" + encoded.encode("ascii")).hexdigest()


def _check(cmd: CompileCommand, environ: Mapping[str, str]) -> None:
    if cmd.problem:
        raise _Uncacheable(cmd.problem)
    if cmd.no_cache:
        raise _Uncacheable("no_cache")
    if environ.get("NEURON_EXTRACT_GRAPHS_ONLY", "").strip().lower() not in _OFF:
        # The NEFF of an extraction run is a place-holder.
        raise _Uncacheable("extract_only")
    if not (cmd.target or environ.get("NEURON_PLATFORM_TARGET_OVERRIDE")):
        raise _Uncacheable("no_target")


def _index(index_dir: str) -> Index:
    return Index(index_dir, "-".join((f"recipe{RECIPE}", *CANONICALISERS)))


def _describe(cmd: CompileCommand, cwd: str, index_dir: str, computed: ComputedKey) -> dict[str, Any]:
    path = os.path.join(cwd, cmd.input or "")
    try:
        fd = _open_regular(path)
    except OSError as exc:
        raise _Uncacheable("no_input" if isinstance(exc, FileNotFoundError) else "unreadable_input") from exc
    try:
        computed.raw_digest = raw = _digest_fd(fd)
        index = _index(index_dir)
        graph = index.get(raw)
        if graph is None:
            with index.one_reader(raw):
                graph = index.get(raw) or _read_graph(fd, raw, index)
    except OSError as exc:
        raise _Uncacheable("unreadable_input") from exc
    finally:
        os.close(fd)
    computed.about = {"ops": graph["ops"], "raw_because": graph.get("why")}
    if graph["unclear"]:
        raise _Uncacheable("unclear_kernel")
    return graph


def _read_graph(fd: int, raw: str, index: Index) -> dict[str, Any]:
    from neffcache_hook.key import spawn

    os.lseek(fd, 0, os.SEEK_SET)
    graph = spawn.canonicalise(fd, raw)
    if graph.get("keep"):
        index.put(raw, graph)
    return graph


def _factors(
    cmd: CompileCommand, cwd: str, environ: Mapping[str, str], compiler: CompilerIdentity, graph: dict[str, Any]
) -> dict[str, Any]:
    files: list[list[str | None]] = []
    known = [[name, value] for name, value in cmd.options if name != UNKNOWN]
    return {
        "recipe": RECIPE,
        "ir": {name: graph[name] for name in ("kind", "canonicaliser", "digest")},
        "compiler": {"version": compiler.version, "digest": compiler.digest, "kind": compiler.kind},
        "target": cmd.target or environ.get("NEURON_PLATFORM_TARGET_OVERRIDE"),
        "lnc": cmd.lnc,
        "options": {
            "known": [[n, _by_content(v, cwd, cmd, files)] for n, v in known],
            "unknown": [_by_content(v, cwd, cmd, files) for n, v in cmd.options if n == UNKNOWN],
            "environment": [[n, _by_content(v, cwd, cmd, files)] for n, v in cmd.env_options],
        },
        "files": files + _graph_files(graph, cwd),
        "env": _environment(environ),
    }


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(environ.items())
        if name in ENVIRONMENT or (name.startswith(ENVIRONMENT_PREFIX) and name != FLAGS_VARIABLE)
    }


def unseen_by_vendor(environ: Mapping[str, str]) -> str:
    """Digest (16 hex) of what enters our key from the environment but not the vendor's; empty when nothing is set.

    The vendor's key holds the flags as text and the graph. It holds no other variable, and of a file that a flag
    names only the name.
    """
    environment = _environment(environ)
    words = environ.get(FLAGS_VARIABLE, "").replace("=", " ").split()
    files = [digest for word in words if not word.startswith("-") and (digest := _digest_file(word))]
    if not environment and not files:
        return ""
    return hashlib.sha256(json.dumps([environment, files]).encode()).hexdigest()[:16]


def _graph_files(graph: dict[str, Any], cwd: str) -> list[list[str | None]]:
    files: list[list[str | None]] = []
    for path in graph["kernels"]:
        digest = _digest_file(os.path.join(cwd, path))
        if digest is None:
            raise _Uncacheable("missing_kernel")
        files.append(["kernel", digest])
    files += [["mention", _digest_file(path)] for path in graph["mentions"]]
    return files


def _by_content(value: str | None, cwd: str, cmd: CompileCommand, files: list[list[str | None]]) -> str | None:
    """`value` with each file that it names replaced by a place-holder; the contents go into `files`.

    The suffix stays, since a program may go by it; the folder and the name do not.
    """
    if not value or value not in cmd.file_options:
        return value
    whole = value.partition("=")[2] if value.startswith("-") else value
    if whole and _is_file(os.path.join(cwd, whole)):
        return value[: len(value) - len(whole)] + _placeholder(whole, cwd, files)
    return _by_pieces(value, _SEPARATORS, lambda word: _word(word, cwd, files))


def _by_pieces(value: str, separators: str, change: Callable[[str], str]) -> str:
    """`value` with whatever stands between `separators` changed."""
    pieces: list[str] = []
    word = ""
    for character in value:
        if character in separators:
            pieces += [change(word), character]
            word = ""
        else:
            word += character
    return "".join([*pieces, change(word)])


def _word(word: str, cwd: str, files: list[list[str | None]]) -> str:
    if any(character in word for character in _AROUND_PATHS) and not _is_file(os.path.join(cwd, word)):
        return _by_pieces(word, _AROUND_PATHS, lambda piece: _word(piece, cwd, files))
    if not word or word.startswith("-"):
        return word
    return _placeholder(word, cwd, files) if _is_file(os.path.join(cwd, word)) else word


def _placeholder(name: str, cwd: str, files: list[list[str | None]]) -> str:
    digest = _digest_file(os.path.join(cwd, name))
    if digest is None:
        raise _Uncacheable("missing_file")
    files.append(["option", digest])
    return f"{{file:{len(files) - 1}}}{os.path.splitext(name)[1]}"


def _is_file(path: str) -> bool:
    """Whether `path` names a file. A folder may hold anything, and a device tells something else every time."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    if not stat.S_ISREG(mode):
        raise _Uncacheable("names_a_folder")
    return True


def _open_regular(path: str) -> int:
    """Open a regular file for reading; anything else is an OSError, and a pipe is never waited for."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as exc:
        raise OSError(str(exc)) from exc
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError("not a regular file")
    return fd


def _digest_fd(fd: int) -> str:
    with open(fd, "rb", closefd=False) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_file(path: str) -> str | None:
    try:
        fd = _open_regular(path)
    except OSError:
        return None
    try:
        return _digest_fd(fd)
    except OSError:
        return None
    finally:
        os.close(fd)
