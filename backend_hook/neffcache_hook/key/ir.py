"""What the compiler's input is, and its canonical digest. Imports the parsers, so only the worker uses it."""

from __future__ import annotations

import hashlib
from typing import Any

from neffcache_hook.key import nki

_BYTECODE = b"ML\xefR"
_TEXT_CONTROLS = set(range(32)) - {9, 10, 12, 13}


def canonicalise(data: bytes) -> dict[str, Any]:
    """Describe `data`. Never raises for what it holds.

    `raw` (the digest of the bytes as they are), `kind` (mlir, hlo, raw), `canonicaliser`, `digest`, `kernels` and
    `mentions` (paths), `unclear` (a kernel is named but its path cannot be told), `ops` (how often each op occurs),
    `why` (why raw), `keep` (whether the local index may remember this: not when only a library or memory is missing).
    """
    found, ops = nki.References(), {}  # type: nki.References, dict[str, int]
    try:
        kind, name, canonical = _parse(data, found, ops)
        nki.check_all_found(data, found)
    except nki.KernelUnclear as exc:
        return raw(data, str(exc), unclear=True)
    except (ImportError, MemoryError) as exc:
        return raw(data, str(exc) or "out of memory", keep=False)
    except Exception as exc:
        # Whatever a parser throws, the file is hashed raw.
        return raw(data, f"{type(exc).__name__}: {exc}")
    return {
        "raw": hashlib.sha256(data).hexdigest(),
        "kind": kind,
        "canonicaliser": name,
        "digest": hashlib.sha256(canonical).hexdigest(),
        "kernels": found.kernels,
        "mentions": found.mentions,
        "unclear": False,
        "ops": ops,
        "why": None,
        "keep": True,
    }


def _parse(data: bytes, found: nki.References, ops: dict[str, int]) -> tuple[str, str, bytes]:
    if is_mlir(data):
        from neffcache_hook.key import mlir

        return "mlir", mlir.NAME, mlir.canonicalise(data, found, ops)
    from neffcache_hook.key import hlo

    return "hlo", hlo.NAME, hlo.canonicalise(data, found, ops)


def is_mlir(data: bytes) -> bool:
    """Whether `data` is tried as MLIR; everything else is tried as an HLO protobuf."""
    return data.startswith(_BYTECODE) or _is_text(data)


def _is_text(data: bytes) -> bool:
    """A serialised HLO module always holds control characters: the tag of its computations is one."""
    head = data[:4096]
    return not any(byte in _TEXT_CONTROLS for byte in head)


def raw(data: bytes, why: str, *, unclear: bool = False, keep: bool = True) -> dict[str, Any]:
    """The description of a file that is hashed as it is, because of `why`."""
    found = nki.References()
    if not unclear:
        try:
            found = nki.scan_raw(data)
        except nki.KernelUnclear:
            unclear = True
    digest = hashlib.sha256(data).hexdigest()
    return {
        "raw": digest,
        "kind": "raw",
        "canonicaliser": "raw",
        "digest": digest,
        "kernels": found.kernels,
        "mentions": found.mentions,
        "unclear": unclear,
        "ops": {},
        "why": why[:500],
        "keep": keep,
    }
