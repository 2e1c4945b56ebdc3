"""The command line of a compile, taken apart by the table of known options.

Nothing here touches the file system: whether a value names a file is found out when the key is computed.
"""

from __future__ import annotations

from collections.abc import Mapping

from neffcache_hook.key.options import IN_KEY, WRAPPER_ONLY, Option, split

UNKNOWN = "?"
"""Stands for the name of an option that is not in the table; its element of argv is the value, verbatim."""

_PASS_THROUGH = ("-h", "--help", "--version")
_OWN_FACTOR = ("target", "lnc")


class CompileCommand:
    """A parsed `neuronx-cc ... compile ...`.

    `compiler_argv` is what the compiler is given: `argv` without the wrapper-only options, all else byte for
    byte. `options` holds the known options that belong into the key by canonical name, sorted and repeated ones
    in order, then the unknown ones verbatim under the name `?`. `target` and `lnc` are not among them unless they are
    given more than once. `env_options` holds what NEURON_CC_FLAGS says beyond that. `problem` is the reason why the
    command cannot be cached, or None.
    """

    __slots__ = (
        "_output_at",
        "argv",
        "cache_dir",
        "compiler_argv",
        "env_options",
        "file_options",
        "input",
        "lnc",
        "no_cache",
        "options",
        "output",
        "problem",
        "retry_failed",
        "target",
    )

    def __init__(self, argv: list[str]) -> None:
        self.argv = argv
        self.compiler_argv: list[str] = []
        self.input: str | None = None
        self.output: str | None = None
        self.target: str | None = None
        self.lnc: str | None = None
        self.options: list[tuple[str, str | None]] = []
        self.env_options: list[tuple[str, str | None]] = []
        self.file_options: list[str] = []
        self.retry_failed = False
        self.no_cache = False
        self.cache_dir: str | None = None
        self.problem: str | None = None
        self._output_at: list[tuple[int, str]] = []

    def with_output(self, path: str) -> list[str]:
        """`compiler_argv` with every output path replaced by `path`, the spelling kept."""
        changed = list(self.compiler_argv)
        for index, prefix in self._output_at:
            changed[index] = prefix + path
        return changed


class _Scan:
    """One pass over argv."""

    def __init__(self) -> None:
        self.kept: list[str] = []
        self.known: list[tuple[Option, str | None]] = []
        self.unknown: list[str] = []
        self.certain: list[str] = []  # operands that cannot be the value of an unknown option
        self.possible: list[str] = []  # operands right behind an unknown option
        self.output_at: list[tuple[int, str]] = []

    def run(self, argv: list[str], *, subcommand: bool) -> bool:
        """Scan `argv`; False when `subcommand` is asked for and it is not `compile`."""
        at = 0
        after_unknown = only_operands = False
        while at < len(argv):
            token = argv[at]
            at += 1
            if only_operands or not token.startswith("-") or token == "-":
                if subcommand:
                    if token != "compile":
                        return False
                    subcommand = False
                    self.kept.append(token)
                else:
                    self._operand(token, after_unknown)
                after_unknown = False
                continue
            if token == "--":
                only_operands = True
                self.kept.append(token)
                continue
            option, value = split(token)
            if option is not None and option.arity and value is None and not _is_value(argv[at : at + 1]):
                # Were `-O1` in `--verbose -O1` taken for the value of an option that stays out of the key, it would
                # stay out too. Not what the table expects: verbatim.
                option = None
            after_unknown = option is None
            if option is None:
                self.unknown.append(token)
                self.kept.append(token)
            else:
                at = self._option(argv, at, option, value)
        return not subcommand

    def _operand(self, token: str, after_unknown: bool) -> None:
        self.kept.append(token)
        (self.possible if after_unknown else self.certain).append(token)
        if after_unknown:
            self.unknown.append(token)

    def _option(self, argv: list[str], at: int, option: Option, value: str | None) -> int:
        elements = [argv[at - 1]]
        prefix = argv[at - 1][: len(argv[at - 1]) - len(value)] if value is not None else ""
        if option.arity and value is None:
            value = argv[at]
            elements.append(value)
            at += 1
        self.known.append((option, value))
        if option.effect == WRAPPER_ONLY:
            return at
        self.kept += elements
        if option.name == "output" and value is not None:
            self.output_at.append((len(self.kept) - 1, prefix))
        return at


def _is_value(following: list[str]) -> bool:
    """Whether the next element of argv can be an option's value; with a blank inside it can, dash or not."""
    return bool(following) and (not following[0].startswith("-") or " " in following[0] or following[0] == "-")


def parse(argv: list[str], environ: Mapping[str, str]) -> CompileCommand | None:
    """Take `argv` (without the program's name) apart; None when it is not a compile and must pass through.

    The wrapper-only options act whether they are in `argv` or only in NEURON_CC_FLAGS.
    """
    if any(token in _PASS_THROUGH for token in argv):
        return None
    scan = _Scan()
    if not scan.run(argv, subcommand=True):
        return None
    cmd = CompileCommand(list(argv))
    cmd.compiler_argv = scan.kept
    cmd._output_at = scan.output_at
    _choose_input(cmd, scan)
    _take_known(cmd, scan)
    _take_environment(cmd, environ.get("NEURON_CC_FLAGS", ""))
    if cmd.problem is None and not cmd.output:
        cmd.problem = "no_output"
    return cmd


def _choose_input(cmd: CompileCommand, scan: _Scan) -> None:
    """Which operand is the input.

    `--new in.pb` may be an option with a value or a flag and the input: an operand that stands elsewhere wins,
    a lone candidate is taken, and anything less certain is not cached.
    """
    candidates = scan.certain or scan.possible
    if not candidates:
        cmd.problem = "no_input"
        return
    if len(candidates) > 1:
        cmd.problem = "several_inputs"
    cmd.input = candidates[0]
    if not scan.certain:
        # The input's path must stay out of the key.
        scan.unknown.remove(cmd.input)


def _take_known(cmd: CompileCommand, scan: _Scan) -> None:
    values: dict[str, list[str | None]] = {}
    for option, value in scan.known:
        values.setdefault(option.name, []).append(value)
    cmd.output = _last(values, "output")
    cmd.target = _last(values, "target")
    cmd.lnc = _last(values, "lnc")
    _take_wrapper_only(cmd, scan.known)
    cmd.options = in_key(scan.known) + [(UNKNOWN, token) for token in scan.unknown]
    cmd.file_options = _file_values(scan)


def _file_values(scan: _Scan) -> list[str]:
    """The values that may name files: those of options known to, and everything unknown."""
    return [value for option, value in scan.known if option.files and value] + scan.unknown


def _take_environment(cmd: CompileCommand, flags: str) -> None:
    """NEURON_CC_FLAGS: what the command line does not repeat enters the key.

    Frameworks copy it into argv, so that it usually adds nothing. It is split at blanks, as TorchNeuron does.
    """
    if not flags.strip():
        return
    scan = _Scan()
    scan.run(flags.split(), subcommand=False)
    _take_wrapper_only(cmd, scan.known)
    given: dict[str, list[str | None]] = {}
    for name, value in cmd.options:
        given.setdefault(name if name != UNKNOWN else f"?{value}", []).append(value)
    given.setdefault("target", []).append(cmd.target)
    given.setdefault("lnc", []).append(cmd.lnc)
    tokens = [(UNKNOWN, token) for token in [*scan.unknown, *scan.certain]]
    every = [(o.name, v) for o, v in scan.known if o.effect == IN_KEY] + tokens
    for name, value in every:
        if given.get(name if name != UNKNOWN else f"?{value}") != [value]:
            cmd.env_options = every
            cmd.file_options += _file_values(scan) + scan.certain
            return


def _take_wrapper_only(cmd: CompileCommand, known: list[tuple[Option, str | None]]) -> None:
    names = {option.name: value for option, value in known if option.effect == WRAPPER_ONLY}
    cmd.retry_failed = cmd.retry_failed or "retry_failed_compilation" in names
    cmd.no_cache = cmd.no_cache or "no_cache" in names
    cmd.cache_dir = cmd.cache_dir or names.get("cache_dir")


def in_key(known: list[tuple[Option, str | None]]) -> list[tuple[str, str | None]]:
    """The known options that enter the key, sorted by name; repeated ones in order."""
    named = [(option.name, value) for option, value in known if option.effect == IN_KEY]
    names = [name for name, _ in named]
    kept = [(n, v) for n, v in named if n not in _OWN_FACTOR or names.count(n) > 1]
    return sorted(kept, key=lambda pair: pair[0])


def _last(values: dict[str, list[str | None]], name: str) -> str | None:
    return values[name][-1] if name in values else None
