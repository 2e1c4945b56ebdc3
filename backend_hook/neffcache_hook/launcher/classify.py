"""What a compiler's end means: can the same graph succeed elsewhere or later?

`deterministic` results are told to every rank for minutes, so only an end that carries the compiler's own error
code counts as one. Everything else is `transient`: a wrong `transient` costs a compile, a wrong `deterministic`
fails a healthy job.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

Kind = Literal["ok", "deterministic", "transient"]

COMPILE_ERROR = 70
CANNOT_EXECUTE = 126
NOT_FOUND = 127
FIRST_SIGNAL = 128

_CODE = re.compile(rb"\bNCC_[A-Z][A-Z0-9]*[0-9]+\b")
_OTHER_CODE = re.compile(rb"\[F[0-9]{3}\]")
_KILLED_CHILD = b"[F137]"
_DISK_FULL = (b"No space left on device", b"Errno 28", b"ENOSPC", b"Disk quota exceeded")
_NO_MEMORY = (b"Cannot allocate memory", b"std::bad_alloc", b"\nMemoryError")


class Verdict(NamedTuple):
    """Kind of an end, and the compiler's own code (`NCC_EOOM001`, `F137`) where its output had one."""

    kind: Kind
    code: str | None


def classify(exit_code: int, output: Sequence[bytes]) -> Verdict:
    """Judge an end by its exit code (shell convention, 128+N for signal N) and what the compiler printed.

    The host's troubles are looked for before the compiler's codes: a compiler that was starved prints both.
    """
    if exit_code == 0:
        return Verdict("ok", None)
    code = _code(output)
    if any(_KILLED_CHILD in text for text in output):
        return Verdict("transient", "F137")
    if exit_code >= FIRST_SIGNAL or exit_code in (CANNOT_EXECUTE, NOT_FOUND):
        return Verdict("transient", code)
    if any(sign in text for text in output for sign in _DISK_FULL + _NO_MEMORY):
        return Verdict("transient", code)
    if exit_code == COMPILE_ERROR and code and code.startswith("NCC_"):
        return Verdict("deterministic", code)
    return Verdict("transient", code)


def out_of_memory(exit_code: int, output: Sequence[bytes]) -> bool:
    """The compiler, or a child of it, was killed or refused for want of memory. SIGKILL comes from nobody else."""
    if exit_code == 0:
        return False
    return exit_code == FIRST_SIGNAL + 9 or any(s in text for text in output for s in (_KILLED_CHILD, *_NO_MEMORY))


def _code(output: Sequence[bytes]) -> str | None:
    """The last code wins: the compiler repeats its final error at the end."""
    for pattern in (_CODE, _OTHER_CODE):
        for text in reversed(output):
            found = pattern.findall(text)
            if found:
                return str(found[-1].decode().strip("[]"))
    return None
