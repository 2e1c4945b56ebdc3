"""`import torch` alone switches the cache on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.compilers import FakeCompiler, environment
from support.launchers import UNREACHABLE

CHILD = """
import os, shutil, sys
before = os.environ["PATH"]
import torch
print(before == os.environ["PATH"])
print(shutil.which("neuronx-cc"))
print(os.environ.get("TORCH_NEURONX_NEFF_CACHE_DIR"))
sys.stdout.flush()
pid = os.fork()
if pid == 0:
    os.execvp("neuronx-cc", ["neuronx-cc", "compile", sys.argv[1], "--framework", "XLA", "--target", "trn2",
                             "--output", sys.argv[1] + ".neff"])
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize("url", [None, UNREACHABLE])
def test_import_torch_puts_the_launcher_first_only_with_a_url(tmp_path: Path, url: str | None) -> None:
    compiler = FakeCompiler(tmp_path / "compilers")
    env = environment(compiler.folder, cache=tmp_path, url=url)
    graph = tmp_path / "graph.hlo.pb"
    graph.write_bytes(b"graph")
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(graph)], env=env, capture_output=True, text=True, check=True
    )
    unchanged, found, vendor = done.stdout.splitlines()
    assert done.stderr == ""
    assert Path(f"{graph}.neff").is_file()
    assert compiler.runs == 1
    if url is None:
        assert (unchanged, found, vendor) == ("True", str(compiler.path), str(tmp_path / "neff_cache"))
        assert f"--output {graph}.neff" in compiler.command_lines[0]
    else:
        assert "neffcache-launcher" in found
        assert "/by-compiler/" in vendor
        assert "/.neffcache-" in compiler.command_lines[0]
