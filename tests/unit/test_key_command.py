"""The command line of a compile, and the table of options."""

from __future__ import annotations

import pytest
from neffcache_hook.key.command import UNKNOWN, CompileCommand, parse
from neffcache_hook.key.options import BY_SPELLING, IN_KEY, NOT_IN_KEY, TABLE, WRAPPER_ONLY

TENSORIZER = (
    "--tensorizer-options=--enable-ccop-compute-overlap --cc-pipeline-tiling-factor=2 --vectorize-strided-dma "
)
INTERNAL = "--internal-hlo2tensorizer-options= --modular-flow-mac-threshold=10  --verify-hlo=true"

# (argv, input, output, target, lnc, canonical options): the callers of facts/neuron-stack.md.
CALLERS = {
    "torchneuron compile": (
        "compile T/module.mlir --framework XLA --target trn2 --lnc 2 -O2 --model-type transformer "
        "--auto-cast=none --output T/module.neff",
        ("T/module.mlir", "T/module.neff", "trn2", "2"),
        [("auto-cast", "none"), ("framework", "XLA"), ("model-type", "transformer"), ("optlevel", "2")],
    ),
    "torchneuron eager": (
        "compile T/module.hlo.pb --framework XLA --target trn2 --lnc 2 -O1 --model-type transformer "
        "--auto-cast=none --output T/module.neff",
        ("T/module.hlo.pb", "T/module.neff", "trn2", "2"),
        [("auto-cast", "none"), ("framework", "XLA"), ("model-type", "transformer"), ("optlevel", "1")],
    ),
    "torchneuron python twin": (
        "compile IN --framework XLA --target T --model-type transformer --lnc L -O1 --auto-cast=none --output OUT",
        ("IN", "OUT", "T", "L"),
        [("auto-cast", "none"), ("framework", "XLA"), ("model-type", "transformer"), ("optlevel", "1")],
    ),
    "libneuronxla 2.12": (
        "--target=trn1 compile --framework XLA W/model.MODULE_0+2c2d707e.hlo.pb --output W/m.neff "
        "--model-type=transformer --auto-cast=none --verbose=35",
        ("W/model.MODULE_0+2c2d707e.hlo.pb", "W/m.neff", "trn1", None),
        [("auto-cast", "none"), ("framework", "XLA"), ("model-type", "transformer")],
    ),
    "libneuronxla 2.15": (
        "compile --target=trn1 --framework=XLA W/m.hlo_module.pb --output W/m.neff --model-type=transformer "
        "--auto-cast=none --execute-repetition=1 --verbose=35",
        ("W/m.hlo_module.pb", "W/m.neff", "trn1", None),
        [("auto-cast", "none"), ("execute-repetition", "1"), ("framework", "XLA"), ("model-type", "transformer")],
    ),
    "libneuronxla 2.26": (
        "compile --framework=XLA IN.hlo_module.pb --output OUT --target=trn2 --model-type transformer --verbose=35",
        ("IN.hlo_module.pb", "OUT", "trn2", None),
        [("framework", "XLA"), ("model-type", "transformer")],
    ),
    "vllm": (
        "compile H/graph.hlo --framework XLA --target trn2 --output H/graph_ab.neff --logfile H/log-neuron-cc.txt "
        "--logical-nc-config=2",
        ("H/graph.hlo", "H/graph_ab.neff", "trn2", "2"),
        [("framework", "XLA")],
    ),
}


def parsed(argv: str | list[str], environ: dict[str, str] | None = None) -> CompileCommand:
    command = parse(argv.split() if isinstance(argv, str) else argv, environ or {})
    assert command is not None
    return command


@pytest.mark.parametrize("caller", CALLERS)
def test_every_callers_command_line_is_understood(caller: str) -> None:
    """UC-08: each caller's command line from the fact sheet."""
    text, expected, options = CALLERS[caller]
    argv = text.split()
    command = parsed(argv)
    assert (command.input, command.output, command.target, command.lnc) == expected
    assert command.options == options
    assert command.compiler_argv == argv
    assert command.problem is None


def test_an_element_with_inner_and_trailing_blanks_stays_one_element() -> None:
    """UC-08: NxD Inference's options reach the compiler byte for byte."""
    argv = ["compile", "in.pb", "--target=inf2", TENSORIZER, "--lnc=1", "-O1", INTERNAL, "--output", "o.neff"]
    command = parsed(argv)
    assert command.compiler_argv == argv
    assert ("tensorizer-options", TENSORIZER.partition("=")[2]) in command.options
    assert ("internal-hlo2tensorizer-options", INTERNAL.partition("=")[2]) in command.options


@pytest.mark.parametrize(
    "argv",
    [
        "--target trn2 compile --lnc=2 --optlevel=1 in.pb --output=o --auto-cast none",
        "compile -o o -lnc 2 -O 1 --auto-cast=none in.pb --target=trn2 --verbose 35 --logfile=/x --workdir /y",
        "compile in.pb --logical-nc-config 2 --optlevel 1 --auto-cast none --target trn2 --output o --no_cache",
    ],
)
def test_spelling_and_order_do_not_matter(argv: str) -> None:
    """UC-08"""
    command = parsed(argv)
    assert (command.input, command.output, command.target, command.lnc) == ("in.pb", "o", "trn2", "2")
    assert command.options == [("auto-cast", "none"), ("optlevel", "1")]


def test_unknown_options_are_kept_verbatim_and_in_order() -> None:
    command = parsed("compile in.pb --zeta 1 --alpha=2 -O1 --target trn2 --output o --flag")
    assert command.options == [
        ("optlevel", "1"),
        *((UNKNOWN, token) for token in ("--zeta", "1", "--alpha=2", "--flag")),
    ]


def test_repeated_options_are_all_kept_in_order() -> None:
    command = parsed("compile in.pb -O1 --target trn1 --auto-cast none -O2 --target trn2 --output o")
    assert [v for n, v in command.options if n == "optlevel"] == ["1", "2"]
    assert [v for n, v in command.options if n == "target"] == ["trn1", "trn2"]
    assert command.target == "trn2"


def test_wrapper_only_options_act_and_never_reach_the_compiler() -> None:
    """UC-08, UC-02"""
    argv = "compile in.pb --retry_failed_compilation --cache_dir=/c --log_level=INFO --no_cache --target t --output o"
    command = parsed(argv)
    assert " ".join(command.compiler_argv) == "compile in.pb --target t --output o"
    assert (command.retry_failed, command.no_cache, command.cache_dir) == (True, True, "/c")
    assert command.options == []


def test_wrapper_only_options_act_from_the_environment() -> None:
    flags = "--retry_failed_compilation --cache_dir /c"
    command = parsed("compile in.pb --target t --output o", {"NEURON_CC_FLAGS": flags})
    assert (command.retry_failed, command.cache_dir) == (True, "/c")
    assert command.env_options == []


def test_flags_in_the_environment_count_only_where_the_command_line_does_not_repeat_them() -> None:
    argv = "compile in.pb --target trn2 -O1 --new 3 --output o"
    assert parsed(argv, {"NEURON_CC_FLAGS": "--target=trn2 --optlevel 1 --verbose 10"}).env_options == []
    assert parsed(argv, {"NEURON_CC_FLAGS": "--new 3"}).env_options == []
    assert parsed(argv, {"NEURON_CC_FLAGS": "-O2"}).env_options == [("optlevel", "2")]
    assert parsed(f"{argv} -O3", {"NEURON_CC_FLAGS": "-O1"}).env_options == [("optlevel", "1")]


@pytest.mark.parametrize(
    "argv", ["", "--version", "list-operators --framework XLA", "compile --help", "--verbose 35", "x compile in.pb"]
)
def test_what_is_no_compile_passes_through(argv: str) -> None:
    assert parse(argv.split(), {}) is None


def test_a_value_that_looks_like_an_option_is_never_swallowed() -> None:
    """`--verbose` stays out of the key; `-O1` behind it must not vanish with it."""
    command = parsed("compile in.pb --target t --output o --verbose -O1")
    assert command.options == [("optlevel", "1"), (UNKNOWN, "--verbose")]


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ("compile --target t --output o", "no_input"),
        ("compile a.pb b.pb --target t --output o", "several_inputs"),
        ("compile a.pb --target t", "no_output"),
        ("compile a.pb --target t --output=", "no_output"),
    ],
)
def test_a_command_that_cannot_be_cached_says_why(argv: str, problem: str) -> None:
    assert parsed(argv).problem == problem


def test_a_lone_operand_behind_an_unknown_flag_is_the_input_and_its_path_no_factor() -> None:
    command = parsed("compile --brand-new /tmp/a1/in.pb --target t --output o")
    assert command.input == "/tmp/a1/in.pb"
    assert command.options == [(UNKNOWN, "--brand-new")]


def test_an_operand_elsewhere_beats_the_value_of_an_unknown_option() -> None:
    command = parsed("compile in.pb --brand-new fast --target t --output o")
    assert command.input == "in.pb"
    assert command.options == [(UNKNOWN, "--brand-new"), (UNKNOWN, "fast")]


def test_the_output_is_replaced_in_its_own_spelling() -> None:
    command = parsed("compile in.pb --no_cache --output=a -o b --target t --output c")
    changed = " ".join(command.with_output("/p/q.neff"))
    assert changed == "compile in.pb --output=/p/q.neff -o /p/q.neff --target t --output /p/q.neff"
    assert command.output == "c"
    assert command.compiler_argv[2] == "--output=a"


def test_the_table_names_each_spelling_once_and_each_effect_from_the_list() -> None:
    spellings = [s for option in TABLE for s in option.spellings]
    assert len(spellings) == len(set(spellings)) == len(BY_SPELLING)
    assert {option.effect for option in TABLE} == {IN_KEY, NOT_IN_KEY, WRAPPER_ONLY}
    assert all(option.arity in (0, 1) for option in TABLE)
    assert {o.name for o in TABLE if o.effect == NOT_IN_KEY} == {
        "output",
        "workdir",
        "logfile",
        "logfile-verbose",
        "verbose",
    }
