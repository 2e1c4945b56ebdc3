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
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from neffcache_hook.cpu.errors import UnsupportedGraph

_PASSES = (
    "builtin.module(func.func(torch-match-quantized-custom-ops),"
    "torchdynamo-export-to-torch-backend-pipeline{extra-library=})",
    "builtin.module(torch-backend-to-stablehlo-backend-pipeline{allow-non-finites=true})",
)
_OPERATION = (
    re.compile(r'name = "torch\.([\w.]+)"'),
    re.compile(r"operation 'torch\.([\w.]+)'"),
    re.compile(r"'((?:stablehlo|chlo|torch)\.[\w.]+)'"),
)
_MAX_DIAGNOSTIC = 300


class Result(NamedTuple):
    """One tensor that the compiled function returns."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """As eager would have it; the program itself returns contiguous memory."""
    dtype: torch.dtype


class Lowered:
    """A graph as the compiler is given it, and how to put its outputs together again."""

    __slots__ = ("bytecode", "op_digest", "outputs", "results", "seconds")

    def __init__(self, outputs: list[tuple[str, Any]], results: list[Result]) -> None:
        self.outputs = outputs
        """One per output of the graph: ("result", index), ("input", index) or ("constant", value)."""
        self.results = results
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
    for node in graph.nodes:
        _reject_unsupported(node)
    own = GraphModule(gm, graph)
    lowered = _take_outputs_apart(own)
    if lowered.results:
        lowered.bytecode, lowered.op_digest = _to_stablehlo(own)
    lowered.seconds = time.perf_counter() - started
    return lowered


def _reject_unsupported(node: Node) -> None:
    """What torch-mlir or IREE would take and get wrong, or would refuse without a word on where it came from."""
    value = node.meta.get("val")
    sizes = [value] if isinstance(value, torch.SymInt) else list(getattr(value, "shape", ()))
    if any(isinstance(s, torch.SymInt) and not s.node.is_constant() for s in sizes):
        raise UnsupportedGraph(
            f"{node.name}{_place(node)} has a dynamic shape, which Neuron graphs cannot have: "
            "use torch.compile(..., dynamic=False) and inputs of fixed sizes"
        )
    if node.op == "placeholder" and not isinstance(value, torch.Tensor):
        raise UnsupportedGraph(f"input {node.name} is {type(value).__name__}, not a tensor")
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        inner = next((a for a in node.args if isinstance(a, torch._ops.OpOverload)), "")
        raise UnsupportedGraph(f"the CPU stand-in cannot lower {node.target} {inner}{_place(node)}")
    if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
        # Compiled, it would give the same numbers at every call.
        raise UnsupportedGraph(
            f"the CPU stand-in cannot lower {node.target}{_place(node)}: it has no random numbers "
            "(for dropout: set its probability to 0)"
        )


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
    return Lowered(plan, [_result(n.meta["val"]) for n in kept])


def _result(value: torch.Tensor) -> Result:
    return Result(tuple(map(int, value.shape)), tuple(map(int, value.stride())), value.dtype)


def _to_stablehlo(gm: GraphModule) -> tuple[bytes, str]:
    from torch_mlir import ir
    from torch_mlir.dialects import torch as torch_dialect
    from torch_mlir.extras.fx_importer import FxImporter
    from torch_mlir.passmanager import PassManager

    context = ir.Context()
    # Threads would make the order of constants a matter of luck, and must not exist in a process that forks ranks.
    context.enable_multithreading(False)
    torch_dialect.register_dialect(context)
    errors: list[tuple[str, str]] = []
    # Otherwise MLIR prints them, and a pass that reports an error without failing goes unnoticed.
    context.emit_error_diagnostics = True

    def note(diagnostic: Any) -> bool:
        if diagnostic.severity == ir.DiagnosticSeverity.ERROR:
            errors.append((str(diagnostic.location), str(diagnostic.message)))
        return True

    context.attach_diagnostic_handler(note)
    importer = FxImporter(context=context)
    try:
        importer.import_stateless_graph(gm.graph, func_name="main")
        module = importer.module.operation
        for pipeline in _PASSES:
            PassManager.parse(pipeline, context=context).run(module)
            if errors:
                raise _unsupported(errors)
    except UnsupportedGraph:
        raise
    except Exception as exc:  # torch-mlir raises assertion, type, MLIR and not-implemented errors alike
        raise _unsupported(errors or [("", str(exc))]) from None
    raw = io.BytesIO()
    module.write_bytecode(raw)
    text = module.get_asm(enable_debug_info=False)
    return raw.getvalue(), hashlib.sha256(text.encode()).hexdigest()


def _unsupported(errors: list[tuple[str, str]]) -> UnsupportedGraph:
    location, message = errors[0]
    message = " ".join(message.split())
    file = re.search(r'"([^"]+)":(\d+)', location)
    where = f" ({file.group(1)}:{file.group(2)})" if file else ""
    for pattern in _OPERATION:
        if found := pattern.search(message):
            what = found.group(1)
            if pattern is not _OPERATION[-1]:
                return UnsupportedGraph(
                    f"the CPU stand-in cannot lower {what}{where}: torch-mlir has no StableHLO form for it"
                )
            return UnsupportedGraph(f"the CPU stand-in cannot lower {what}{where}: {message[:_MAX_DIAGNOSTIC]}")
    return UnsupportedGraph(f"the CPU stand-in cannot lower this graph{where}: {message[:_MAX_DIAGNOSTIC]}")


def _place(node: Node) -> str:
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return f" ({frames[-1][0]}:{frames[-1][1]})" if frames else ""
