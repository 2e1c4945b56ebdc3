"""Text and numbers from outside, made fit for every database."""

from __future__ import annotations

import math

_LARGEST = 2**53
"""Beyond this the sums of a few would not be whole numbers any more in JSON and JavaScript."""


def storable(text: str) -> str:
    """`text` without NUL (PostgreSQL refuses it) and without halves of surrogate pairs (no UTF-8 for them).

    Compilers' logs hold both; a log that is not stored for it would leave 64 ranks without the reason.
    """
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")


def storable_rank(rank: int | None) -> int | None:
    """`rank` if it can be one."""
    return rank if rank is not None and 0 <= rank < 2**31 else None


def storable_amount(value: float) -> float:
    """A sum must not become infinite or no number because of one of its parts: such a part counts as nothing."""
    return value if math.isfinite(value) and 0 <= value < _LARGEST else 0
