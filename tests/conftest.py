"""Fixtures that every test gets."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

_OURS = ("NEFFCACHE_", "TORCH_NEURONX_", "NEURON_")
_JOBS = ("RANK", "LOCAL_RANK", "SLURM_JOB_ID", "SLURM_PROCID", "TORCHELASTIC_RUN_ID", "XLA_FLAGS")


@pytest.fixture(autouse=True)
def clean_environment() -> Iterator[None]:
    """No test sees the developer's own cache settings, and none leaks its own."""
    saved = dict(os.environ)
    for name in list(os.environ):
        if name.startswith(_OURS) or name in _JOBS:
            del os.environ[name]
    yield
    os.environ.clear()
    os.environ.update(saved)
