"""What the CPU toolchain lowers a torch model to, without compiling it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from functorch.compile import make_boxed_func
from neffcache_hook.cpu.backend import _decompositions
from neffcache_hook.cpu.lowering import lower
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule
from torch.nn.attention import SDPBackend, sdpa_kernel


class Recorder:
    """A Dynamo backend that lowers each graph, keeps the bytecode, and runs the graph eagerly."""

    def __init__(self) -> None:
        self.graphs: list[bytes] = []

    def __call__(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with sdpa_kernel(SDPBackend.MATH):
            backend: Callable[..., Any] = aot_autograd(fw_compiler=self._record, decompositions=_decompositions())
            return backend(gm, inputs)  # type: ignore[no-any-return]

    def _record(self, gm: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        self.graphs.append(lower(gm).bytecode)
        return make_boxed_func(gm.forward)
