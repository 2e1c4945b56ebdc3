"""Kernel files that a graph names: found, taken out of the canonical form, hashed by content elsewhere.

An NKI custom call carries a `backend_config`: JSON, usually in base64, whose `klir_binary.binary` is the path of a
kernel. The path differs between hosts while the kernel is the same, and the kernel changes under the same path; so
the canonical form holds a place-holder, and the bytes of the file enter the key at every use.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from typing import Any

_KEY = "klir_binary"
_FIELD = "binary"
PLACEHOLDER = "neffcache:kernel"

_BASE64_RUN = re.compile(rb"[A-Za-z0-9+/]*={0,2}")
_BASE64_BEFORE = re.compile(rb"[A-Za-z0-9+/]*\Z")
_MAX_RUN = 1 << 20


class KernelUnclear(ValueError):
    """A kernel is named in a way that cannot be read."""


class References:
    """Paths in the order of their appearance: `kernels` must exist, `mentions` may be files or not."""

    __slots__ = ("kernels", "mentions")

    def __init__(self) -> None:
        self.kernels: list[str] = []
        self.mentions: list[str] = []


def canonical_config(value: bytes, into: References) -> bytes | None:
    """A `backend_config` with its kernel's path replaced, or None where it names no file and stays as it is.

    Raises KernelUnclear when there is a kernel but not its path.
    """
    document = _load(value)
    if document is None:
        return None
    found = References()
    changed = _walk(document, found)
    if not found.kernels and not found.mentions:
        return None
    into.kernels += found.kernels
    into.mentions += found.mentions
    if not found.kernels:
        return None
    # Numbers keep their spelling and objects their order, see `_load`: nothing but the path is lost.
    return json.dumps([PLACEHOLDER, changed], separators=(",", ":")).encode()


def _load(value: bytes) -> Any:
    """JSON as nested lists of [key, value] pairs marked by a dict, so that order, repeats and spelling survive."""
    text = value.strip()
    if not text.startswith((b"{", b"[")):
        if not text or len(text) % 4:
            return None
        try:
            text = base64.b64decode(text, validate=True).strip()
        except (binascii.Error, ValueError):
            return None
        if not text.startswith((b"{", b"[")):
            return None
    try:
        return json.loads(
            text,
            object_pairs_hook=lambda pairs: {"pairs": [list(pair) for pair in pairs]},
            parse_float=lambda literal: {"number": literal},
            parse_int=lambda literal: {"number": literal},
            parse_constant=lambda literal: {"number": literal},
        )
    except (ValueError, RecursionError):
        return None


def _walk(node: Any, found: References) -> Any:
    if isinstance(node, list):
        return [_walk(item, found) for item in node]
    if isinstance(node, dict) and "pairs" in node:
        return {"pairs": [[key, _value(key, item, found)] for key, item in node["pairs"]]}
    if isinstance(node, str) and node.startswith("/"):
        found.mentions.append(node)
    return node


def _value(key: str, item: Any, found: References) -> Any:
    if key != _KEY:
        return _walk(item, found)
    if not isinstance(item, dict) or "pairs" not in item:
        raise KernelUnclear("klir_binary is no object")
    names = [name for name, _ in item["pairs"]]
    if names.count(_FIELD) != 1:
        raise KernelUnclear("klir_binary names no file, or more than one")
    pairs = []
    for name, inner in item["pairs"]:
        if name != _FIELD:
            pairs.append([name, _walk(inner, found)])
            continue
        if not isinstance(inner, str) or not inner:
            raise KernelUnclear("klir_binary.binary is no path")
        found.kernels.append(inner)
        pairs.append([name, PLACEHOLDER])
    return {"pairs": pairs}


def _markers(word: bytes) -> tuple[bytes, ...]:
    """How `word` looks inside base64, at each of the three alignments."""
    found = []
    for shift in range(3):
        encoded = base64.b64encode(b"\0" * shift + word)
        start = -(-shift * 8 // 6)
        end = (shift + len(word)) * 8 // 6
        found.append(encoded[start:end])
    return tuple(found)


_MARKERS = _markers(_KEY.encode())
_QUOTED = (*_markers(b'"klir_binary"'), b'"klir_binary"', rb"\22klir_binary\22")


def check_all_found(data: bytes, found: References) -> None:
    """Compare what was found in a parsed graph with what its bytes hold. Raises KernelUnclear.

    A kernel that hides where nobody looked would be hashed by its path alone. Bytecode holds equal strings once,
    so that more may be found than are counted.
    """
    count = sum(data.count(marker) for marker in _QUOTED)
    if count > len(found.kernels) or (not found.kernels and _mentioned(data)):
        raise KernelUnclear("a kernel is named, but in no backend_config that can be read")


def _mentioned(data: bytes) -> bool:
    return _KEY.encode() in data or any(marker in data for marker in _MARKERS)


def scan_raw(data: bytes) -> References:
    """The kernels named in a file that could not be parsed. Raises KernelUnclear when one cannot be read.

    The bytes stay as they are, paths included: this only finds what else must be hashed.
    """
    found = References()
    for marker in _MARKERS:
        for at in _positions(data, marker):
            _scan_base64(data, at, found)
    for at in _positions(data, _KEY.encode()):
        _scan_plain(data, at, found)
    return found


def _positions(data: bytes, marker: bytes) -> list[int]:
    return [match.start() for match in re.finditer(re.escape(marker), data)]


def _scan_base64(data: bytes, at: int, found: References) -> None:
    window = data[max(0, at - _MAX_RUN) : at]
    before = _BASE64_BEFORE.search(window)
    start = at - (len(before.group()) if before else 0)
    run = _BASE64_RUN.match(data, start)
    text = run.group() if run else b""
    # A length or tag byte of the container may look like base64: try the first places where `{` can begin.
    for skip in range(min(len(text), 4096)):
        if text[skip : skip + 1] != b"e":
            continue
        for cut in range(4):
            piece = text[skip : len(text) - cut]
            if len(piece) % 4 == 0 and _take(piece, found):
                return
    raise KernelUnclear("a kernel is named in bytes that cannot be read")


def _scan_plain(data: bytes, at: int, found: References) -> None:
    start = at
    for _ in range(64):
        start = data.rfind(b"{", max(0, at - _MAX_RUN), start)
        if start < 0:
            break
        text = data[start : at + _MAX_RUN].decode("utf-8", "surrogateescape")
        try:
            _, length = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            continue
        if _take(text[:length].encode("utf-8", "surrogateescape"), found):
            return
    raise KernelUnclear("a kernel is named in bytes that cannot be read")


def _take(text: bytes, found: References) -> bool:
    inner = References()
    if canonical_config(text, inner) is None or not inner.kernels:
        return False
    found.kernels += inner.kernels
    found.mentions += inner.mentions
    return True
