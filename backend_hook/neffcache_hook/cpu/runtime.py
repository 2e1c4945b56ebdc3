"""Runs the NEFFs of the stand-in compiler: torch tensors in, torch tensors out.

Everything of IREE's is made on first use and made again in a forked child, so a parent that has only imported this
module (or even run a graph) may fork ranks. The device is IREE's synchronous one: no threads.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from neffcache_client.neff import check_neff, extract_members
from neffcache_hook.cpu.compiler import PROGRAM
from neffcache_hook.cpu.errors import NeffNotRunnable


class _Machine:
    """IREE's instance and device of this process."""

    def __init__(self) -> None:
        import iree.runtime as rt
        from iree.runtime import _binding

        # Objects that live as long as the process would be reported on stderr when it ends.
        _binding.disable_leak_checker()
        self.pid = os.getpid()
        self.rt: Any = rt
        self.instance: Any = rt.VmInstance()
        self.device: Any = rt.get_driver("local-sync").create_default_device()
        element = rt.HalElementType
        self.elements: dict[torch.dtype, Any] = {
            torch.float32: element.FLOAT_32,
            torch.float64: element.FLOAT_64,
            torch.float16: element.FLOAT_16,
            torch.bfloat16: element.BFLOAT_16,
            torch.int64: element.SINT_64,
            torch.int32: element.SINT_32,
            torch.int16: element.SINT_16,
            torch.int8: element.SINT_8,
            torch.uint8: element.UINT_8,
            torch.bool: element.BOOL_8,
        }


_machine: _Machine | None = None


def _this_machine() -> _Machine:
    global _machine
    if _machine is None or _machine.pid != os.getpid():
        _machine = _Machine()
    return _machine


class Program:
    """A loaded NEFF. Call it with as many tensors as the graph has inputs."""

    def __init__(self, path: str) -> None:
        """Check the container whole and load the program.

        Raises NeffInvalid for a damaged file, NeffNotRunnable for one that is not for this CPU, OSError.
        """
        check_neff(path)
        try:
            members = extract_members(path, (PROGRAM, "info.json"))
        except Exception as exc:
            raise NeffNotRunnable(f"{path} was not made by the CPU stand-in compiler: {exc}") from None
        self.info: dict[str, Any] = json.loads(members["info.json"])
        built_for, here = self.info.get("machine"), os.uname().machine
        if built_for != here:
            raise NeffNotRunnable(f"{path} was compiled for {built_for}, this machine is {here}")
        self._binary = members[PROGRAM]
        self._owner: _Machine | None = None
        self._load()

    def _load(self) -> None:
        m = _this_machine()
        module = m.rt.VmModule.copy_buffer(m.instance, self._binary)
        hal = m.rt.create_hal_module(m.instance, m.device)
        self._context = m.rt.VmContext(m.instance, modules=[hal, module])
        self._function = module.lookup_function("main")
        self._owner = m

    def __call__(
        self, inputs: Sequence[torch.Tensor], results: Sequence[tuple[tuple[int, ...], torch.dtype]]
    ) -> list[torch.Tensor]:
        """Run. `results` are the shapes and dtypes to give back; outputs share memory with IREE's buffers."""
        if self._owner is not _this_machine():
            self._load()
        m = self._owner
        assert m is not None
        args = m.rt.VmVariantList(len(inputs))
        for tensor in inputs:
            args.push_ref(_to_buffer(m, tensor))
        out = m.rt.VmVariantList(len(results))
        self._context.invoke(self._function, args, out)
        return [
            _to_tensor(out.get_as_object(i, m.rt.HalBufferView), shape, dtype)
            for i, (shape, dtype) in enumerate(results)
        ]


def _to_buffer(m: _Machine, tensor: torch.Tensor) -> Any:
    element = m.elements.get(tensor.dtype)
    if element is None:
        raise NeffNotRunnable(f"the CPU stand-in does not run {tensor.dtype} inputs")
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    # A copy, on purpose: IREE wants aligned memory that outlives the call, and a slice of a tensor promises neither.
    buffer = m.device.allocator.allocate_buffer_copy(
        memory_type=m.rt.MemoryType.DEVICE_LOCAL | m.rt.MemoryType.HOST_VISIBLE,
        allowed_usage=m.rt.BufferUsage.DEFAULT | m.rt.BufferUsage.MAPPING,
        device=m.device,
        buffer=raw,
    )
    return m.rt.HalBufferView(buffer, list(tensor.shape), element).ref


def _to_tensor(view: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = view.byte_length
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    if size != math.prod(shape) * dtype.itemsize:
        raise NeffNotRunnable(f"the program returned {size} bytes for a tensor of {tuple(shape)} {dtype}")
    # The array keeps the mapping, and with it IREE's buffer, alive for as long as the tensor lives.
    raw = torch.from_numpy(view.map().asarray([size], np.dtype(np.uint8)))
    return raw.view(dtype).reshape(shape)
