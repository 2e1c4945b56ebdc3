"""What the pictures' axes say."""

from __future__ import annotations

import pytest
from neffcache_server.dashboard import charts


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (15, "15 s"), (60, "1 min"), (75, "1 min 15 s"), (5400, "90 min"), (9000, "2 h 30 min")],
)
def test_an_instant_on_the_axis_is_in_whole_units(seconds: float, text: str) -> None:
    assert charts._clock(seconds) == text
