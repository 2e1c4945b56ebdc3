"""Starting the launcher as a rank does."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import NamedTuple

from neffcache_hook.launcher.shim import make_shim

from support.compilers import FakeCompiler, environment

GRAPH = (Path(__file__).resolve().parents[1] / "corpus" / "sort.hlo.pb").read_bytes()
"""A real graph, as HLO: read without MLIR's bindings, so that 64 launchers at once do not starve a small machine."""

UNREACHABLE = "http://127.0.0.1:9"
"""A server that is not there: the discard port, refused at once."""


class Done(NamedTuple):
    """What a caller sees of a finished compile."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    output: bytes | None


class Started:
    """A launcher that runs, called the way TorchNeuron's C++ calls it: its own folder, stdout drained first."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self.process = process
        self.output = output

    def __del__(self) -> None:
        # A test that failed half-way must not leave a compiler behind; a dead launcher takes its own along.
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def finish(self) -> Done:
        """Drain stdout to its end, then stderr, then take the exit status."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        with self.process.stdout, self.process.stderr:
            stdout = self.process.stdout.read()
            stderr = self.process.stderr.read()
        code = self.process.wait()
        return Done(code, stdout, stderr, self.output.read_bytes() if self.output.exists() else None)

    def leftovers(self) -> list[str]:
        """What lies in the compile's folder beside input and output."""
        return sorted(
            p.name for p in self.output.parent.iterdir() if p.name not in (self.output.name, "module.hlo.pb")
        )


class Host:
    """One simulated host: its own local folders, a launcher and a compiler on PATH."""

    def __init__(self, root: Path, compiler: FakeCompiler, url: str | None = UNREACHABLE, **more: str) -> None:
        self.root = root
        self.shim = make_shim()
        self.env = environment(self.shim, compiler.folder, cache=root, url=url, **more)
        self.tier = root / "neff_cache" / "neffcache"
        self._compiles = 0

    def arguments(self, folder: Path, *more: str, graph: bytes = GRAPH) -> list[str]:
        """TorchNeuron's command line for a graph in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        source = folder / "module.hlo.pb"
        source.write_bytes(graph)
        options = ["--framework", "XLA", "--target", "trn2", "--lnc", "2", "-O1", "--model-type", "transformer"]
        return ["compile", str(source), *options, *more, "--output", str(folder / "module.neff")]

    def start(self, *more: str, graph: bytes = GRAPH) -> Started:
        """Start one compile in a fresh folder."""
        self._compiles += 1
        folder = self.root / f"T{self._compiles}"
        arguments = self.arguments(folder, *more, graph=graph)
        process = subprocess.Popen(
            [os.path.join(self.shim, "neuronx-cc"), *arguments],
            cwd=folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        return Started(process, folder / "module.neff")

    def compile(self, *more: str, graph: bytes = GRAPH) -> Done:
        """Run one compile to its end."""
        return self.start(*more, graph=graph).finish()

    def log(self) -> str:
        """What the launchers of this host had to say."""
        return "".join(p.read_text() for p in (self.tier / "log").glob("*.log")) if self.tier.exists() else ""
