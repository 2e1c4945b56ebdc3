"""Runs the NEFFs of the stand-in compiler: torch tensors in, torch tensors out.

The device is IREE's synchronous one, made when the first program is loaded; it keeps one thread. A process may fork
all the same: what the child inherits is given up there, and programs are loaded again when the child runs them.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from neffcache_client.errors import NeffInvalid
from neffcache_client.neff import check_neff, extract_members

from neffcache_hook.cpu.compiler import PROGRAM
from neffcache_hook.cpu.errors import NeffNotRunnable
from neffcache_hook.cpu.lowering import Result


class _Machine:
    """IREE's instance and device of this process."""

    def __init__(self) -> None:
        import iree.runtime as rt
        from iree.runtime import _binding

        # Objects that live as long as the process would be reported on stderr when it ends.
        _binding.disable_leak_checker()
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
_programs: weakref.WeakSet[Program] = weakref.WeakSet()


def _this_machine() -> _Machine:
    global _machine
    if _machine is None:
        _machine = _Machine()
    return _machine


def _give_up_inherited() -> None:
    """Leak, in a forked child, what the parent made: destroying it would wait for a thread that was not forked."""
    global _machine
    for thing in (_machine, *(p.loaded for p in _programs)):
        if thing is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    _machine = None
    for program in _programs:
        program.loaded = None


os.register_at_fork(after_in_child=_give_up_inherited)


class _Loaded:
    """A program in IREE's hands."""

    def __init__(self, binary: bytes) -> None:
        self.machine = m = _this_machine()
        try:
            module = m.rt.VmModule.copy_buffer(m.instance, binary)
        except (RuntimeError, ValueError) as exc:
            raise NeffNotRunnable(f"the program does not load: {str(exc).strip().splitlines()[0]}") from None
        hal = m.rt.create_hal_module(m.instance, m.device)
        self.context: Any = m.rt.VmContext(m.instance, modules=[hal, module])
        self.function: Any = module.lookup_function("main")


class Program:
    """A loaded NEFF. Call it with as many tensors as the graph has inputs."""

    def __init__(self, path: str) -> None:
        """Check the container whole and load the program.

        Raises NeffInvalid for a damaged file, NeffNotRunnable for one that is not for this CPU, OSError.
        """
        check_neff(path)
        try:
            members = extract_members(path, (PROGRAM, "info.json"))
        except NeffInvalid as exc:
            raise NeffNotRunnable(f"{path} was not made by the CPU stand-in compiler: {exc}") from None
        self.info: dict[str, Any] = json.loads(members["info.json"])
        built_for, here = self.info.get("machine"), os.uname().machine
        if built_for != here:
            raise NeffNotRunnable(f"{path} was compiled for {built_for}, this machine is {here}")
        self._binary = members[PROGRAM]
        self.loaded: _Loaded | None = _Loaded(self._binary)
        _programs.add(self)

    def __call__(self, inputs: Sequence[torch.Tensor], results: Sequence[Result]) -> list[torch.Tensor]:
        """Run. `results` says what the program returns; the tensors share memory with IREE's buffers.

        Raises NeffNotRunnable when the program does not fit the inputs or results.
        """
        loaded = self.loaded or _Loaded(self._binary)
        self.loaded, m = loaded, loaded.machine
        args = m.rt.VmVariantList(len(inputs))
        for tensor in inputs:
            args.push_ref(_to_buffer(m, tensor))
        out = m.rt.VmVariantList(len(results))
        try:
            loaded.context.invoke(loaded.function, args, out)
        except (RuntimeError, ValueError) as exc:
            raise NeffNotRunnable(f"the program failed: {str(exc).strip().splitlines()[0]}") from None
        return [_to_tensor(out.get_as_object(i, m.rt.HalBufferView), result) for i, result in enumerate(results)]


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


def _to_tensor(view: Any, result: Result) -> torch.Tensor:
    size = view.byte_length
    if size != math.prod(result.shape) * result.dtype.itemsize:
        raise NeffNotRunnable(f"the program returned {size} bytes for a tensor of {result.shape} {result.dtype}")
    if size == 0:
        return torch.empty(result.shape, dtype=result.dtype)
    # The array keeps the mapping, and with it IREE's buffer, alive for as long as the tensor lives.
    raw = torch.from_numpy(view.map().asarray([size], np.dtype(np.uint8)))
    tensor = raw.view(result.dtype).reshape(result.shape)
    if tensor.stride() == result.stride:
        return tensor
    return torch.empty_strided(result.shape, result.stride, dtype=result.dtype).copy_(tensor)
