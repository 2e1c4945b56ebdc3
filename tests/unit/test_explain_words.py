"""What people are told about the difference of two keys."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from neffcache_client.graph_summary import GraphSummary, Op
from neffcache_server.explain import graphs
from neffcache_server.explain.factors import differences, distance, settings_digest

BASE: dict[str, Any] = {
    "recipe": 1,
    "ir": {"kind": "mlir", "canonicaliser": "mlir-text-1", "digest": "a" * 64},
    "compiler": {"version": "2.26.6360.0+6f180f47", "digest": "b" * 64, "kind": "wheel"},
    "target": "trn2",
    "lnc": "2",
    "options": {
        "known": [["model-type", "transformer"], ["optlevel", "1"]],
        "unknown": ["--new=1"],
        "environment": [],
    },
    "files": [["kernel", "c" * 64]],
    "env": {"XLA_FLAGS": "--old"},
}

CASES: list[tuple[list[Any], Any, str]] = [
    (
        ["compiler", "version"],
        "2.23.6484.0+3b612583",
        "compiler 2.23.6484.0+3b612583 here, 2.26.6360.0+6f180f47 there",
    ),
    (
        ["compiler", "digest"],
        "d" * 64,
        "compiler 2.26.6360.0+6f180f47 on both sides, but not the same files: wheel dddddddddddd here, "
        "wheel bbbbbbbbbbbb there",
    ),
    (["target"], "trn1", "target trn1 here, trn2 there"),
    (["lnc"], None, "lnc not given here, 2 there"),
    (["recipe"], 2, "key recipe 2 here, 1 there"),
    (["options", "known", 1, 1], "2", "option -O2 here, -O1 there"),
    (["options", "known"], [["optlevel", "1"]], "option not given here, --model-type transformer there"),
    (
        ["options", "known"],
        [["model-type", "transformer"], ["optlevel", "2"], ["optlevel", "1"]],
        "option -O2 -O1 here, -O1 there",
    ),
    (["options", "unknown"], ["--new=2"], "option --new=2 here, --new=1 there"),
    (["options", "environment"], [["optlevel", "3"]], "NEURON_CC_FLAGS adds -O3 here, nothing there"),
    (["env", "XLA_FLAGS"], "--new", 'env XLA_FLAGS "--new" here, "--old" there'),
    (["env"], {}, 'env XLA_FLAGS not set here, "--old" there'),
    (
        ["files", 0, 1],
        "e" * 64,
        "kernel file, content differs: sha256 eeeeeeeeeeee here, sha256 cccccccccccc there",
    ),
    (["files"], [], "kernel file: none here, sha256 cccccccccccc there"),
    (["ir", "digest"], "f" * 64, "the graph differs"),
    (["ir", "kind"], "raw", "graph read as raw here, mlir there"),
    (["tomorrow"], {"x": 1}, 'tomorrow {"x": 1} here, not given there'),
]


def changed(path: list[Any], value: Any) -> dict[str, Any]:
    here = deepcopy(BASE)
    node: Any = here
    for step in path[:-1]:
        node = node[step]
    node[path[-1]] = value
    return here


@pytest.mark.parametrize(("path", "value", "words"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_each_factor_is_named_in_words(path: list[Any], value: Any, words: str) -> None:
    """UC-07."""
    assert [one.text for one in differences(changed(path, value), BASE)] == [words]


def test_equal_factors_have_no_difference() -> None:
    assert differences(deepcopy(BASE), BASE) == []


def test_only_the_order_of_unknown_options_differs() -> None:
    here, there = changed(["options", "unknown"], ["-a", "-b"]), changed(["options", "unknown"], ["-b", "-a"])
    (one,) = differences(here, there)
    assert one.text == "options that neffcache does not know come in another order"


def test_settings_leave_out_the_graph_and_nothing_else() -> None:
    for path, value, _ in CASES:
        same = settings_digest(changed(path, value)) == settings_digest(BASE)
        assert same == (path[0] == "ir")


def test_the_same_graph_with_another_compiler_is_nearer_than_another_graph_with_another_target() -> None:
    compiler = differences(changed(["compiler", "version"], "1"), BASE)
    other = changed(["ir", "digest"], "0" * 64)
    other["target"] = "trn1"
    assert distance(compiler) < distance(differences(other, BASE))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
_FACTORS = st.dictionaries(st.sampled_from([*BASE, "tomorrow"]), _JSON, max_size=8)


@given(_FACTORS, _FACTORS)
def test_whatever_a_client_sent_as_factors_is_compared(here: dict[str, Any], there: dict[str, Any]) -> None:
    """No exception, and a difference exactly when there is one."""
    assert bool(differences(here, there)) == (here != there)
    assert len(settings_digest(here)) == 16


def summary(*ops: tuple[str, str], wiring: str = "w") -> GraphSummary:
    counts: dict[str, int] = {}
    listed = []
    for number, (name, digest) in enumerate(ops):
        counts[name] = counts.get(name, 0) + 1
        text = f'%{number} = "{name}"() {digest}'
        listed.append(Op(name, digest, wiring, "model/train.py", 30 + number, text))
    return GraphSummary("mlir", counts, listed)


BODY = [("builtin.module", "m"), ("func.func", "f"), ("stablehlo.constant", "c"), ("stablehlo.add", "a")]


def test_one_constant_is_found_with_its_line() -> None:
    here = summary(*BODY[:2], ("stablehlo.constant", "C"), *BODY[3:])
    found = graphs.compare(here, summary(*BODY))
    assert found.text == "the graph (the same 4 operations, 1 of them not equal)"
    assert found.first is not None
    assert found.first.here is not None
    assert (found.first.here.number, found.first.here.where) == (3, "model/train.py:32")
    assert graphs.name_of(found.first.here) == "constant %2 of op 3 (model/train.py:32)"


def test_a_function_whose_type_follows_is_not_named_first() -> None:
    here = summary(BODY[0], ("func.func", "F"), ("stablehlo.constant", "C"), ("stablehlo.add", "A"))
    found = graphs.compare(here, summary(*BODY))
    assert found.first is not None
    assert found.first.here is not None
    assert (found.differing, found.first.here.op) == (3, "stablehlo.constant")


def test_an_inserted_operation_does_not_make_those_behind_it_differ() -> None:
    here = summary(*BODY[:3], ("stablehlo.negate", "n"), *BODY[3:])
    found = graphs.compare(here, summary(*BODY))
    assert found.text == "the graph (5 operations here, 4 there: 1 stablehlo.negate here and 0 there)"
    assert found.differing == 1
    assert found.first is not None
    assert found.first.here is not None
    assert (found.first.here.op, found.first.there) == ("stablehlo.negate", None)


def test_two_insertions_far_apart_are_two_differences() -> None:
    long = [("stablehlo.add", f"d{n}") for n in range(300)]
    here = summary(("stablehlo.x", "x"), *long, ("stablehlo.x", "x"))
    assert graphs.compare(here, summary(*long)).differing == 2


def test_other_operands_alone_are_told_as_such() -> None:
    found = graphs.compare(summary(*BODY, wiring="v"), summary(*BODY))
    assert found.text == "the graph (the same 4 operations, 4 with other operands)"
    assert found.first is not None
    assert found.first.wiring


def test_counts_alone_still_tell_which_kinds_differ() -> None:
    here = GraphSummary("mlir", {"stablehlo.add": 5000, "stablehlo.dot": 3})
    there = GraphSummary("mlir", {"stablehlo.add": 5001, "stablehlo.dot": 3})
    found = graphs.compare(here, there)
    assert found.text == "the graph (5003 operations here, 5004 there: 5000 stablehlo.add here and 5001 there)"
    assert (found.differing, found.first) == (None, None)
    assert graphs.compare(here, None).first is None


def test_unlikeness_goes_from_equal_to_nothing_in_common() -> None:
    assert graphs.unlikeness({"a": 2}, {"a": 2}) == 0
    assert graphs.unlikeness({"a": 2}, {"b": 2}) == 1
    assert graphs.unlikeness({"a": 3, "b": 1}, {"a": 3}) == pytest.approx(1 / 7)
    assert graphs.unlikeness(None, {"a": 1}) == 0.5
