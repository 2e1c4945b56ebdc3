"""One line of the doctor's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "FAIL"]


@dataclass(slots=True)
class Finding:
    """What was looked at and what it is like. `todo` says what to do about it; FAIL makes the doctor exit with 1."""

    status: Status
    name: str
    text: str
    todo: str | None = None


def ok(name: str, text: str) -> Finding:
    """As it should be."""
    return Finding("ok", name, text)


def warn(name: str, text: str, todo: str) -> Finding:
    """Works, and may not be what was meant."""
    return Finding("warn", name, text, todo)


def fail(name: str, text: str, todo: str) -> Finding:
    """The cache is not in use, or not as its user believes."""
    return Finding("FAIL", name, text, todo)
