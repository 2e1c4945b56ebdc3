"""The Range header."""

from __future__ import annotations

import pytest
from neffcache_server.blobs.ranges import parse_range
from neffcache_server.problems import RangeNotSatisfiable


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, None),
        ("bytes=0-0", (0, 1)),
        ("bytes=10-19", (10, 20)),
        ("bytes=90-", (90, 100)),
        ("bytes=90-500", (90, 100)),
        ("bytes=-10", (90, 100)),
        ("bytes=-500", (0, 100)),
        ("bytes= 0 - 9", (0, 10)),
        ("bytes=0-1,5-6", None),
        ("bytes=9-3", None),
        ("bytes=-", None),
        ("lines=1-2", None),
        ("bytes=a-b", None),
    ],
)
def test_range_is_read_or_ignored(header: str | None, expected: tuple[int, int] | None) -> None:
    assert parse_range(header, 100) == expected


@pytest.mark.parametrize("header", ["bytes=100-", "bytes=100-200", "bytes=-0"])
def test_range_outside_of_the_blob_is_refused(header: str) -> None:
    with pytest.raises(RangeNotSatisfiable):
        parse_range(header, 100)
