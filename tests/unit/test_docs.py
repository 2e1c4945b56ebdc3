"""The documentation says what the code does: settings, routes and commands."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from neffcache_client.settings import SERVER_PREFIX, VARIABLES
from neffcache_server.settings import ServerSettings

ROOT = Path(__file__).resolve().parents[2]
PROSE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["settings.md", "http-api.md", "cli.md"])
def test_a_reference_page_is_what_the_code_says(name: str, generate: ModuleType) -> None:
    assert (ROOT / "docs" / name).read_text() == generate.PAGES[name](), "out of date: run `make docs`"


def test_every_setting_has_a_description() -> None:
    assert all(VARIABLES.values())
    assert all(f.description for f in ServerSettings.model_fields.values())


@pytest.mark.parametrize("path", PROSE, ids=lambda p: p.name)
def test_no_document_names_a_variable_that_does_not_exist(path: Path) -> None:
    known = set(VARIABLES) | {SERVER_PREFIX + n.upper() for n in ServerSettings.model_fields}
    named = set(re.findall(r"\bNEFFCACHE_[A-Z0-9_]*[A-Z0-9]\b", path.read_text()))
    assert named <= known | {"NEFFCACHE_SERVER"}


@pytest.mark.parametrize("path", PROSE, ids=lambda p: p.name)
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target
