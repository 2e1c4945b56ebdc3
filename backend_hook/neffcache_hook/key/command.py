"""The command line of a compile, taken apart."""

from __future__ import annotations

from collections.abc import Mapping


class CompileCommand:
    """A parsed `neuronx-cc ... compile ...`."""

    __slots__ = (
        "argv",
        "cache_dir",
        "compiler_argv",
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
        self.compiler_argv: list[str] = list(argv)
        self.input: str | None = None
        self.output: str | None = None
        self.target: str | None = None
        self.lnc: str | None = None
        self.options: list[tuple[str, str | None]] = []
        self.file_options: list[str] = []
        self.retry_failed = False
        self.no_cache = False
        self.cache_dir: str | None = None
        self.problem: str | None = None

    def with_output(self, path: str) -> list[str]:
        """`compiler_argv` with the output path replaced, its spelling kept."""
        raise NotImplementedError


def parse(argv: list[str], environ: Mapping[str, str]) -> CompileCommand | None:
    """Take `argv` (without the program's name) apart; None when it is not a compile and must pass through."""
    raise NotImplementedError
