"""The Range header, as far as it is of use for blobs: one range of bytes."""

from __future__ import annotations

import re

from neffcache_server.problems import RangeNotSatisfiable

_ONE_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})")


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """(start, stop) that `header` asks for of `size` bytes; None for the whole.

    Several ranges or another unit are answered with the whole, which RFC 9110 allows. Raises RangeNotSatisfiable.
    """
    match = _ONE_RANGE.fullmatch(header.replace(" ", "")) if header else None
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if not first:
        start, stop = max(0, size - int(last)), size
    else:
        start, stop = int(first), min(int(last) + 1, size) if last else size
        if last and int(last) < start:
            return None
    if start >= size or start >= stop:
        raise RangeNotSatisfiable(f"the blob has {size} bytes")
    return start, stop
