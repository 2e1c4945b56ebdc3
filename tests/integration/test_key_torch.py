"""Keys of what torch lowers to: the demo's models and constants in the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from neffcache_hook.cpu.models import MODELS, run
from neffcache_hook.key import ir, mlir, nki
from support.lowered import Recorder


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def lowered(function: Callable[..., Any], *inputs: torch.Tensor) -> bytes:
    recorder = Recorder()
    torch.compile(function, backend=recorder, dynamic=False, fullgraph=True)(*inputs)
    (graph,) = recorder.graphs
    return graph


@pytest.mark.parametrize("name", MODELS)
def test_the_demos_models_are_read_whole_and_alike_by_both_bindings(name: str) -> None:
    recorder = Recorder()
    run(MODELS[name], recorder)
    assert len(recorder.graphs) == (2 if MODELS[name].train else 1)
    for graph in recorder.graphs:
        found = ir.canonicalise(graph)
        assert found["kind"] == "mlir", found["why"]
        assert found["ops"]["func.func"] == 1
        forms = {mlir.canonicalise(graph, nki.References(), {}, binding) for binding in ("torch_mlir", "iree")}
        assert len(forms) == 1


def test_a_model_from_another_line_is_the_same_graph() -> None:
    """UC-05: the bytecode moves with a line inserted above, the digest does not."""
    source = "import torch\n{}def step(x):\n    return torch.tanh(x @ x) * 2.5\n"
    graphs = []
    for name, above in (("/a/train.py", ""), ("/b/venv/train.py", "\n" * 10)):
        scope: dict[str, Any] = {}
        exec(compile(source.format(above), name, "exec"), scope)
        graphs.append(lowered(scope["step"], torch.ones(4, 4)))
        torch._dynamo.reset()
    one, other = (ir.canonicalise(graph) for graph in graphs)
    assert one["kind"] == other["kind"] == "mlir"
    assert one["digest"] == other["digest"]


def test_weights_inside_the_graph_that_differ_in_one_element_are_another_graph() -> None:
    """torch-mlir puts them into a resource or a constant, depending on their size."""
    for size in (4, 3000):
        digests = set()
        for element in (None, size // 2):
            weights = torch.arange(size, dtype=torch.float32)
            if element is not None:
                weights[element] += 0.5
            values = weights.tolist()
            found = ir.canonicalise(lowered(lambda x, v=tuple(values): x * torch.tensor(v), torch.ones(size)))
            assert found["kind"] == "mlir", found["why"]
            digests.add(found["digest"])
            torch._dynamo.reset()
        assert len(digests) == 2, size
