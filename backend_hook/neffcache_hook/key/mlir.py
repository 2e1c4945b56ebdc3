"""StableHLO, text or bytecode, in a canonical form.

The form is MLIR's generic text without locations and without the module's own name: values are numbered in order,
attributes are sorted, large constants are printed whole and floats so that they read back to the same bits. It
does not depend on how the module was written down, and torch-mlir, IREE and jaxlib print the same; bytecode would
need a second round of printing and parsing, since it numbers attributes in the order in which a process met them.
Dialects that a binding does not know are never let through: the next binding is asked, and in the end the file is
hashed raw.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from neffcache_hook.key.nki import References, canonical_config

NAME = "mlir-text-1"
"""Changes whenever the canonical form does, together with the recipe."""

BYTECODE_MAGIC = b"ML\xefR"

_OP = re.compile(r'^ *(?:%[^"=]* = )?"([A-Za-z_][\w$.-]*)"', re.MULTILINE)
_CONFIG = re.compile(r'backend_config = "((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(rb"\\([0-9A-Fa-f]{2}|.)", re.DOTALL)


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
    from jaxlib.mlir._mlir_libs import _jax_mlir_ext

    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    context = ir.Context()
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    return ir, context


BINDINGS: dict[str, Callable[[], tuple[Any, Any]]] = {"torch_mlir": _torch_mlir, "iree": _iree, "jaxlib": _jaxlib}
"""The fastest to import first."""


def canonicalise(data: bytes, found: References, ops: dict[str, int], only: str | None = None) -> bytes:
    """The canonical text of a module as UTF-8; fills `found` and the op counts.

    Raises NoBinding, NotMlir or KernelUnclear. `only` names the one binding to use.
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
            text = _generic_text(ir, context, data)
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


def _generic_text(ir: Any, context: Any, data: bytes) -> str:
    if context.allow_unregistered_dialects:
        raise NotMlir("the binding lets unregistered dialects through")
    with context, ir.Location.unknown():
        module = ir.Module.parse(data)
        operation = module.operation
        if "sym_name" in operation.attributes:
            del operation.attributes["sym_name"]
        text: str = operation.get_asm(
            print_generic_op_form=True, enable_debug_info=False, use_local_scope=True, large_elements_limit=None
        )
        del operation, module
    return text


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
