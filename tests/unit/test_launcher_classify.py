from __future__ import annotations

import pytest
from neffcache_hook.launcher.classify import classify

NCC_CODES = ["NCC_EOOM001", "NCC_EOOM002", "NCC_EXTP003", "NCC_EXSP001", "NCC_EARG001", "NCC_EVRF051", "NCC_EVRF059"]


@pytest.mark.parametrize("code", NCC_CODES)
def test_exit_70_with_a_compiler_code_is_deterministic(code: str) -> None:
    """UC-02"""
    assert classify(70, [b"", f"2026 ERROR [{code}] too big\n".encode()]) == ("deterministic", code)


@pytest.mark.parametrize(
    ("exit_code", "text", "expected"),
    [
        (0, b"", ("ok", None)),
        (0, b"warning: [NCC_EOOM001] mentioned only", ("ok", None)),
        (70, b"NCC_IXYZ902: internal", ("deterministic", "NCC_IXYZ902")),
        (70, b"", ("transient", None)),
        (70, b"something went wrong", ("transient", None)),
        (70, b"[F137] neuronx-cc was forcibly killed", ("transient", "F137")),
        (70, b"[NCC_EOOM001] then [F137] killed", ("transient", "F137")),
        (70, b"[F134] neuronx-cc terminated abnormally", ("transient", "F134")),
        (70, b"OSError: [Errno 28] No space left on device", ("transient", None)),
        (70, b"[NCC_EXTP003] write failed: No space left on device", ("transient", "NCC_EXTP003")),
        (70, b"Disk quota exceeded", ("transient", None)),
        (70, b"terminate called: std::bad_alloc", ("transient", None)),
        (70, b"fork: Cannot allocate memory", ("transient", None)),
        (137, b"", ("transient", None)),
        (137, b"[NCC_EOOM001]", ("transient", "NCC_EOOM001")),
        (134, b"", ("transient", None)),
        (139, b"", ("transient", None)),
        (143, b"", ("transient", None)),
        (130, b"", ("transient", None)),
        (126, b"", ("transient", None)),
        (127, b"", ("transient", None)),
        (1, b"Traceback (most recent call last)", ("transient", None)),
        (2, b"usage: neuronx-cc", ("transient", None)),
        (1, b"[NCC_EARG001] bad option", ("transient", "NCC_EARG001")),
    ],
)
def test_every_other_end(exit_code: int, text: bytes, expected: tuple[str, str | None]) -> None:
    """UC-02, UC-04: only what cannot succeed elsewhere may be told to other ranks."""
    assert classify(exit_code, [text]) == expected


def test_the_last_code_is_the_one_reported() -> None:
    assert classify(70, [b"[NCC_EARG001] first [NCC_EVRF051] last"]).code == "NCC_EVRF051"


def test_a_code_on_stdout_counts_too() -> None:
    assert classify(70, [b"[NCC_EOOM002] on stdout", b"noise on stderr"]) == ("deterministic", "NCC_EOOM002")


def test_a_path_that_looks_like_a_code_does_not_count() -> None:
    assert classify(70, [b"/tmp/MY_NCC_EOOM001x/file"]).kind == "transient"
