"""The CPU stand-in toolchain set up in a folder of the test's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from neffcache_hook.cpu.compiler import install_compiler


class Toolchain:
    """The stand-in compiler on PATH, empty vendor folders, and the compiler's own log."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "compiles"
        self.compiler = install_compiler(str(folder / "bin"))
        self.cache = folder / "neff_cache"
        self.environ = {
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "TORCH_NEURONX_NEFF_CACHE_DIR": str(self.cache),
            "TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR": str(folder / "local_cache"),
            "NEFFCACHE_CPU_COMPILER_LOG": str(self.log),
        }
        # `clean_environment` takes it away after the test.
        os.environ.update(self.environ)

    @property
    def compiles(self) -> int:
        """How often the compiler really ran, whatever any cache says."""
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    def neffs(self) -> list[Path]:
        """The NEFFs in the vendor's folder."""
        return sorted(self.cache.glob("*/*/*.neff"))

    def python(self, script: Path, *args: str) -> subprocess.CompletedProcess[str]:
        """Run a script to its end in a process of its own, with this toolchain."""
        return subprocess.run(
            [sys.executable, str(script), *args], capture_output=True, text=True, timeout=120, check=False
        )
