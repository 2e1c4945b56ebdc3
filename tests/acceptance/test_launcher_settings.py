"""A launcher whose environment makes no sense."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.compilers import FakeCompiler
from support.launchers import Host


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NEFFCACHE_LOCAL_MAX_BYTES", "infG"),
        ("NEFFCACHE_HOST_COMPILES", "²"),
        ("NEFFCACHE_TOKEN", "a\nb"),
        ("RANK", "²"),
    ],
)
def test_a_setting_that_makes_no_sense_costs_no_compile(tmp_path: Path, name: str, value: str) -> None:
    compiler = FakeCompiler(tmp_path / "compilers", stdout="compiled\n")
    done = Host(tmp_path, compiler, **{name: value}).compile()
    assert (done.exit_code, done.stdout, compiler.runs) == (0, b"compiled\n", 1)
    assert b"Traceback" not in done.stderr
    assert (name.encode() in done.stderr) == (name != "RANK")


def test_under_strict_such_a_setting_is_an_error_and_nothing_is_compiled(tmp_path: Path) -> None:
    compiler = FakeCompiler(tmp_path / "compilers")
    done = Host(tmp_path, compiler, NEFFCACHE_STRICT="1", NEFFCACHE_LOCAL_MAX_BYTES="infG").compile()
    assert (done.exit_code, compiler.runs) == (75, 0)
    assert b"NEFFCACHE_LOCAL_MAX_BYTES" in done.stderr
