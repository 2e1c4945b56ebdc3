"""Summaries of graphs: bounded, written back as they were read, and refused when they are anything else."""

from __future__ import annotations

import base64
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from neffcache_client.graph_summary import MAX_BYTES, MAX_OPS, MAX_TEXT, GraphSummary, Op, clip, decode, encode
from neffcache_hook.key.summary import summarise
from support.graphs import generate

MLIR = """\
module @{name} {{
  func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {{
    %c = stablehlo.constant dense<{constant}> : tensor<8xf32>
    %s = stablehlo.add %x, %c : tensor<8xf32>
    return %s : tensor<8xf32>
  }}
}}
"""


def test_a_summary_is_read_back_as_it_was() -> None:
    ops = [
        Op("stablehlo.add", "0123456789", "ab", "model/train.py", 31, '%3 = "stablehlo.add"(%1, %2)'),
        Op("x", "y"),
    ]
    summary = GraphSummary("mlir", {"stablehlo.add": 1, "x": 1}, ops)
    assert decode(encode(summary)) == summary
    assert (ops[0].where, ops[0].result, ops[1].where, ops[1].result) == ("model/train.py:31", "%3", None, None)


def test_a_summary_never_exceeds_its_bound() -> None:
    """What does not fit loses its texts, then its ops, never its counts."""
    noise = [
        Op("op", f"{n:010}", "", "f.py", n, "".join(chr(33 + n * k % 90) for k in range(199))) for n in range(MAX_OPS)
    ]
    many = GraphSummary("hlo", {"op": MAX_OPS + 1}, [*noise, noise[0]])
    assert decode(encode(many)) == GraphSummary("hlo", many.counts)
    full = encode(GraphSummary("hlo", {"op": MAX_OPS}, noise))
    assert len(full) <= MAX_BYTES
    assert len(decode(full).ops) == MAX_OPS


@given(st.text(max_size=400))
def test_clipping_keeps_both_ends_within_the_bound(text: str) -> None:
    assert len(clip(text)) <= MAX_TEXT


@given(st.one_of(st.text(), st.binary().map(lambda raw: base64.b64encode(zlib.compress(raw)).decode())))
def test_anything_else_is_refused_without_another_exception(text: str) -> None:
    with pytest.raises(ValueError):
        decode(text)


def test_a_summary_that_unpacks_to_gigabytes_is_refused() -> None:
    bomb = base64.b64encode(zlib.compress(b" " * (64 << 20))).decode()
    assert len(bomb) < MAX_BYTES
    with pytest.raises(ValueError):
        decode(bomb)


def test_a_text_module_tells_its_own_lines() -> None:
    found = decode(summarise(MLIR.format(name="a", constant="1.5").encode()))
    add = next(op for op in found.ops if op.name == "stablehlo.add")
    assert (add.where, add.result) == ("module.mlir:4", "%1")
    assert found.counts["stablehlo.constant"] == 1


def test_only_the_changed_constant_has_another_digest() -> None:
    one, two = (
        decode(summarise(MLIR.format(name=n, constant=c).encode())).ops for n, c in (("a", "1.5"), ("b", "2.5"))
    )
    assert [a.name for a, b in zip(one, two, strict=True) if (a.digest, a.wiring) != (b.digest, b.wiring)] == [
        "stablehlo.constant"
    ]


def test_swapped_operands_change_the_wiring_and_nothing_else() -> None:
    text = MLIR.format(name="a", constant="1.5")
    one = decode(summarise(text.encode())).ops
    two = decode(summarise(text.replace("%x, %c", "%c, %x").encode())).ops
    assert [op.digest for op in one] == [op.digest for op in two]
    assert [op.name for op, other in zip(one, two, strict=True) if op.wiring != other.wiring] == ["stablehlo.add"]


@pytest.fixture(scope="module")
def jax_graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graphs")
    generate(folder, "while")
    return folder


@pytest.mark.parametrize("kind", ["mlir", "mlirbc", "hlo.pb"])
def test_real_graphs_of_jax_tell_their_source_lines(kind: str, jax_graphs: Path) -> None:
    found = decode(summarise((jax_graphs / f"while.{kind}").read_bytes()))
    assert sum(found.counts.values()) == len(found.ops)
    assert any(op.file == "support/graphs.py" and op.line > 0 for op in found.ops)
    assert any("5" in op.text for op in found.ops if op.name.endswith("constant"))
