"""What is told of a graph so that a miss can be explained: op counts, and for each op a digest, a line and a text.

Never part of a key. The launcher sends it after a miss, the server keeps it beside the key and compares two of them
without ever having seen either graph. It is bounded: beyond `MAX_OPS` operations only the counts are told, and
what does not fit into `MAX_BYTES` loses its texts first and its ops then.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import zlib
from dataclasses import dataclass, field
from typing import Any

from neffcache_client.wire import MAX_SUMMARY_BYTES

MAX_OPS = 4000
MAX_TEXT = 200
MAX_BYTES = MAX_SUMMARY_BYTES
"""Of the encoded summary, which is base64 of zlib of JSON."""
_MAX_DECODED = 8 << 20
_FORMAT = 1
_DIGITS = 10
_PATH_PARTS = 2


@dataclass(slots=True, frozen=True)
class Op:
    """One operation. `digest` covers all of it but its operands, `wiring` tells which operands they are."""

    name: str
    digest: str
    wiring: str = ""
    file: str = ""
    """Last parts of the path of the source file, empty when the graph does not tell."""
    line: int = 0
    text: str = ""
    """The operation as the graph writes it, clipped."""

    @property
    def where(self) -> str | None:
        """`train.py:31`, None when unknown."""
        return f"{self.file}:{self.line}" if self.file else None

    @property
    def result(self) -> str | None:
        """The name of the value that it makes, such as %12."""
        name, equals, _ = self.text.partition(" = ")
        return name.partition(":")[0] if equals and name.startswith("%") else None


@dataclass(slots=True, frozen=True)
class GraphSummary:
    """A graph; `ops` is empty when only the counts are known."""

    kind: str
    counts: dict[str, int]
    ops: list[Op] = field(default_factory=list)


def clip(text: str) -> str:
    """`text` in at most MAX_TEXT characters: its beginning and, since types stand there, its end."""
    text = " ".join(text.split())
    if len(text) <= MAX_TEXT:
        return text
    tail = MAX_TEXT // 3
    return f"{text[: MAX_TEXT - tail - 3]}...{text[-tail:]}"


def short_digest(of: str | bytes) -> str:
    """Tells ops of two graphs apart, nothing more."""
    data = of.encode("utf-8", "replace") if isinstance(of, str) else of
    return hashlib.sha256(data).hexdigest()[:_DIGITS]


def path_tail(path: str) -> str:
    """The last parts of a path: enough for a person to find the file, without where somebody's home is."""
    return "/".join(path.split("/")[-_PATH_PARTS:])


def encode(summary: GraphSummary) -> str:
    """`summary` as text of at most MAX_BYTES."""
    ops = summary.ops if len(summary.ops) <= MAX_OPS else []
    bare = [Op(op.name, op.digest, op.wiring, op.file, op.line) for op in ops]
    for kept in (ops, bare):
        encoded = _pack(summary, kept)
        if len(encoded) <= MAX_BYTES:
            return encoded
    return _pack(summary, [])


def decode(text: str) -> GraphSummary:
    """The summary that `encode` made `text` of. Raises ValueError for anything else, however large it unpacks."""
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(text, validate=True), _MAX_DECODED)
        if not unpacker.eof:
            raise ValueError("larger than a summary may be, or cut")
        document = json.loads(data)
        if document["format"] != _FORMAT:
            raise ValueError(f"format {document['format']!r} is not known here")
        files = [_text(name) for name in document["files"]]
        return GraphSummary(
            kind=_text(document["kind"]),
            counts={_text(name): _number(count) for name, count in document["counts"].items()},
            ops=[_op(row, files) for row in document["ops"][:MAX_OPS]],
        )
    except (binascii.Error, zlib.error, KeyError, TypeError, AttributeError, IndexError, RecursionError) as exc:
        raise ValueError(f"no summary of a graph: {exc}") from exc


def _pack(summary: GraphSummary, ops: list[Op]) -> str:
    files = sorted({op.file for op in ops})
    at = {name: index for index, name in enumerate(files)}
    document = {
        "format": _FORMAT,
        "kind": summary.kind,
        "counts": summary.counts,
        "files": files,
        "ops": [[op.name, op.digest, op.wiring, at[op.file], op.line, op.text] for op in ops],
    }
    packed = zlib.compress(json.dumps(document, separators=(",", ":")).encode(), 6)
    return base64.b64encode(packed).decode()


def _op(row: list[Any], files: list[str]) -> Op:
    name, digest, wiring, file, line, text = row
    return Op(_text(name), _text(digest), _text(wiring), files[_number(file)], _number(line), _text(text)[:MAX_TEXT])


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("expected text")
    return value


def _number(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise TypeError("expected a number")
    return value
