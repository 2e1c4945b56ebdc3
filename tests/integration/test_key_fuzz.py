"""Fuzzing: whatever the bytes and the command line, there is an answer, and no byte of an unparsed file is ignored.

Bounded in CI; `FUZZ_EXAMPLES=20000 pytest tests/integration/test_key_fuzz.py --timeout=0` runs longer.
"""

from __future__ import annotations

import hashlib
import os
import tempfile

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from neffcache_hook.key import ir, nki, spawn
from neffcache_hook.key.command import parse
from neffcache_hook.key.options import BY_SPELLING
from support import pinned

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "100"))
bounded = settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))

HLO = [path.read_bytes() for path in pinned.graphs() if path.name.endswith(".pb")]
BYTECODE = [path.read_bytes() for path in pinned.graphs() if path.name.endswith(".mlirbc")]
TEXT = [path.read_bytes() for path in pinned.graphs() if path.name.endswith(".mlir")]


def check(data: bytes) -> None:
    found = ir.canonicalise(data)
    if found["canonicaliser"] == "raw":
        assert found["digest"] == hashlib.sha256(data).hexdigest()
        assert found["why"]
    else:
        assert found["kind"] in ("hlo", "mlir")


@bounded
@given(st.binary(max_size=400))
def test_random_bytes_have_a_digest(data: bytes) -> None:
    check(data)


@bounded
@given(st.sampled_from(HLO), st.data())
def test_damaged_hlo_has_a_digest(module: bytes, draw: st.DataObject) -> None:
    data = bytearray(module)
    for _ in range(draw.draw(st.integers(0, 4))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    check(bytes(data[: draw.draw(st.integers(0, len(data)))]))


@bounded
@given(st.sampled_from(TEXT), st.data())
def test_damaged_text_has_a_digest(module: bytes, draw: st.DataObject) -> None:
    data = bytearray(module)
    for _ in range(draw.draw(st.integers(0, 3))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(9, 255))
    check(bytes(data[: draw.draw(st.integers(0, len(data)))]))


@settings(bounded, max_examples=max(12, EXAMPLES // 10))
@given(st.sampled_from(BYTECODE), st.data())
def test_damaged_bytecode_has_a_digest_though_the_parser_aborts(module: bytes, draw: st.DataObject) -> None:
    """Through the worker: in this process MLIR would take the tests down with it."""
    data = bytearray(module)
    for _ in range(draw.draw(st.integers(1, 3))):
        data[draw.draw(st.integers(4, len(data) - 1))] = draw.draw(st.integers(0, 255))
    raw = hashlib.sha256(data).hexdigest()
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        found = spawn.canonicalise(file.fileno(), raw)
    assert found["canonicaliser"] != "raw" or found["digest"] == raw


WORDS = st.one_of(
    st.sampled_from(["compile", "in.pb", "--", "-", "", "--output=o", "-O1", "trn2", *BY_SPELLING]),
    st.text(max_size=12),
    st.builds("{}={}".format, st.sampled_from(sorted(BY_SPELLING)), st.text(max_size=8)),
)


@bounded
@given(st.lists(WORDS, max_size=12), st.lists(WORDS, max_size=4))
def test_random_command_lines_are_taken_apart_without_loss(argv: list[str], flags: list[str]) -> None:
    command = parse(argv, {"NEURON_CC_FLAGS": " ".join(flags)})
    if command is None:
        return
    assert command.argv == argv
    rest = iter(argv)
    assert all(word in rest for word in command.compiler_argv), "the compiler is given a part of argv, in order"
    assert len(command.with_output("/x")) == len(command.compiler_argv)
    # Nothing that looks like an unknown option may vanish from the key.
    kept = [value for _, value in command.options]
    for word in argv[: argv.index("--")] if "--" in argv else argv:
        if word.startswith("--zz"):
            assert word in kept


@bounded
@given(st.binary(max_size=300), st.sampled_from([b"klir_binary", b'"klir_binary"', b"ImtsaXJfYmluYXJ5I", b"{"]))
def test_a_raw_scan_ends_with_an_answer(data: bytes, marker: bytes) -> None:
    try:
        nki.scan_raw(data + marker + data)
    except nki.KernelUnclear:
        pass
