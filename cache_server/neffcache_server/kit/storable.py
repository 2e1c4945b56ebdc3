"""Text from outside, made fit for every database."""

from __future__ import annotations


def storable(text: str) -> str:
    """`text` without NUL (PostgreSQL refuses it) and without halves of surrogate pairs (no UTF-8 for them).

    Compilers' logs hold both; a log that is not stored for it would leave 64 ranks without the reason.
    """
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")
