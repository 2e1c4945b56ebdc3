"""Two summaries of graphs compared: op counts, and the first place where they part. Pure functions."""

from __future__ import annotations

from collections.abc import Callable
from difflib import SequenceMatcher
from itertools import zip_longest

from neffcache_client.explanation import GraphDifference, OpCount, OpDifference, OpPlace
from neffcache_client.graph_summary import GraphSummary, Op

_CONTAINERS = ("builtin.module", "func.func")
"""A shape that changes inside changes their types too; they are named only when nothing else differs."""
_MAX_ALIGNED = 250_000
"""Product of the lengths of two stretches up to which they are aligned; a matter of a fraction of a second."""
_MAX_COUNTS = 6
_What = Callable[[Op], tuple[str, str]]
_UNKNOWN = "the graph (what it consists of is not known for both sides)"


def unlikeness(here: dict[str, int] | None, there: dict[str, int] | None) -> float:
    """0 for equal op counts, 1 for graphs that have no operation in common; 0.5 when one is not known."""
    if not here or not there:
        return 0.5
    total = sum(here.values()) + sum(there.values())
    return sum(abs(here.get(name, 0) - there.get(name, 0)) for name in here.keys() | there.keys()) / total


def compare(here: GraphSummary | None, there: GraphSummary | None) -> GraphDifference:
    """How the graph here differs from the one there."""
    if here is None or there is None:
        return GraphDifference(text=_UNKNOWN)
    counts = [
        OpCount(op=name, here=here.counts.get(name, 0), there=there.counts.get(name, 0))
        for name in sorted(here.counts.keys() | there.counts.keys())
        if here.counts.get(name, 0) != there.counts.get(name, 0)
    ]
    sizes = sum(here.counts.values()), sum(there.counts.values())
    difference = GraphDifference(text="", counts=counts, ops_here=sizes[0], ops_there=sizes[1])
    if here.ops and there.ops:
        pairs = differing(here.ops, there.ops)
        difference.differing = len(pairs)
        difference.first = next((p for p in pairs if not in_container(p)), pairs[0] if pairs else None)
    difference.text = _words(difference)
    return difference


def differing(here: list[Op], there: list[Op]) -> list[OpDifference]:
    """The places between the common beginning and the common end of two lists that differ, in order.

    Operands are looked at only when everything else agrees: an op more or less moves them all.
    """
    found = _differing(here, there, lambda op: (op.name, op.digest))
    if found:
        return [_pair(here, there, i, j, wiring=False) for i, j in found]
    wired = _differing(here, there, lambda op: (op.name, op.wiring))
    return [_pair(here, there, i, j, wiring=True) for i, j in wired]


def _differing(here: list[Op], there: list[Op], what: _What) -> list[tuple[int | None, int | None]]:
    mine, other = [what(op) for op in here], [what(op) for op in there]
    shorter = min(len(mine), len(other))
    start = next((i for i in range(shorter) if mine[i] != other[i]), shorter)
    if len(mine) == len(other):
        return [(i, i) for i in range(start, shorter) if mine[i] != other[i]]
    end = next((i for i in range(shorter - start) if mine[-1 - i] != other[-1 - i]), shorter - start)
    left, right = len(mine) - end, len(other) - end
    if (left - start) * (right - start) > _MAX_ALIGNED:
        return list(zip_longest(range(start, left), range(start, right)))
    matcher = SequenceMatcher(None, mine[start:left], other[start:right], autojunk=False)
    return [
        pair
        for tag, i, i_end, j, j_end in matcher.get_opcodes()
        if tag != "equal"
        for pair in zip_longest(range(start + i, start + i_end), range(start + j, start + j_end))
    ]


def place(ops: list[Op], index: int) -> OpPlace:
    """The operation at `index`, for people."""
    op = ops[index]
    return OpPlace(number=index + 1, op=op.name, text=op.text, result=op.result, where=op.where)


def name_of(at: OpPlace) -> str:
    """`constant %12 of op 87 (train.py:31)`."""
    name = at.op.rpartition(".")[2] + (f" {at.result}" if at.result else "")
    return f"{name} of op {at.number}" + (f" ({at.where})" if at.where else "")


def in_container(one: OpDifference) -> bool:
    """Whether what differs is only the type of a function or the like."""
    return all(side is None or side.op in _CONTAINERS for side in (one.here, one.there))


def _pair(here: list[Op], there: list[Op], i: int | None, j: int | None, *, wiring: bool) -> OpDifference:
    return OpDifference(
        here=None if i is None else place(here, i),
        there=None if j is None else place(there, j),
        wiring=wiring,
    )


def _words(found: GraphDifference) -> str:
    if found.counts:
        more = ", ".join(f"{one.here} {one.op} here and {one.there} there" for one in found.counts[:_MAX_COUNTS])
        rest = len(found.counts) - _MAX_COUNTS
        more += f" and {rest} more kinds" if rest > 0 else ""
        return f"the graph ({found.ops_here} operations here, {found.ops_there} there: {more})"
    same = f"the same {found.ops_here} operations"
    if found.first is None:
        return f"the graph ({same}; single ones are not known)"
    if found.first.wiring:
        return f"the graph ({same}, {found.differing} with other operands)"
    return f"the graph ({same}, {found.differing} of them not equal)"
