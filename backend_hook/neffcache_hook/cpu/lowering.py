"""FX graph -> StableHLO bytecode, through torch-mlir.

The bytes are the same in every process that lowers the same graph from the same source lines: the MLIR context is
made anew for each graph and works without threads. They carry source locations, as TorchNeuron's do, so the same
graph from another line or checkout gives other bytes and the same `op_digest`.
"""

from __future__ import annotations

import hashlib
import io
import re
import time
from typing import Any

import torch
from torch.fx import GraphModule, Node

from neffcache_hook.cpu.errors import UnsupportedGraph

_PASSES = (
    "builtin.module(func.func(torch-match-quantized-custom-ops),"
    "torchdynamo-export-to-torch-backend-pipeline{extra-library=})",
    "builtin.module(torch-backend-to-stablehlo-backend-pipeline{allow-non-finites=true})",
)
_OPERATION = re.compile(r"(?:'(?:torch\.)?|\"torch\.|torch\.operator \")((?:aten|prims|torchvision|[a-z_]\w*)\.[\w.]+)")
_MAX_DIAGNOSTIC = 300


class Lowered:
    """A graph as the compiler is given it, and how to put its outputs together again."""

    __slots__ = ("bytecode", "op_digest", "outputs", "results", "seconds")

    def __init__(self, outputs: list[tuple[str, Any]], results: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
        self.outputs = outputs
        """One per output of the graph: ("result", index), ("input", index) or ("constant", value)."""
        self.results = results
        """Shape and dtype of what the compiled function returns."""
        self.bytecode = b""
        """Empty when nothing is left to compile: every output is an input or a constant."""
        self.op_digest = ""
        """SHA-256 of the graph without its source locations, 64 hex."""
        self.seconds = 0.0


def lower(gm: GraphModule) -> Lowered:
    """Lower an ATen graph with static shapes as AOTAutograd hands it over. `gm` is left as it was.

    Raises UnsupportedGraph naming the operation that has no lowering.
    """
    started = time.perf_counter()
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    _reject_dynamic(graph)
    own = GraphModule(gm, graph)
    lowered = _take_outputs_apart(own)
    if lowered.results:
        lowered.bytecode, lowered.op_digest = _to_stablehlo(own)
    lowered.seconds = time.perf_counter() - started
    return lowered


def _reject_dynamic(graph: torch.fx.Graph) -> None:
    for node in graph.nodes:
        value = node.meta.get("val")
        sizes = [value] if isinstance(value, torch.SymInt) else list(getattr(value, "shape", ()))
        if any(isinstance(s, torch.SymInt) and not s.node.is_constant() for s in sizes):
            raise UnsupportedGraph(
                f"{_place(node)} has a dynamic shape, which Neuron graphs cannot have: "
                "use torch.compile(..., dynamic=False) and inputs of fixed sizes"
            )
        if node.op == "placeholder" and not isinstance(value, torch.Tensor):
            raise UnsupportedGraph(f"input {node.name} is {type(value).__name__}, not a tensor")


def _take_outputs_apart(gm: GraphModule) -> Lowered:
    """Leave only computed tensors as outputs: torch-mlir has no lowering for None, and passing an input through
    would make the compiled function copy it and lose its identity."""
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    output = next(n for n in gm.graph.nodes if n.op == "output")
    values = output.args[0] if isinstance(output.args[0], (tuple, list)) else [output.args[0]]
    kept: list[Node] = []
    plan: list[tuple[str, Any]] = []
    for value in values:
        if not isinstance(value, Node):
            plan.append(("constant", value))
        elif value.op == "placeholder":
            plan.append(("input", inputs.index(value)))
        else:
            if value not in kept:
                kept.append(value)
            plan.append(("result", kept.index(value)))
    output.args = (tuple(kept),)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return Lowered(plan, [(tuple(int(s) for s in n.meta["val"].shape), n.meta["val"].dtype) for n in kept])


def _to_stablehlo(gm: GraphModule) -> tuple[bytes, str]:
    from torch_mlir import ir
    from torch_mlir.dialects import torch as torch_dialect
    from torch_mlir.extras.fx_importer import FxImporter
    from torch_mlir.passmanager import PassManager

    context = ir.Context()
    # Threads would make the order of constants a matter of luck, and must not exist in a process that forks ranks.
    context.enable_multithreading(False)
    context.emit_error_diagnostics = True
    torch_dialect.register_dialect(context)
    importer = FxImporter(context=context)
    try:
        importer.import_stateless_graph(gm.graph, func_name="main")
        module = importer.module.operation
        for pipeline in _PASSES:
            PassManager.parse(pipeline, context=context).run(module)
    except Exception as exc:  # torch-mlir raises assertion, type, MLIR and not-implemented errors alike
        raise _unsupported(gm, exc) from None
    raw = io.BytesIO()
    module.write_bytecode(raw)
    text = module.get_asm(enable_debug_info=False)
    return raw.getvalue(), hashlib.sha256(text.encode()).hexdigest()


def _unsupported(gm: GraphModule, exc: Exception) -> UnsupportedGraph:
    diagnostics = " ".join(str(exc).split())
    names = [m for m in _OPERATION.findall(diagnostics) if not m.startswith(("func.", "builtin."))]
    name = names[0] if names else ""
    node = next((n for n in gm.graph.nodes if name and _aten_name(n).startswith(name)), None)
    if name:
        where = f" ({_place(node)})" if node is not None else ""
        return UnsupportedGraph(f"the CPU stand-in cannot lower {name}{where}: torch-mlir has no StableHLO form for it")
    return UnsupportedGraph(f"the CPU stand-in cannot lower this graph: {diagnostics[:_MAX_DIAGNOSTIC]}")


def _aten_name(node: Node) -> str:
    return str(node.target).removeprefix("torch.ops.") if node.op == "call_function" else ""


def _place(node: Node) -> str:
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return f"{node.name}, {frames[-1][0]}:{frames[-1][1]}" if frames else str(node.name)
