"""The operations of a StableHLO module, for its summary.

Read from the canonical text, so that two graphs with one digest have one summary but for the lines. Operands are
kept apart from the rest of an op: one op inserted renumbers every value behind it, and would otherwise make all of
them differ.
"""

from __future__ import annotations

import re
from typing import Any

from neffcache_client.graph_summary import Op, clip, path_tail, short_digest

from neffcache_hook.key import mlir

_OP = re.compile(r'\s*(?:(%[^"=]*) = )?"([A-Za-z_][\w$.-]*)"')
_VALUE = re.compile(r"%([A-Za-z0-9_$.-]+)(?::\d+)?(#\d+)?")
_PLACE = re.compile(r'"([^"]*)":(\d+)')


def ops(text: str, data: bytes) -> list[Op]:
    """One `Op` for each operation of `text`, the canonical form of `data`, in the order of their first lines."""
    return _listed(text, _places(data))


def _listed(text: str, places: list[tuple[str, int]]) -> list[Op]:
    """One `Op` for each operation of the generic text, in the order of their first lines."""
    lines: list[list[str]] = []
    names: list[str] = []
    open_ops: list[int] = []
    for line in text.splitlines():
        match = _OP.match(line)
        if match:
            names.append(match.group(2))
            lines.append([line.strip()])
            if line.endswith("({"):
                open_ops.append(len(lines) - 1)
        elif lines:
            # A block's arguments and the types behind a region belong to the op whose region it is.
            lines[open_ops[-1] if open_ops else 0].append(line.strip())
            if line.lstrip().startswith("})") and not line.endswith("({") and open_ops:
                open_ops.pop()
    if len(places) != len(lines):
        places = [("", 0)] * len(lines)
    made_by = _made_by(names, lines)
    return [
        Op(
            name,
            short_digest(_VALUE.sub("%", "\n".join(body))),
            short_digest(" ".join(_operands(body, index, made_by))),
            *place,
            clip(body[0]),
        )
        for index, (name, body, place) in enumerate(zip(names, lines, places, strict=True))
    ]


def _made_by(names: list[str], lines: list[list[str]]) -> dict[str, int]:
    """Which op makes a value, by the value's name. Names are used again in other functions; the last one counts,
    which can only make two graphs look more different in their wiring than they are."""
    made: dict[str, int] = {}
    for index in range(len(names)):
        match = _OP.match(lines[index][0])
        if match and match.group(1):
            made[match.group(1).strip().partition(":")[0]] = index
    return made


def _operands(body: list[str], index: int, made_by: dict[str, int]) -> list[str]:
    """How far back each operand was made; arguments by their names."""
    head = body[0].partition('"')[2]
    found = []
    for match in _VALUE.finditer(head):
        maker = made_by.get("%" + match.group(1))
        found.append((f"-{index - maker}" if maker is not None else match.group(1)) + (match.group(2) or ""))
    return found


def _places(data: bytes) -> list[tuple[str, int]]:
    """File and line of each op in the order of the text; empty when no binding tells."""
    for name in mlir.BINDINGS:
        try:
            ir, context = mlir.BINDINGS[name]()
            return _walk(ir, context, data)
        except Exception:  # noqa: S112  each binding has its own error class, and the lines can be done without
            continue
    return []


def _walk(ir: Any, context: Any, data: bytes) -> list[tuple[str, int]]:
    places: list[tuple[str, int]] = []

    def visit(op: Any) -> Any:
        match = _PLACE.search(str(op.location))
        places.append((path_tail(match.group(1)), int(match.group(2))) if match else ("", 0))
        return ir.WalkResult.ADVANCE

    with context, ir.Location.unknown():
        module = ir.Module.parse(data)
        module.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
        del module
    # Text without locations of its own is placed at its own lines, under this name.
    return [("module.mlir" if file == "-" else file, line) for file, line in places]
