"""`python -m neffcache_hook.key.agreement` says what each installed MLIR binding makes of one module, in JSON.

A process of its own: bindings take memory, print at exit, and do not all live in one process happily.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys

SAMPLE = b"""
module @sample attributes {mhlo.num_partitions = 1 : i32} {
  func.func public @main(%arg0: tensor<4x8xf32> loc("x"), %arg1: tensor<8x2xbf16>) -> (tensor<4x2xf32>) {
    %cst = stablehlo.constant dense<[1.5, -0.0, 0x7FC00000, 1.0e-30]> : tensor<4xf32>
    %0 = stablehlo.convert %arg1 : (tensor<8x2xbf16>) -> tensor<8x2xf32>
    %1 = stablehlo.dot_general %arg0, %0, contracting_dims = [1] x [0], precision = [DEFAULT, DEFAULT]
      : (tensor<4x8xf32>, tensor<8x2xf32>) -> tensor<4x2xf32>
    %2 = stablehlo.broadcast_in_dim %cst, dims = [0] : (tensor<4xf32>) -> tensor<4x2xf32>
    %3 = stablehlo.add %1, %2 : tensor<4x2xf32> loc("train.py":12:3)
    return %3 : tensor<4x2xf32>
  }
}
"""


def digests() -> dict[str, str | None]:
    """Each known binding's digest of the sample, None for one that is not installed or cannot read it."""
    from neffcache_hook.key import mlir, nki

    found: dict[str, str | None] = {}
    for name in mlir.BINDINGS:
        try:
            canonical = mlir.canonicalise(SAMPLE, nki.References(), {}, only=name)
            found[name] = hashlib.sha256(canonical).hexdigest()
        except (ImportError, ValueError):
            found[name] = None
    return found


def main() -> None:
    """Print, and leave before any binding's exit handlers."""
    line = json.dumps(digests())
    sys.stdout.write(f"\n{line}\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
