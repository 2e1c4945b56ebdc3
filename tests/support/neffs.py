"""NEFFs for tests: small ones made here, and the two real ones where the checkout's neighbour has them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from neffcache_client.neff import HEADER_SIZE, pack_neff

REAL_DIR = Path(__file__).resolve().parents[3] / "shared" / "neff"
REAL_VERSION = "2.23.6484.0+3b612583"


def make_neff(
    *, version: str = "2.23.6484.0+3b612583", target: str = "cayman", payload: bytes = b"program", uuid: int = 0
) -> bytes:
    """A valid container whose `sg00/program.bin` is `payload`. Equal arguments give equal bytes."""
    return pack_neff(
        {
            "info.json": json.dumps({"tool_version": version, "name": "file.neff", "num_tpb": 1}).encode(),
            "kelf-0.json": json.dumps({"target": target}).encode(),
            "sg00/program.bin": payload,
        },
        uuid=uuid.to_bytes(16, "big"),
    )


def neff_of_size(size: int, **kwargs: object) -> bytes:
    """A valid container of at least `size` bytes, incompressible inside; off by less than 0.1 % and 1 KiB."""
    room = max(0, size - HEADER_SIZE - 600)
    return make_neff(payload=os.urandom(room), **kwargs)  # type: ignore[arg-type]


def real_neff(name: str) -> Path:
    """Path of `matmul_small.neff` or `matmul_large.neff`, built by neuronx-cc 2.23 for trn2.

    They are other people's test data and not in this repository; CI lays them beside it.
    """
    path = REAL_DIR / name
    if not path.is_file():
        pytest.skip(f"the real NEFF {name} is not beside this checkout (../shared/neff)")
    return path
