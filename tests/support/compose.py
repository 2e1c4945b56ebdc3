"""docker-compose.yml without a container engine: its commands and environment, for plain processes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
_VARIABLE = re.compile(r"\$\{(\w+)(?::([?-])([^}]*))?\}")


class VariableMissing(Exception):
    """What `docker compose` says before it starts anything."""


def compose(variables: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The services, with `.env` put in. Raises VariableMissing as `docker compose` would."""
    document = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    services: dict[str, dict[str, Any]] = _filled(document["services"], variables)
    return services


def _filled(value: Any, variables: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _filled(inner, variables) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, variables) for inner in value]
    return _VARIABLE.sub(lambda m: _value(m, variables), value) if isinstance(value, str) else value


def _value(match: re.Match[str], variables: Mapping[str, str]) -> str:
    name, kind, text = match.groups()
    given = variables.get(name, "")
    if not given and kind == "?":
        raise VariableMissing(f"required variable {name} is missing a value: {text}")
    return given or (text if kind == "-" else "")


def variables_in_use() -> dict[str, str]:
    """Every variable of the file, and what stands behind its colon: `?` required, `-` a default."""
    text = (ROOT / "docker-compose.yml").read_text()
    return {m[1]: (m[2] or "") for m in _VARIABLE.finditer(text)}


def dotenv_example() -> dict[str, str]:
    """.env.example as it is."""
    lines = (ROOT / ".env.example").read_text().splitlines()
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {name: value for name, _, value in pairs}
