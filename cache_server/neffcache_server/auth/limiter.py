"""How many requests a token may make."""

from __future__ import annotations

from time import monotonic

_MOST_BUCKETS = 10_000


class RateLimiter:
    """A bucket per token that holds one minute's worth and fills steadily. In this process alone."""

    def __init__(self, per_minute: int) -> None:
        """`per_minute` 0: no bound."""
        self._size = float(per_minute)
        self._buckets: dict[str, tuple[float, float]] = {}

    def wait_seconds(self, token: str) -> float:
        """0 when the request may go on, else in how many seconds one may."""
        if not self._size:
            return 0.0
        now = monotonic()
        left, since = self._buckets.pop(token, (self._size, now))
        left = min(self._size, left + (now - since) * self._size / 60.0)
        granted = left >= 1.0
        # Put back at the end: the first ones are those that have not been used for longest.
        self._buckets[token] = (left - 1.0 if granted else left, now)
        if len(self._buckets) > _MOST_BUCKETS:
            del self._buckets[next(iter(self._buckets))]
        return 0.0 if granted else (1.0 - left) * 60.0 / self._size
