"""The corpus of tests/support/graphs.py, generated once for a test run."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.graphs import generate

_generated: list[Path] = []


def corpus(factory: pytest.TempPathFactory) -> Path:
    """The folder that holds it."""
    if not _generated:
        folder = factory.mktemp("corpus")
        generate(folder)
        _generated.append(folder)
    return _generated[0]
