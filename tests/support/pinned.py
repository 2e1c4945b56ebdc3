"""The pinned corpus: graphs in tests/corpus and the digests they had under this recipe.

`python tests/support/pinned.py` writes the digests anew, `--graphs` the graphs as well. Do that only together
with a new recipe: every key that was ever stored depends on them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

CORPUS = Path(__file__).resolve().parents[1] / "corpus"
DIGESTS = CORPUS / "digests.json"

PROGRAMS = (
    "matmul_bf16",
    "conv",
    "while",
    "sort",
    "reduce_window",
    "custom_call",
    "attention",
    "constants",
    "large_constant",
    "complex",
    "donation",
    "mlp_grad",
    "all_reduce_groups",
    "all_gather",
    "permute",
    "sharded_matmul",
)
BYTECODE = ("conv", "while", "mlp_grad")
"""Programs of jax whose bytecode every binding can read: none of them has a custom call or a collective."""


def graphs() -> list[Path]:
    """The files of the corpus."""
    return sorted(path for path in CORPUS.iterdir() if path != DIGESTS)


def digests() -> dict[str, str]:
    """File name -> digest, as pinned."""
    found: dict[str, str] = json.loads(DIGESTS.read_text())["digests"]
    return found


def _write_graphs() -> None:
    from support.graphs import generate

    checkout = str(Path(__file__).resolve().parents[2]).encode()
    # Of the same length, so that protobuf's lengths stay true.
    stand_in = b"/home/user".ljust(len(checkout), b"-")[: len(checkout)]
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder), *PROGRAMS)
        _write_models(Path(folder))
        for path in sorted(Path(folder).iterdir()):
            if path.suffix != ".mlirbc" or path.stem in BYTECODE or path.stem.startswith("torch_"):
                (CORPUS / path.name).write_bytes(path.read_bytes().replace(checkout, stand_in))


def _write_models(folder: Path) -> None:
    """What the demo's models lower to, as torch-mlir writes it."""
    from neffcache_hook.cpu.models import MODELS, run

    from support.lowered import Recorder

    for name, case in MODELS.items():
        recorder = Recorder()
        run(case, recorder)
        for number, graph in enumerate(recorder.graphs):
            (folder / f"torch_{name}_{number}.mlirbc").write_bytes(graph)


def _write_digests() -> None:
    from neffcache_hook.key import compute, ir

    found = {path.name: ir.canonicalise(path.read_bytes())["digest"] for path in graphs()}
    pinned = {"recipe": compute.RECIPE, "canonicalisers": list(compute.CANONICALISERS), "digests": found}
    DIGESTS.write_text(json.dumps(pinned, indent=1) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    if "--graphs" in sys.argv[1:]:
        _write_graphs()
    _write_digests()
