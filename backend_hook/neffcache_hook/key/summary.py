"""The summary of a graph that goes to the server after a miss, see `neffcache_client.graph_summary`.

Imports parsers, so only the worker uses it.
"""

from __future__ import annotations

from neffcache_client.graph_summary import MAX_OPS, GraphSummary, Op, encode

from neffcache_hook.key.ir import is_mlir
from neffcache_hook.key.nki import References


def summarise(data: bytes) -> str:
    """The encoded summary of a graph. Raises what the parsers raise for one that they cannot read."""
    counts: dict[str, int] = {}
    ops: list[Op] = []
    if is_mlir(data):
        from neffcache_hook.key import mlir, mlir_summary

        text = mlir.canonicalise(data, References(), counts).decode("utf-8", "replace")
        if sum(counts.values()) <= MAX_OPS:
            ops = mlir_summary.ops(text, data)
        return encode(GraphSummary("mlir", counts, ops))
    from neffcache_hook.key import hlo, hlo_summary

    hlo.canonicalise(data, References(), counts)
    if sum(counts.values()) <= MAX_OPS:
        ops = hlo_summary.ops(data)
    return encode(GraphSummary("hlo", counts, ops))
