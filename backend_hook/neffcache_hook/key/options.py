"""The options of neuronx-cc that are known by name: one table, which docs/compile-key.md repeats.

Defaults are for the reader: they differ between compiler versions, so an option that is left out and one that
is given its default make two keys. An option that is not in the table enters the key verbatim and in order.
"""

from __future__ import annotations

IN_KEY = "in the key"
NOT_IN_KEY = "not in the key"
WRAPPER_ONLY = "wrapper only, stripped"


class Option:
    """One option: `spellings`, `arity` 0 or 1, `default`, `effect`, whether its value may name `files`, and `why`."""

    __slots__ = ("arity", "default", "effect", "files", "name", "spellings", "why")

    def __init__(
        self, name: str, spellings: str, arity: int, default: str, effect: str, why: str, *, files: bool = False
    ) -> None:
        self.name = name
        self.spellings = tuple(spellings.split())
        self.arity = arity
        self.default = default
        self.effect = effect
        self.why = why
        self.files = files


TABLE: tuple[Option, ...] = (
    Option("framework", "--framework", 1, "none", IN_KEY, "how the input is read"),
    Option("target", "--target", 1, "none", IN_KEY, "the chip; its own factor"),
    Option("lnc", "--lnc --logical-nc-config -lnc", 1, "by target", IN_KEY, "cores per logical core; its own factor"),
    Option("optlevel", "--optlevel -O", 1, "2", IN_KEY, "optimisation level"),
    Option("model-type", "--model-type", 1, "generic", IN_KEY, "optimisations for a kind of model"),
    Option("auto-cast", "--auto-cast", 1, "none", IN_KEY, "which operations are cast"),
    Option("auto-cast-type", "--auto-cast-type", 1, "bf16", IN_KEY, "what they are cast to"),
    Option(
        "distribution-strategy", "--distribution-strategy", 1, "none", IN_KEY, "optimisations for a kind of sharding"
    ),
    Option(
        "enable-mixed-precision-accumulation",
        "--enable-mixed-precision-accumulation",
        0,
        "off",
        IN_KEY,
        "changes the arithmetic",
    ),
    Option("enable-saturate-infinity", "--enable-saturate-infinity", 0, "off", IN_KEY, "changes the arithmetic"),
    Option("enable-fast-context-switch", "--enable-fast-context-switch", 0, "off", IN_KEY, "changes the program"),
    Option(
        "enable-fast-loading-neuron-binaries",
        "--enable-fast-loading-neuron-binaries",
        0,
        "off",
        IN_KEY,
        "changes how the NEFF is packed",
    ),
    Option("execute-repetition", "--execute-repetition", 1, "1", IN_KEY, "repeats the program"),
    Option(
        "tensorizer-options",
        "--tensorizer-options",
        1,
        "none",
        IN_KEY,
        "one element, blanks and all; may name files",
        files=True,
    ),
    Option(
        "internal-hlo2tensorizer-options",
        "--internal-hlo2tensorizer-options",
        1,
        "none",
        IN_KEY,
        "one element, blanks and all; may name files",
        files=True,
    ),
    Option("output", "--output -o", 1, "file.neff", NOT_IN_KEY, "where the NEFF goes"),
    Option("workdir", "--workdir", 1, "the current folder", NOT_IN_KEY, "where scratch goes"),
    Option("logfile", "--logfile", 1, "log-neuron-cc.txt", NOT_IN_KEY, "where the log goes"),
    Option("logfile-verbose", "--logfile-verbose", 1, "info", NOT_IN_KEY, "how much is logged"),
    Option("verbose", "--verbose", 1, "warning", NOT_IN_KEY, "how much is printed"),
    Option(
        "retry_failed_compilation",
        "--retry_failed_compilation",
        0,
        "off",
        WRAPPER_ONLY,
        "passes over a stored failure",
    ),
    Option("no_cache", "--no_cache", 0, "off", WRAPPER_ONLY, "this compile is not cached"),
    Option("cache_dir", "--cache_dir", 1, "none", WRAPPER_ONLY, "the vendor's cache folder"),
    Option("log_level", "--log_level", 1, "none", WRAPPER_ONLY, "the vendor's wrapper's log"),
)

BY_SPELLING: dict[str, Option] = {spelling: option for option in TABLE for spelling in option.spellings}

_JOINED = "-O"
"""The one spelling whose value may be glued to it: `-O1`."""


def split(token: str) -> tuple[Option | None, str | None]:
    """(known option or None, the value in the same element or None) of an argv element that starts with `-`."""
    spelling, equals, value = token.partition("=")
    option = BY_SPELLING.get(spelling)
    if option is not None:
        # `--no_cache=1` is no spelling that the table knows: unknown, so verbatim in the key.
        if equals and not option.arity:
            return None, None
        return option, value if equals else None
    if token.startswith(_JOINED):
        return BY_SPELLING[_JOINED], token[len(_JOINED) :]
    return None, None
