"""What a wheel contains, and what importing the client does not pull in."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    code = "import os, sys; os.chdir(sys.argv[1]); import hatchling.build as b; print(b.build_wheel(sys.argv[2]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT), str(out)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.split()[-1]


def test_the_wheel_holds_each_package_under_its_own_name(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {n.split("/")[0] for n in names}
    assert {"neffcache_client", "neffcache_server", "neffcache_hook"} <= tops
    assert all(t.startswith("neffcache") for t in tops), f"a user's own module could be shadowed: {tops}"


def test_the_wheel_holds_every_module_and_migration(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("client", "cache_server", "backend_hook"):
        for path in (ROOT / folder).rglob("*.py"):
            assert str(path.relative_to(ROOT / folder)) in names
    migrations = list((ROOT / "migrations").rglob("*.py"))
    assert migrations, "there is at least one migration"
    for path in migrations:
        assert f"neffcache_server/migrations/{path.relative_to(ROOT / 'migrations')}" in names


@pytest.mark.parametrize("module", ["neffcache_client", "neffcache_client.neff", "neffcache_client.wire"])
def test_the_client_imports_in_a_bare_environment(module: str, wheel: Path, tmp_path: Path) -> None:
    """No torch, no server dependency, not even httpx is needed to import these."""
    venv.create(tmp_path / "bare", with_pip=False)
    code = (
        f"import sys; sys.path.insert(0, {str(wheel)!r}); import {module}; "
        "bad = {'torch', 'fastapi', 'sqlalchemy', 'boto3', 'httpx'} & set(sys.modules); assert not bad, bad"
    )
    done = subprocess.run(
        [str(tmp_path / "bare/bin/python"), "-I", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
