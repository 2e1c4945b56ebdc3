"""Writes the reference pages of docs/ from the code: `make docs`. A test fails when they are out of date."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from neffcache_client.cli.main import COMMANDS
from neffcache_client.settings import SERVER_PREFIX, VARIABLES
from neffcache_server.app import create_app
from neffcache_server.settings import ServerSettings

DOCS = Path(__file__).resolve().parent
GENERATED = "<!-- made by docs/generate.py: edit the code it reads, then run `make docs` -->"

_SETTINGS_HEAD = f"""# Settings

{GENERATED}

Everything is set by environment variables. A name that starts with `NEFFCACHE_` and means nothing is warned about once.

## Ranks: client and launcher

| variable | meaning |
| --- | --- |
"""

_SETTINGS_ALSO = """
Also read:

- `TORCH_NEURONX_NEFF_CACHE_DIR` (default `/tmp/neff_cache`). neffcache keeps its local tier, spool, records and log in the folder
  `neffcache/` in it, and points the vendor's own cache at `by-compiler/<identity>/`, since that cache knows
  neither compiler versions nor `XLA_FLAGS` and its like; what is set after `import torch` or `neffcache run` comes too late for that.
- `TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR` (default `/tmp/local_cache`): locks and breaker state of this host only.
- `TORCH_NEURONX_NEFF_DISABLE_CACHE`, `TORCH_NEURONX_DISABLE_NEFF_CACHE`: either one switches neffcache off too.
- `NEURON_CC_FLAGS`: the flags in it that the compiler itself does not know (`--cache_dir=`, `--no_cache`,
  `--retry_failed_compilation`, `--log_level=`) act on neffcache and never reach the compiler.

## Server

Options of `neffcache serve` go before the environment.

| variable | default | meaning |
| --- | --- | --- |
"""

_API_HEAD = f"""# HTTP API

{GENERATED}

JSON in and out; the types are the dataclasses of `neffcache_client/wire/`. Errors are problem documents (RFC 9457,
`application/problem+json`) with a stable `code`. A fault of the database or the store is 5xx, never 404. A running server
serves the OpenAPI document at `/openapi.json`.

`needs` names the role that the caller's token must have in the namespace, or in every namespace where the call names
none; admin includes write, write includes read. What else the roles mean: [operations.md](operations.md).

| call | needs | does | answers |
| --- | --- | --- | --- |
"""

_CLI_HEAD = f"""# The `neffcache` command

{GENERATED}

Exit codes: 0 done; 1 it could not be done; 2 the question or the set-up is wrong; 130 stopped by Ctrl-C. Errors are one
sentence on stderr. `NEFFCACHE_URL`, `NEFFCACHE_TOKEN` and `NEFFCACHE_NAMESPACE` say which cache is meant.
"""


def settings_page() -> str:
    """docs/settings.md"""
    client = "".join(f"| `{name}` | {text} |\n" for name, text in VARIABLES.items())
    server = "".join(
        f"| `{SERVER_PREFIX}{name.upper()}` | {_default(field)} | {field.description} |\n"
        for name, field in ServerSettings.model_fields.items()
    )
    return _SETTINGS_HEAD + client + _SETTINGS_ALSO + server


def api_page() -> str:
    """docs/http-api.md"""
    rows = []
    for path, operations in create_app(ServerSettings()).openapi()["paths"].items():
        for method, operation in operations.items():
            does = " ".join((operation.get("description") or operation["summary"]).split("\n\n")[0].split())
            answers = ", ".join(sorted(operation["responses"]))
            needs = operation["x-neffcache-role"]
            rows.append(f"| `{method.upper()} {path}` | {needs} | {does} | {answers} |\n")
    return _API_HEAD + "".join(rows)


def cli_page() -> str:
    """docs/cli.md"""
    os.environ["COLUMNS"] = "100"
    sections = []
    for name, command in COMMANDS.items():
        parser = argparse.ArgumentParser(prog="neffcache")
        sub: Any = parser.add_subparsers()
        getattr(importlib.import_module(command.module), command.register)(sub)
        texts = [sub.choices[name].format_help()]
        for action in sub.choices[name]._actions:
            if isinstance(action, argparse._SubParsersAction):
                texts += [inner.format_help() for inner in action.choices.values()]
        blocks = "\n".join(f"```\n{text.rstrip()}\n```\n" for text in texts)
        sections.append(f"\n## `neffcache {name}`\n\n{command.help[0].upper()}{command.help[1:]}.\n\n{blocks}")
    return _CLI_HEAD + "".join(sections)


def _default(field: Any) -> str:
    value = field.get_default()
    if field.default_factory is not None or value in (None, ""):
        return "–"
    return f"`{value}`"


PAGES: dict[str, Callable[[], str]] = {
    "settings.md": settings_page,
    "http-api.md": api_page,
    "cli.md": cli_page,
}


def main() -> int:
    """Write every page."""
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
