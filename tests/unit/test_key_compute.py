"""From a command to a key: what enters, what does not, and when there is none."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from neffcache_hook.key import compute, hlo, ir, mlir, spawn
from neffcache_hook.key.identity import CompilerIdentity
from support.keys import ARGV, COMPILER, Keys, in_process

RAW = b"HloModule text that nobody parses"


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keys:
    in_process(monkeypatch)
    return Keys(tmp_path)


def kernel_config(path: str, **more: object) -> str:
    document = {"func": "k", "klir_binary": {"binary": path, "inputs": [1, 2.50]}, **more}
    return base64.b64encode(json.dumps(document).encode()).decode()


def kernel_graph(path: str, **more: object) -> bytes:
    return f"""
module {{
  func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {{
    %0 = stablehlo.custom_call @AwsNeuronCustomNativeKernel(%a) {{backend_config = "{kernel_config(path, **more)}"}}
      : (tensor<4xf32>) -> tensor<4xf32>
    return %0 : tensor<4xf32>
  }}
}}
""".encode()


# What must not matter.


MEANINGLESS = (
    "HOME",
    "TMPDIR",
    "PWD",
    "HOSTNAME",
    "POD_NAME",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NEURON_RT_VISIBLE_CORES",
    "NEURON_RT_ROOT_COMM_ID",
    "NEFFCACHE_URL",
    "TORCH_NEURONX_NEFF_CACHE_DIR",
    "PATH",
)


@pytest.mark.parametrize("name", MEANINGLESS)
def test_an_environment_variable_outside_the_list_does_not_matter(keys: Keys, name: str) -> None:
    """UC-07"""
    assert keys.key(RAW, environ={name: "a"}) == keys.key(RAW, environ={name: "b"}) == keys.key(RAW)


def test_the_place_of_input_output_and_scratch_does_not_matter(keys: Keys, tmp_path: Path) -> None:
    """UC-20: precompiled in one folder, used in another."""
    there = tmp_path / "elsewhere" / "other.name"
    there.parent.mkdir()
    there.write_bytes(RAW)
    plain = keys.key(RAW)
    assert keys.key(there, ARGV.replace("out.neff", "/o/p.neff") + " --workdir /w --logfile=/l --verbose=35") == plain
    relative = ARGV.replace("{input}", "other.name")
    assert keys.key(there, relative, cwd=there.parent) == plain


# What must matter.


@pytest.mark.parametrize("name", [*compute.ENVIRONMENT, "NEURON_CC_SOMETHING"])
def test_an_environment_variable_of_the_list_enters_by_value(keys: Keys, name: str) -> None:
    assert len({keys.key(RAW), keys.key(RAW, environ={name: "1"}), keys.key(RAW, environ={name: "2"})}) == 3


@pytest.mark.parametrize(
    "argv",
    [
        ARGV.replace("-O2", "-O1"),
        ARGV.replace("--lnc 2", "--lnc 1"),
        ARGV.replace("trn2", "trn1"),
        ARGV.replace("--auto-cast=none", "--auto-cast=all"),
        ARGV.replace("transformer", "generic"),
        ARGV + " --tensorizer-options=--x",
        ARGV + " --unknown",
        ARGV + " --unknown=2",
        ARGV.replace(" -O2", ""),
    ],
)
def test_an_option_that_changes_the_program_changes_the_key(keys: Keys, argv: str) -> None:
    """UC-08"""
    assert keys.key(RAW, argv) != keys.key(RAW)


def test_the_order_of_unknown_options_matters(keys: Keys) -> None:
    assert keys.key(RAW, ARGV + " --b --a") != keys.key(RAW, ARGV + " --a --b")


def test_two_compilers_make_two_keys(keys: Keys) -> None:
    """UC-12"""
    newer = CompilerIdentity("2.26.6360.0+6f180f47", COMPILER.digest, "wheel")
    rebuilt = CompilerIdentity(COMPILER.version, "d" * 64, "wheel")
    assert len({keys.key(RAW), keys.key(RAW, compiler=newer), keys.key(RAW, compiler=rebuilt)}) == 3


def test_a_target_from_the_environment_will_do_and_is_no_option(keys: Keys) -> None:
    argv = ARGV.replace("--target trn2 ", "")
    one = keys.compute(RAW, argv, environ={"NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"})
    other = keys.key(RAW, argv, environ={"NEURON_PLATFORM_TARGET_OVERRIDE": "trn1"})
    assert one.factors["target"] == "trn2"
    assert len({one.key, other, keys.key(RAW)}) == 3


def test_one_element_of_a_large_constant_makes_another_key(keys: Keys) -> None:
    """Must show: weights that differ in one of 1e6 elements."""
    import struct

    def graph(values: bytes) -> bytes:
        text = (
            f'module {{ func.func @main() -> tensor<1000000xf32> {{ %0 = stablehlo.constant dense<"0x{values.hex()}">'
        )
        return f"{text} : tensor<1000000xf32> return %0 : tensor<1000000xf32> }} }}".encode()

    weights = bytearray(struct.pack("<1000000f", *range(1000000)))
    first = keys.compute(graph(bytes(weights)))
    weights[4 * 654_321] ^= 1
    second = keys.compute(graph(bytes(weights)))
    assert first.factors["ir"]["kind"] == second.factors["ir"]["kind"] == "mlir"
    assert first.key != second.key


# Files.


def test_a_file_that_an_option_names_enters_by_content(keys: Keys, tmp_path: Path) -> None:
    one, other = tmp_path / "one.json", tmp_path / "sub" / "two.json"
    other.parent.mkdir()
    for path in (one, other):
        path.write_text("{}")
    for form in ("--config={}", "--config {}", "--tensorizer-options=--dump=1,--plan={}"):
        same = keys.key(RAW, f"{ARGV} {form.format(one)}")
        assert keys.key(RAW, f"{ARGV} {form.format(other)}") == same
        other.write_text("[]")
        assert keys.key(RAW, f"{ARGV} {form.format(other)}") != same
        other.write_text("{}")


@pytest.mark.parametrize(
    "form", ["--plan:{}", "--plan='{}'", '--plan="{}"', "--plans=[a;{}]", "--plan={{file:{}}}", "--plan=({})"]
)
def test_a_file_is_found_behind_whatever_a_value_puts_around_it(keys: Keys, tmp_path: Path, form: str) -> None:
    """Left in by its path, a plan that changed would get the NEFF of the old one."""
    made = []
    plan = tmp_path / "plan.json"
    for content in ("one", "two"):
        plan.write_text(content)
        argv = [*ARGV.split(), "--tensorizer-options", form.format(plan)]
        made.append(keys.compute(RAW, argv).key)
    assert made[0] != made[1]


def test_a_path_with_blanks_in_one_element_enters_by_content(keys: Keys, tmp_path: Path) -> None:
    path = tmp_path / "a plan.json"
    path.write_text("1")
    argv = [*ARGV.split(), f"--plan={path}"]
    before = keys.key(RAW, argv)
    path.write_text("2")
    assert keys.key(RAW, argv) != before


def test_an_option_that_names_a_folder_is_not_cached(keys: Keys, tmp_path: Path) -> None:
    assert keys.compute(RAW, f"{ARGV} --profile={tmp_path}").uncacheable == "names_a_folder"


def test_a_file_named_only_in_the_environment_enters_by_content(keys: Keys, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("1")
    environ = {"NEURON_CC_FLAGS": f"--plan={path}"}
    before = keys.key(RAW, environ=environ)
    path.write_text("2")
    assert keys.key(RAW, environ=environ) != before


def test_a_kernel_enters_by_content_and_not_by_path(keys: Keys, tmp_path: Path) -> None:
    """UC-14"""
    here, there = tmp_path / "k.bin", tmp_path / "longer-name" / "kernel.bin"
    there.parent.mkdir()
    for path in (here, there):
        path.write_bytes(b"kernel")
    same = keys.key(kernel_graph(str(here)))
    assert keys.key(kernel_graph(str(there))) == same
    there.write_bytes(b"kerneL")
    assert keys.key(kernel_graph(str(there))) != same
    assert keys.key(kernel_graph(str(here), grid=3)) != same


def test_a_kernel_changed_behind_the_index_changes_the_key(keys: Keys, tmp_path: Path) -> None:
    """UC-14: the index knows the path, the content is looked at every time."""
    kernel = tmp_path / "k.bin"
    kernel.write_bytes(b"1")
    before = keys.key(kernel_graph(str(kernel)))
    kernel.write_bytes(b"2")
    assert keys.key(kernel_graph(str(kernel))) != before


def test_a_missing_kernel_makes_the_compile_uncacheable(keys: Keys, tmp_path: Path) -> None:
    """UC-14"""
    computed = keys.compute(kernel_graph(str(tmp_path / "gone")))
    assert (computed.key, computed.uncacheable) == (None, "missing_kernel")


def test_a_kernel_in_a_file_that_cannot_be_parsed_is_found_too(keys: Keys, tmp_path: Path) -> None:
    kernel = tmp_path / "k.bin"
    kernel.write_bytes(b"1")
    for config in (
        kernel_config(str(kernel)).encode(),
        json.dumps({"klir_binary": {"binary": str(kernel)}}).encode(),
    ):
        data = b"\x00\xffT" + config + b"T\x00 not a graph"
        before = keys.compute(data)
        assert before.uncacheable is None
        assert before.factors["ir"]["canonicaliser"] == "raw"
        kernel.write_bytes(kernel.read_bytes() + b"2")
        assert keys.compute(data).key != before.key


@pytest.mark.parametrize(
    "config",
    [
        base64.b64encode(b'{"klir_binary": 7}').decode(),
        base64.b64encode(b'{"klir_binary": {"path": "/x"}}').decode(),
        base64.b64encode(b'{"x": 1, "klir_binary": {"binary": "/x"').decode(),
        "klir_binary",
    ],
)
def test_a_kernel_whose_path_cannot_be_told_makes_the_compile_uncacheable(keys: Keys, config: str) -> None:
    graph = kernel_graph("/x").replace(kernel_config("/x").encode(), config.encode())
    assert keys.compute(graph).uncacheable == "unclear_kernel"


# No key at all.


@pytest.mark.parametrize(
    ("argv", "environ", "reason"),
    [
        (ARGV.replace("--target trn2 ", ""), {}, "no_target"),
        (ARGV.replace(" --output out.neff", ""), {}, "no_output"),
        (ARGV.replace("{input} ", ""), {}, "no_input"),
        (ARGV.replace("{input}", "gone.mlir"), {}, "no_input"),
        (ARGV.replace("{input}", "."), {}, "unreadable_input"),
        (ARGV + " --no_cache", {}, "no_cache"),
        (ARGV, {"NEURON_EXTRACT_GRAPHS_ONLY": "1"}, "extract_only"),
    ],
)
def test_a_compile_that_cannot_be_cached_says_why(
    keys: Keys, argv: str, environ: dict[str, str], reason: str
) -> None:
    """UC-20 for extraction mode."""
    computed = keys.compute(RAW, argv, environ=environ)
    assert (computed.key, computed.uncacheable) == (None, reason)


def test_extraction_mode_switched_off_is_no_extraction(keys: Keys) -> None:
    assert keys.key(RAW, environ={"NEURON_EXTRACT_GRAPHS_ONLY": "0"}) == keys.key(RAW)


def test_a_pipe_as_input_is_not_waited_for(keys: Keys, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert keys.compute(tmp_path / "pipe").uncacheable == "unreadable_input"


# The index.


def test_the_index_spares_the_second_parse_and_only_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = in_process(monkeypatch)
    keys = Keys(tmp_path)
    graph = kernel_graph(__file__)
    first, second = keys.compute(graph), keys.compute(graph, ARGV.replace("-O2", "-O1"))
    assert len(parsed) == 1
    assert first.factors["ir"] == second.factors["ir"]
    assert first.key != second.key
    assert second.about["ops"]["stablehlo.custom_call"] == 1


@pytest.mark.parametrize("damage", [b"", b"{}", b"x\n{}", None])
def test_a_damaged_index_entry_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes | None
) -> None:
    parsed = in_process(monkeypatch)
    keys = Keys(tmp_path)
    before = keys.key(RAW)
    (entry,) = keys.index.rglob("*.json")
    body = entry.read_bytes()
    entry.write_bytes(body.replace(b'"kind": "raw"', b'"kind": "hlo"') if damage is None else damage)
    assert keys.key(RAW) == before
    assert len(parsed) == 2


def test_an_entry_of_one_graph_copied_under_another_is_ignored(keys: Keys) -> None:
    first = keys.compute(RAW)
    (entry,) = keys.index.rglob("*.json")
    other = keys.compute(RAW + b"2")
    (moved,) = keys.index.rglob(f"{other.raw_digest}.json")
    moved.write_bytes(entry.read_bytes())
    assert keys.key(RAW + b"2") == other.key != first.key


def test_an_index_that_cannot_be_written_does_not_matter(keys: Keys, tmp_path: Path) -> None:
    before = keys.key(RAW)
    keys.index = tmp_path / "file" / "index"
    (tmp_path / "file").write_text("")
    assert keys.key(RAW) == before


def test_a_graph_that_only_lacks_a_library_is_asked_again(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlir, "BINDINGS", {})
    raw = keys.compute(kernel_graph(__file__))
    assert raw.factors["ir"]["canonicaliser"] == "raw"
    monkeypatch.undo()
    in_process(monkeypatch)
    assert keys.compute(kernel_graph(__file__)).factors["ir"]["canonicaliser"] == mlir.NAME


@pytest.mark.parametrize("where", ["ir", "binding"])
def test_a_graph_that_only_lacked_memory_is_parsed_again(
    keys: Keys, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Remembered as it is, this host would miss for good what all others hit."""

    def starved(*args: object) -> bytes:
        raise MemoryError

    owner, name = (ir, "_parse") if where == "ir" else (mlir, "_generic_text")
    monkeypatch.setattr(owner, name, starved)
    assert keys.compute(kernel_graph(__file__)).factors["ir"]["canonicaliser"] == "raw"
    monkeypatch.undo()
    in_process(monkeypatch)
    assert keys.compute(kernel_graph(__file__)).factors["ir"]["canonicaliser"] == mlir.NAME


def test_the_index_forgets_when_a_canonicaliser_changes() -> None:
    assert (hlo.NAME, mlir.NAME) == compute.CANONICALISERS


# The worker.


def test_the_worker_answers_as_this_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = kernel_graph(__file__)
    outside = Keys(tmp_path).key(graph)
    in_process(monkeypatch)
    keys = Keys(tmp_path)
    keys.index = tmp_path / "other"
    assert keys.key(graph) == outside


@pytest.mark.parametrize("program", ["/bin/true", "/nonexistent", ""])
def test_a_worker_that_fails_leaves_the_raw_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    computed = Keys(tmp_path).compute(kernel_graph(__file__))
    assert computed.uncacheable is None
    assert computed.factors["ir"] == {"kind": "raw", "canonicaliser": "raw", "digest": computed.raw_digest}
    assert computed.factors["files"][0][0] == "kernel"
    assert "worker" in computed.about["raw_because"]


def test_a_worker_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "hang"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(spawn, "SECONDS", 0.05)
    assert Keys(tmp_path).compute(RAW).factors["ir"]["kind"] == "raw"


def test_a_worker_prints_nothing_of_its_own(tmp_path: Path) -> None:
    """The bindings' notices must not reach a user: whatever they print, the launcher's streams stay clean."""
    (tmp_path / "m.mlir").write_bytes(kernel_graph(__file__))
    done = _python(
        "import sys; from neffcache_hook.key import compute, command, identity\n"
        "c = command.parse('compile m.mlir --target t --output o'.split(), {})\n"
        "k = compute.compute_key(c, cwd='.', environ={}, compiler=identity.CompilerIdentity('1', '2', 'wheel'), "
        "index_dir='index')\n"
        "assert k.factors['ir']['kind'] == 'mlir', k.about",
        tmp_path,
    )
    assert (done.stdout, done.stderr) == ("", "")


LIGHT = {"os", "sys", "fcntl", "hashlib", "json", "struct", "time", "errno", "stat"}


def test_a_local_hit_loads_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "m.mlir").write_bytes(kernel_graph(__file__))
    program = (
        "import sys, json, hashlib, fcntl, os, time, errno, stat, struct, neffcache_client.errors\n"
        "before = set(sys.modules)\n"
        "from neffcache_hook.key import compute, command, identity\n"
        "c = command.parse('compile m.mlir --target t --output o'.split(), {})\n"
        "k = compute.compute_key(c, cwd='.', environ={}, compiler=identity.CompilerIdentity('1', '2', 'wheel'), "
        "index_dir='index')\n"
        "assert k.key\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    _python(program, tmp_path)
    loaded = set(json.loads(_python(program, tmp_path).stdout))
    ours = {name for name in loaded if name.startswith("neffcache_hook")}
    assert loaded - ours <= LIGHT | {"collections.abc"}
    assert ours == {"neffcache_hook", "neffcache_hook.key"} | {
        f"neffcache_hook.key.{name}" for name in ("command", "compute", "identity", "index", "options", "version")
    }


def _python(program: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", "-c", program], cwd=cwd, check=True, capture_output=True, text=True, timeout=60
    )
