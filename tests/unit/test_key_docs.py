"""docs/compile-key.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from neffcache_hook.key import command, compute
from neffcache_hook.key.options import TABLE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compile-key.md"


def section(title: str) -> str:
    text = PAGE.read_text()
    start = text.index(f"## {title}\n")
    return text[start : text.find("\n## ", start)] if "\n## " in text[start:] else text[start:]


def rows(title: str) -> list[str]:
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return lines[2:]


def test_the_table_of_options_is_the_codes_table() -> None:
    assert rows("Options") == [
        f"| {' '.join(f'`{s}`' for s in option.spellings)} | {option.arity} | {option.default} | {option.effect} "
        f"| {option.why} |"
        for option in TABLE
    ]


def test_every_variable_of_the_allow_list_is_named() -> None:
    env = next(row for row in rows("What enters") if row.startswith("| `env`"))
    for name in (*compute.ENVIRONMENT, f"{compute.ENVIRONMENT_PREFIX}*", compute.FLAGS_VARIABLE):
        assert f"`{name}`" in env


def test_every_reason_for_no_key_is_explained() -> None:
    source = "".join(Path(module.__file__ or "").read_text() for module in (command, compute))
    raised = set(re.findall(r'(?:_Uncacheable\(|problem = )"(\w+)"', source))
    raised |= set(re.findall(r'_Uncacheable\("(\w+)" if .* else "(\w+)"\)', source)[0])
    documented = set(re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in rows("When there is no key"))))
    assert documented == raised


def test_the_recipe_and_its_canonicalisers_are_in_the_history() -> None:
    last = rows("Recipes")[-1]
    assert last.startswith(f"| {compute.RECIPE} | {', '.join(f'`{c}`' for c in compute.CANONICALISERS)} |")
