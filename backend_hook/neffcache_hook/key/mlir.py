"""StableHLO, text or bytecode, in a canonical form.

The form is MLIR's generic text without locations and without the module's own name: values are numbered in order,
attributes are sorted, large constants are printed whole and floats so that they read back to the same bits. It
does not depend on how the module was written down, and torch-mlir, IREE and jaxlib print the same; bytecode would
need a second round of printing and parsing, since it numbers attributes in the order in which a process met them.
Dialects that a binding does not know are never let through: the next binding is asked, and in the end the file is
hashed raw.
"""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Callable
from typing import Any

from neffcache_hook.key.nki import References, canonical_config

NAME = "mlir-1"
"""Changes whenever the canonical form does, together with the recipe."""

BYTECODE_MAGIC = b"ML\xefR"

_OP = re.compile(r'^ *(?:%[^"=]* = )?"([A-Za-z_][\w$.-]*)"', re.MULTILINE)
_CONFIG = re.compile(r'backend_config = "((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(rb"\\([0-9A-Fa-f]{2}|.)", re.DOTALL)


_CUSTOM_CALL_DEFAULTS = {
    "api_version": "1 : i32",
    "called_computations": "[]",
    "has_side_effect": "false",
    "output_operand_aliases": "[]",
}


class NoBinding(ImportError):
    """No MLIR binding that knows StableHLO can be imported."""


class NotMlir(ValueError):
    """No binding can parse the bytes."""


def _torch_mlir() -> tuple[Any, Any]:
    from torch_mlir import ir
    from torch_mlir._mlir_libs import _stablehlo

    context = ir.Context()
    _stablehlo.register_dialect(context, True)
    return ir, context


def _iree() -> tuple[Any, Any]:
    from iree.compiler import ir

    return ir, ir.Context()


def _jaxlib() -> tuple[Any, Any]:
    from jaxlib.mlir import ir
    from jaxlib.mlir._mlir_libs import _chlo, _jax_mlir_ext, _mlirHlo, _sdy, _stablehlo

    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    context = ir.Context()
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    _stablehlo.register_dialect(context, True)
    _chlo.register_dialect(context, True)
    _sdy.register_dialect(context, True)
    _mlirHlo.register_mhlo_dialect(context, True)
    return ir, context


BINDINGS: dict[str, Callable[[], tuple[Any, Any]]] = {"torch_mlir": _torch_mlir, "iree": _iree, "jaxlib": _jaxlib}
"""The fastest to import first."""


def canonicalise(data: bytes, found: References, ops: dict[str, int], only: str | None = None) -> bytes:
    """The canonical text of a module as UTF-8; fills `found` and the op counts.

    Raises NoBinding, NotMlir, KernelUnclear or MemoryError. `only` names the one binding to use.
    """
    reasons = []
    available = False
    for name in [only] if only else _order(data):
        try:
            ir, context = BINDINGS[name]()
        except (ImportError, AttributeError) as exc:
            reasons.append(f"{name}: {exc}")
            continue
        available = True
        try:
            text = _generic_text(name, ir, context, data)
        except MemoryError:
            raise
        except Exception as exc:
            # Each binding has its own error class.
            reasons.append(f"{name}: {exc}")
            continue
        for op in _OP.findall(text):
            ops[op] = ops.get(op, 0) + 1
        return _replace_kernels(text, found).encode("utf-8", "surrogateescape")
    detail = "; ".join(reasons)[:2000]
    raise NotMlir(detail) if available else NoBinding(detail)


def _order(data: bytes) -> list[str]:
    """Only jaxlib knows Shardy; do not load another binding just to hear that."""
    return sorted(BINDINGS, key=lambda name: name != "jaxlib") if b"sdy" in data else list(BINDINGS)


def _generic_text(name: str, ir: Any, context: Any, data: bytes) -> str:
    with context, ir.Location.unknown():
        module = _module(ir, context, data)
        text = _print(module.operation)
        before = _stripped_bytecode(ir, module)
        del module
    _check_lossless(name, text, before)
    return text


def _module(ir: Any, context: Any, data: bytes) -> Any:
    """The module without what stays out of the key, except for its locations."""
    if context.allow_unregistered_dialects:
        raise NotMlir("the binding lets unregistered dialects through")
    module = ir.Module.parse(data)
    operation = module.operation
    if data.startswith(BYTECODE_MAGIC):
        _check_whole(operation, data)
    if "sym_name" in operation.attributes:
        del operation.attributes["sym_name"]
    _drop_defaults(ir, operation, b"custom_call" in data)
    return module


def _print(operation: Any) -> str:
    # No local scope: it leaves out the contents of dense_resource, which is where torch-mlir puts weights.
    text: str = operation.get_asm(print_generic_op_form=True, enable_debug_info=False)
    return text


def _check_lossless(name: str, text: str, before: bytes) -> None:
    """Raise NotMlir unless the text, read again, makes the module that was printed, locations apart.

    A printer that leaves something out would give one digest to two graphs, and what it leaves out depends on its
    flags. Compared as bytecode, in a context of its own since each makes the names of resources unique.
    """
    ir, context = BINDINGS[name]()
    with context, ir.Location.unknown():
        after = _stripped_bytecode(ir, ir.Module.parse(text))
    if before != after:
        raise NotMlir("the printed module is not the one that was read")


def _stripped_bytecode(ir: Any, module: Any) -> bytes:
    passes = importlib.import_module(f"{ir.__name__.rpartition('.')[0]}.passmanager")
    passes.PassManager.parse("builtin.module(strip-debuginfo)").run(module.operation)
    written = io.BytesIO()
    # From version 3 on it holds the order in which a value's uses were made: no part of the program, nor of text.
    module.operation.write_bytecode(written, desired_version=2)
    return written.getvalue()


def _check_whole(operation: Any, data: bytes) -> None:
    """Raise NotMlir unless the binding writes the module back as it read it, but for the producer's name.

    A binding that is older than the writer reads the properties that it knows and passes over those appended
    since (seen: jaxlib 0.10.2 reading torch-mlir's custom calls and collectives). Two graphs that differ there
    would get one digest.
    """
    again = io.BytesIO()
    # The version is a varint with its length in the low bits; MLIR is at 6, one byte lasts until 127.
    operation.write_bytecode(again, desired_version=data[4] >> 1)
    if _after_producer(again.getvalue()) != _after_producer(data):
        raise NotMlir("the binding does not write back what it read")


def _after_producer(data: bytes) -> bytes:
    return data[4:5] + data[data.index(b"\0") :]


def _drop_defaults(ir: Any, operation: Any, custom_calls: bool) -> None:
    """Take out attributes that a printed module leaves out and that mean the same as none."""
    for op in operation.regions[0].blocks[0].operations:
        if op.operation.name == "func.func":
            for name in ("arg_attrs", "res_attrs"):
                attributes = op.operation.attributes
                if name in attributes and all(len(ir.DictAttr(one)) == 0 for one in ir.ArrayAttr(attributes[name])):
                    del attributes[name]
    if not custom_calls:
        return

    def visit(op: Any) -> Any:
        if op.name == "stablehlo.custom_call":
            attributes = op.attributes
            for name, default in _CUSTOM_CALL_DEFAULTS.items():
                if name in attributes and str(attributes[name]) == default:
                    del attributes[name]
        return ir.WalkResult.ADVANCE

    operation.walk(visit)


def _replace_kernels(text: str, found: References) -> str:
    if "backend_config" not in text:
        return text

    def replaced(match: re.Match[str]) -> str:
        config = canonical_config(_unescape(match.group(1)), found)
        return match.group() if config is None else f"backend_config = {config.decode()}"

    return _CONFIG.sub(replaced, text)


def _unescape(quoted: str) -> bytes:
    """The bytes of an MLIR string literal: `\\22` is a quotation mark, `\\\\` a backslash."""

    def one(match: re.Match[bytes]) -> bytes:
        code = match.group(1)
        return bytes.fromhex(code.decode()) if len(code) == 2 else {b"n": b"\n", b"t": b"\t"}.get(code, code)

    return _ESCAPE.sub(one, quoted.encode("utf-8", "surrogateescape"))
