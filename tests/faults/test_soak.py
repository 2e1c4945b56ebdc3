"""A slice of benchmarks/soak.py: a fleet under a killer."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest

SOAK = Path(__file__).resolve().parents[2] / "benchmarks" / "soak.py"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("soak", SOAK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "soak", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_minute_under_a_killer(tmp_path: Path, benchmark: ModuleType) -> None:
    """UC-01, UC-11, UC-15: no wrong bytes, no failed request, no lost artifact, no compile beyond the kills."""
    figures = benchmark.soak(tmp_path, seconds=60.0, clients=24, graphs=40, seed=7)
    assert figures.kept, asdict(figures)
    assert figures.requests > 50
    assert sum(figures.kills.values()) > 10
