"""Canonical forms over real graphs: the same for every way to write a graph down, pinned, and not lossy."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path

import pytest
from neffcache_hook.key import compute, hlo, ir, mlir, nki
from support import pinned, wire
from support.corpus import corpus

MODULES = {"torch_mlir": "torch_mlir", "iree": "iree.compiler", "jaxlib": "jaxlib"}


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory)


def text(data: bytes, binding: str | None = None) -> bytes:
    return mlir.canonicalise(data, nki.References(), {}, binding)


def readable(data: bytes, binding: str) -> bytes | None:
    try:
        return text(data, binding)
    except mlir.NotMlir:
        return None


def test_all_three_bindings_are_here() -> None:
    """The tests below would prove less without one."""
    for module in MODULES.values():
        assert importlib.util.find_spec(module) is not None, f"install the dev extra: {module} is missing"


def test_the_corpus_holds_the_kinds_of_program_that_matter(graphs: Path) -> None:
    assert len(list(graphs.glob("*.hlo.pb"))) >= 45
    assert len(list(graphs.glob("*.mlir"))) >= 45


def test_pinned_digests_still_hold() -> None:
    """A change here moves every key that was ever stored: it needs a new recipe, see tests/support/pinned.py."""
    recorded = json.loads(pinned.DIGESTS.read_text())
    assert (recorded["recipe"], tuple(recorded["canonicalisers"])) == (compute.RECIPE, compute.CANONICALISERS)
    found = {path.name: ir.canonicalise(path.read_bytes()) for path in pinned.graphs()}
    assert {name: entry["digest"] for name, entry in found.items()} == pinned.digests()
    assert {entry["kind"] for entry in found.values()} == {"hlo", "mlir"}


@pytest.mark.parametrize("binding", MODULES)
def test_every_binding_gives_the_pinned_digest(binding: str) -> None:
    """Bytecode of the demo's models by the two bindings that are of torch-mlir's age."""
    for path in pinned.graphs():
        if path.suffix == ".mlir" or (path.name.startswith("torch_") and binding != "jaxlib"):
            found = mlir.canonicalise(path.read_bytes(), nki.References(), {}, binding)
            assert ir.hashlib.sha256(found).hexdigest() == pinned.digests()[path.name], path.name


def test_text_and_bytecode_of_one_graph_give_one_form_through_every_binding(graphs: Path) -> None:
    """What a binding cannot read it refuses; what it reads it reads like the others."""
    read = {(binding, kind): 0 for binding in MODULES for kind in (".mlir", ".mlirbc")}
    for path in sorted(graphs.glob("*.mlir")):
        forms = set()
        for binding, kind in read:
            form = readable(path.with_suffix(kind).read_bytes(), binding)
            if form is not None:
                forms.add(form)
                read[binding, kind] += 1
        assert len(forms) == 1, path.name
    assert read["jaxlib", ".mlirbc"] == read["jaxlib", ".mlir"] >= 45
    assert all(count >= 30 for count in read.values()), read


def test_bytecode_of_every_version_gives_the_form_of_the_text(graphs: Path) -> None:
    binding, context = mlir.BINDINGS["torch_mlir"]()
    for name in ("conv", "while", "mlp_grad", "sort"):
        source = (graphs / f"{name}.mlir").read_bytes()
        forms = set()
        for version in (1, 3, 5, 6):
            written = io.BytesIO()
            with context:
                binding.Module.parse(source).operation.write_bytecode(written, desired_version=version)
            forms.add(text(written.getvalue(), "torch_mlir"))
        assert forms == {text(source)}, name


def test_a_binding_that_passes_over_a_property_is_not_believed(graphs: Path) -> None:
    """jaxlib's older StableHLO reads torch-mlir's newer collectives and leaves a property out without a word."""
    binding, context = mlir.BINDINGS["torch_mlir"]()
    written = io.BytesIO()
    with context:
        module = binding.Module.parse((graphs / "permute.mlir").read_bytes())
        module.operation.write_bytecode(written)
    data = written.getvalue()
    assert text(data) == text((graphs / "permute.mlir").read_bytes())
    again = readable(data, "jaxlib")
    assert again is None or again == text(data)


def test_a_property_that_a_reader_does_not_know_is_never_passed_over(
    graphs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check itself: were it gone, some binding would accept what it cannot write back."""
    data = (graphs / "conv.mlirbc").read_bytes()
    monkeypatch.setattr(mlir, "_after_producer", lambda data: (len(data), id(data)))
    with pytest.raises(mlir.NotMlir, match="write back"):
        text(data)


def test_constants_are_never_elided(graphs: Path) -> None:
    form = text((graphs / "large_constant.mlir").read_bytes())
    assert b"dense_resource" not in form
    assert b"..." not in form
    values = "".join(f"{byte:02X}" for byte in range(256)) * 16
    source = f'module {{ func.func @main() -> tensor<4096xui8> {{ %0 = stablehlo.constant dense<"0x{values}">'
    source += " : tensor<4096xui8> return %0 : tensor<4096xui8> } }"
    assert values.encode() in text(source.encode())


def test_floats_keep_every_bit() -> None:
    """NaN payloads, negative zero and subnormals are distinct constants."""
    literals = ("0x7FC00000", "0x7FC00001", "0xFFC00000", "0x80000000", "0x00000000", "0x00000001")
    source = "module {{ func.func @main() -> tensor<f32> {{ %0 = stablehlo.constant dense<{}> : tensor<f32> "
    source += "return %0 : tensor<f32> }} }}"
    assert len({text(source.format(literal).encode()) for literal in literals}) == len(literals)


def resource(values: str) -> bytes:
    """A graph whose weights lie in a resource, as torch-mlir writes them."""
    return f"""
module {{
  func.func @main() -> tensor<2xi32> {{
    %0 = stablehlo.constant dense_resource<weights> : tensor<2xi32>
    return %0 : tensor<2xi32>
  }}
}}
{{-# dialect_resources: {{ builtin: {{ weights: "0x04000000{values}" }} }} #-}}
""".encode()


ONE, OTHER = "0100000002000000", "0100000003000000"


@pytest.mark.parametrize("binding", MODULES)
def test_weights_in_a_resource_are_a_part_of_the_graph(binding: str) -> None:
    """One bit of one element."""
    assert text(resource(ONE), binding) == text(resource(ONE))
    assert text(resource(ONE), binding) != text(resource(OTHER), binding)


def test_weights_in_a_resource_of_bytecode_are_a_part_of_the_graph() -> None:
    found = []
    for values in (ONE, OTHER):
        binding, context = mlir.BINDINGS["torch_mlir"]()
        bytecode = io.BytesIO()
        with context:
            binding.Module.parse(resource(values)).operation.write_bytecode(bytecode)
        found.append(text(bytecode.getvalue()))
        assert found[-1] == text(resource(values))
    assert found[0] != found[1]


def test_a_printer_that_leaves_something_out_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(operation: object) -> str:
        return str(operation.get_asm(print_generic_op_form=True, use_local_scope=True))  # type: ignore[attr-defined]

    monkeypatch.setattr(mlir, "_print", careless)
    with pytest.raises(mlir.NotMlir):
        text(resource(ONE))


def test_an_unregistered_dialect_is_hashed_raw() -> None:
    source = b'module { "unheard.of"() : () -> () }'
    found = ir.canonicalise(source)
    assert (found["kind"], found["canonicaliser"], found["digest"]) == ("raw", "raw", found["raw"])
    assert "unregistered" in found["why"]


def test_shardy_and_chlo_are_read_where_a_binding_knows_them() -> None:
    source = b'module { sdy.mesh @mesh = <["x"=8]> func.func @main(%a: tensor<8xf32>) -> tensor<8xf32> '
    source += b"{ %0 = chlo.erf %a : tensor<8xf32> -> tensor<8xf32> return %0 : tensor<8xf32> } }"
    found = ir.canonicalise(source)
    assert found["kind"] == "mlir"
    assert found["ops"]["sdy.mesh"] == found["ops"]["chlo.erf"] == 1


def test_op_counts_describe_a_graph(graphs: Path) -> None:
    assert ir.canonicalise((graphs / "matmul.mlir").read_bytes())["ops"]["stablehlo.dot_general"] == 1
    assert ir.canonicalise((graphs / "matmul.hlo.pb").read_bytes())["ops"]["dot"] == 1


# HLO protobuf.


def test_every_hlo_module_of_the_corpus_is_parsed(graphs: Path) -> None:
    for path in sorted(graphs.glob("*.hlo.pb")):
        assert ir.canonicalise(path.read_bytes())["kind"] == "hlo", path.name


def test_a_module_inside_a_wrapper_is_hashed_raw(graphs: Path) -> None:
    """HloProto holds the module in field 1, which of a module would be its name, and dropped."""
    module = (graphs / "matmul.hlo.pb").read_bytes()
    for wrapper in ([wire.text(1, module)], [wire.text(1, module), wire.text(3, b"")]):
        assert ir.canonicalise(wire.encode(wrapper))["kind"] == "raw"


@pytest.mark.parametrize("level", ["module", "instruction", "metadata", "computation"])
def test_a_field_of_tomorrow_is_hashed_at_every_level(graphs: Path, level: str) -> None:
    module = (graphs / "matmul.hlo.pb").read_bytes()
    found = set()
    for content in (None, "a", "b"):
        found.add(ir.canonicalise(_with_unknown(module, level, content))["digest"])
    assert len(found) == 3


def _with_unknown(module: bytes, level: str, content: str | None) -> bytes:
    extra = [] if content is None else [wire.text(2000, content)]

    def change(index: int, fields: wire.Message) -> wire.Message:
        if level == "instruction":
            return fields + extra
        if level == "metadata":
            return [
                wire.text(n, value + wire.encode(extra))
                if n == wire.METADATA and isinstance(value, bytes)
                else (n, w, value)
                for n, w, value in fields
            ]
        return fields

    fields = wire.decode(wire.map_instructions(module, change))
    if level == "computation":
        return wire.encode(
            [
                wire.text(n, value + wire.encode(extra))
                if n == wire.COMPUTATIONS and isinstance(value, bytes)
                else (n, w, value)
                for n, w, value in fields
            ]
        )
    return wire.encode(fields + extra if level == "module" else fields)


def test_a_graph_larger_than_a_chunk_keeps_the_order_of_its_instructions(
    graphs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = (graphs / "attention.hlo.pb").read_bytes()
    monkeypatch.setattr(hlo, "_CHUNK", 3)
    forward = ir.canonicalise(module)
    swapped = _swap_instructions(module)
    assert forward["kind"] == ir.canonicalise(swapped)["kind"] == "hlo"
    assert forward["digest"] != ir.canonicalise(swapped)["digest"]


def _swap_instructions(module: bytes) -> bytes:
    fields = wire.decode(module)
    at = max(i for i, field in enumerate(fields) if field[0] == wire.COMPUTATIONS)
    computation = wire.decode(bytes(fields[at][2]))  # type: ignore[arg-type]
    first, second = [i for i, field in enumerate(computation) if field[0] == wire.INSTRUCTIONS][:2]
    computation[first], computation[second] = computation[second], computation[first]
    return wire.encode([*fields[:at], wire.text(wire.COMPUTATIONS, wire.encode(computation)), *fields[at + 1 :]])


def test_map_entries_count_whatever_their_order_except_among_equal_keys(graphs: Path) -> None:
    module = (graphs / "matmul.hlo.pb").read_bytes()

    def digest(*pairs: tuple[str, str]) -> str:
        attributes = [wire.text(1, wire.encode([wire.text(1, k), wire.text(2, v)])) for k, v in pairs]
        found = ir.canonicalise(module + wire.encode([wire.text(19, wire.encode(attributes))]))
        assert found["kind"] == "hlo"
        return str(found["digest"])

    assert digest(("a", "1"), ("b", "2")) == digest(("b", "2"), ("a", "1"))
    assert digest(("a", "1"), ("a", "2")) != digest(("a", "2"), ("a", "1"))
    assert digest(("a", "1"), ("b", "2")) != digest(("a", "2"), ("b", "1"))
