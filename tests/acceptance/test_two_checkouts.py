"""One training script in two checkouts, one of them with ten lines inserted above the model: who compiles again?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from neffcache_hook.cpu.compiler import install_compiler
from support.server import running_server

SCRIPT = """\
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 4)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


torch.manual_seed(0)
torch.set_num_threads(1)
loss = torch.compile(Model(), backend="neuron", dynamic=False)(torch.ones(4, 16)).square().mean()
loss.backward()
print(f"loss {loss.item():.6f}")
"""
GRAPHS = 2  # forward and backward


def checkout(folder: Path, inserted: str = "") -> Path:
    """A checkout of the script at a path of its own."""
    folder.mkdir(parents=True)
    script = folder / "train.py"
    imports, model = SCRIPT.split("\n\n\n", 1)
    script.write_text(f"{imports}\n{inserted}\n\n\n{model}")
    return script


class Job:
    """Runs the script with the CPU stand-in, with or without neffcache in front of it; counts real compiles."""

    def __init__(self, folder: Path, url: str | None) -> None:
        self.folder = folder
        self.url = url
        install_compiler(str(folder / "bin"))

    def compiles(self, script: Path, host: str) -> tuple[int, str]:
        """How often the compiler ran for one run of `script` on `host`, and what the script printed."""
        log = self.folder / "compiles.log"
        log.unlink(missing_ok=True)
        place = self.folder / host
        env = {
            **{k: v for k, v in os.environ.items() if not k.startswith("NEFFCACHE_")},
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "TORCH_NEURONX_NEFF_CACHE_DIR": str(place / "neff_cache"),
            "TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR": str(place / "local_cache"),
            "NEFFCACHE_CPU_COMPILER_LOG": str(log),
            **({"NEFFCACHE_URL": self.url} if self.url else {}),
        }
        done = subprocess.run(
            [sys.executable, script.name],
            cwd=script.parent,
            env=env,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return len(log.read_text().splitlines()) if log.exists() else 0, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_lines_above_the_model_compile_nothing_again(tmp_path: Path) -> None:
    """UC-05. The built-in folder is given the easiest case, one host's own folder; neffcache gets a new host."""
    first = checkout(tmp_path / "alice" / "model")
    second = checkout(tmp_path / "bob" / "somewhere" / "else", "# a comment\n" * 10)
    with running_server(tmp_path / "server") as server:
        built_in, cached = Job(tmp_path / "built-in", None), Job(tmp_path / "neffcache", server.url)
        table = {
            "built-in folder": [built_in.compiles(first, "host"), built_in.compiles(second, "host")],
            "neffcache": [cached.compiles(first, "host0"), cached.compiles(second, "host1")],
        }
    print("\n| | first checkout | second checkout, ten lines inserted |\n| --- | --- | --- |")
    for name, runs in table.items():
        print(f"| {name} | {runs[0][0]} compiles | {runs[1][0]} compiles |")
    assert [count for count, _ in table["built-in folder"]] == [GRAPHS, GRAPHS]
    assert [count for count, _ in table["neffcache"]] == [GRAPHS, 0]
    assert len({said for runs in table.values() for _, said in runs}) == 1
