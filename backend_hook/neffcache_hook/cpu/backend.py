"""`torch.compile(backend="neuron")` on a machine without Trainium, doing what TorchNeuron does there.

AOTAutograd -> FX -> StableHLO bytecode -> the folder of NEFFs -> `neuronx-cc` found on PATH -> run. Forward and
backward are two graphs, each with a NEFF of its own. Where torch_neuronx is installed, its own backend is used.

In ranks forked from one process: set OPENBLAS_NUM_THREADS=1 before numpy is imported (it starts a pool otherwise),
call `torch.set_num_threads(1)` and `preload()` in the parent, and compile in the children only. Importing and
lowering start no threads; running a graph starts one of IREE's, in the process that runs it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from neffcache_client.errors import NeffInvalid
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule
from torch.nn.attention import SDPBackend, sdpa_kernel

from neffcache_hook.cpu import neff_folder
from neffcache_hook.cpu.errors import CpuToolchainError
from neffcache_hook.cpu.lowering import Lowered, lower
from neffcache_hook.cpu.runtime import Program


class GraphRecord:
    """What became of one graph, for whoever measures."""

    __slots__ = ("from_folder", "key", "load_seconds", "lower_seconds", "obtain_seconds", "op_digest")

    def __init__(self, lowered: Lowered, key: str, *, from_folder: bool, obtained: float, loaded: float) -> None:
        self.key = key
        """Name of the NEFF in the vendor's folder, 32 hex."""
        self.op_digest = lowered.op_digest
        """The graph without locations: what ranks have in common, 64 hex."""
        self.from_folder = from_folder
        self.lower_seconds = lowered.seconds
        self.obtain_seconds = obtained
        """Folder, lock, compiler or launcher: everything between the bytecode and the NEFF file."""
        self.load_seconds = loaded


graph_log: list[GraphRecord] = []
"""One record per graph compiled in this process, oldest first; clear it as you like."""


def neuron(gm: GraphModule, example_inputs: Sequence[Any], **_options: Any) -> Callable[..., Any]:
    """The Dynamo backend. Use `torch.compile(model, backend="neuron", dynamic=False)`.

    Raises UnsupportedGraph, CompilerFailed or another CpuToolchainError, which Dynamo wraps with its own words.
    """
    vendor = _vendor_backend()
    if vendor is not None:
        run: Callable[..., Any] = vendor(gm, example_inputs, **_options)
        return run
    # The fused attention kernels, above all their backward, have no lowering; their math form has.
    with sdpa_kernel(SDPBackend.MATH):
        backend = aot_autograd(fw_compiler=_compile_graph, decompositions=_decompositions())
        return backend(gm, example_inputs)


def preload() -> None:
    """Import everything that compiling and running need, so that forked ranks find it there. Starts no thread."""
    for name in ("iree.runtime", "torch_mlir.extras.fx_importer", "torch_mlir.passmanager"):
        importlib.import_module(name)

    _decompositions()


def _vendor_backend() -> Callable[..., Any] | None:
    """TorchNeuron's own backend when it is installed: the stand-in must never take its place."""
    from importlib.metadata import entry_points
    from importlib.util import find_spec

    if find_spec("torch_neuronx") is None:
        return None
    for point in entry_points(group="torch_dynamo_backends", name="neuron"):
        if not point.value.startswith("neffcache_hook."):
            backend: Callable[..., Any] = point.load()
            return backend
    raise CpuToolchainError(
        "torch_neuronx is installed, so neffcache's CPU stand-in stays out of the way, but torch_neuronx registers "
        'no Dynamo backend "neuron". Update torch_neuronx, or uninstall it to compile for the CPU.'
    )


def _compile_graph(gm: GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
    lowered = lower(gm)
    if not lowered.bytecode:
        return _boxed(lambda inputs: _put_together(lowered, inputs, ()))
    program = _load(lowered)

    def run(inputs: list[torch.Tensor]) -> list[Any]:
        return _put_together(lowered, inputs, program(inputs, lowered.results))

    return _boxed(run)


def _load(lowered: Lowered) -> Program:
    try:
        return _obtain_and_load(lowered)
    except NeffInvalid:
        # The vendor's folder takes any non-empty file, so a NEFF cut short by a full disk would stay there for good.
        path = neff_folder.neff_path(neff_folder.file_key(lowered.op_digest, lowered.bytecode))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return _obtain_and_load(lowered)


def _obtain_and_load(lowered: Lowered) -> Program:
    started = time.perf_counter()
    with neff_folder.obtain(lowered.op_digest, lowered.bytecode) as neff:
        obtained = time.perf_counter()
        program = Program(neff.path)
        loaded = time.perf_counter()
    graph_log.append(
        GraphRecord(
            lowered,
            neff.key,
            from_folder=neff.from_folder,
            obtained=obtained - started,
            loaded=loaded - obtained,
        )
    )
    return program


def _put_together(lowered: Lowered, inputs: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    sources = {"result": results, "input": inputs}
    return [value if kind == "constant" else sources[kind][value] for kind, value in lowered.outputs]


def _boxed(run: Callable[[list[torch.Tensor]], list[Any]]) -> Callable[[list[torch.Tensor]], list[Any]]:
    """AOTAutograd's calling convention in which the callee owns the list, so that it may free inputs early."""

    def call(inputs: list[torch.Tensor]) -> list[Any]:
        out = run(inputs)
        inputs.clear()
        return out

    call._boxed_call = True  # type: ignore[attr-defined]  # the mark that AOTAutograd looks for
    return call


@functools.cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    from torch._decomp import get_decompositions
    from torch_mlir.extras.fx_decomp_util import get_decomposition_table

    table: dict[Any, Callable[..., Any]] = dict(get_decomposition_table())
    table.update(get_decompositions(_EXTRA))
    return table


_aten = torch.ops.aten
_EXTRA = [
    _aten.embedding_dense_backward,
    _aten.nll_loss_forward,
    _aten.nll_loss_backward,
    _aten.cudnn_batch_norm,
    _aten.native_batch_norm,
    _aten._native_batch_norm_legit_no_training,
    _aten.native_batch_norm_backward,
    _aten.native_layer_norm_backward,
    _aten.native_dropout_backward,
    _aten.silu,
    _aten.silu_backward,
    _aten._softmax_backward_data,
    _aten._log_softmax_backward_data,
    _aten.threshold_backward,
]
