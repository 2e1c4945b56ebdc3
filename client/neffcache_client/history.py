"""What compiles on this host took: a JSON line each, read back to judge whether another one fits.

    <tier_dir>/history/<host>.jsonl    {"key": ..., "graph": bytes, "peak": bytes, "seconds": ...}

A key's own last line counts most; else the largest of the last eight compiles of graphs of about that size. Losing
a line loses an estimate, never a job: nothing here raises.
"""

from __future__ import annotations

import json
import os
from statistics import median
from typing import Any, NamedTuple

from neffcache_client.identity import host_name

_MAX_BYTES = 1 << 20
_READ_BYTES = 64 << 10
_LAST = 8


class Expected(NamedTuple):
    """What a compile may take; None where history does not know."""

    peak: int | None = None
    seconds: float | None = None


class History:
    """The compiles of one local folder on this host."""

    def __init__(self, tier_dir: str) -> None:
        self._path = os.path.join(tier_dir, "history", f"{host_name()}.jsonl")

    def note(
        self, key: str, graph_bytes: int | None, *, peak: int, seconds: float | None, too_little: bool = False
    ) -> None:
        """Add a compile. `too_little`: it was killed for memory, and `peak` is what it shall have next time."""
        line = {"key": key, "graph": graph_bytes, "peak": peak, "seconds": seconds, "guess": too_little}
        try:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                if os.fstat(fd).st_size > _MAX_BYTES:
                    os.replace(self._path, self._path + ".1")
                os.write(fd, json.dumps(line, separators=(",", ":")).encode() + b"\n")
            finally:
                os.close(fd)
        except OSError:
            return

    def expect(self, key: str, graph_bytes: int | None) -> Expected:
        """What a compile of this key will take."""
        lines = self._lines()
        own = next((line for line in reversed(lines) if line["key"] == key), None)
        if own is not None:
            return Expected(own["peak"], own["seconds"])
        size = _size_class(graph_bytes)
        alike = [line for line in lines if size and not line["guess"] and _size_class(line["graph"]) == size][-_LAST:]
        if not alike:
            return Expected()
        known = [line["seconds"] for line in alike if line["seconds"] is not None]
        return Expected(max(line["peak"] for line in alike), median(known) if known else None)

    def _lines(self) -> list[dict[str, Any]]:
        try:
            with open(self._path, "rb") as f:
                f.seek(max(0, os.fstat(f.fileno()).st_size - _READ_BYTES))
                raw = f.read().splitlines()
        except OSError:
            return []
        found = []
        for text in raw:
            try:
                line = json.loads(text)
                usable = isinstance(line["key"], str) and isinstance(line["peak"], int) and "guess" in line
                usable = usable and all(
                    line[n] is None or isinstance(line[n], int | float) for n in ("graph", "seconds")
                )
            except (ValueError, KeyError, TypeError):
                continue
            if usable:
                found.append(line)
        return found


def _size_class(graph_bytes: object) -> int:
    """Graphs within a factor of two of each other; 0 for an unknown size."""
    return graph_bytes.bit_length() if isinstance(graph_bytes, int) else 0
