"""docs/failure-modes.md and the tests are the same list."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    line.rstrip(" |").rpartition("| ")[2].strip("`")
    for line in (ROOT / "docs" / "failure-modes.md").read_text().splitlines()
    if line.startswith("| ") and line.endswith("` |")
]
TESTS = {
    f"{path.relative_to(ROOT)}::{name}"
    for path in ROOT.glob("tests/*/test_*.py")
    for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)
}
FAULTS = {test for test in TESTS if test.startswith("tests/faults/test_faults_") and Path(__file__).name not in test}


def test_every_row_names_one_test_that_exists() -> None:
    names = {test.partition("::")[2] for test in FAULTS}
    assert [row for row in ROWS if row not in (TESTS if "::" in row else names)] == []
    assert len(ROWS) == len(set(ROWS)) >= 40


def test_every_fault_has_a_row() -> None:
    assert sorted(test for test in FAULTS if test.partition("::")[2] not in ROWS) == []
