"""A rank's node cache in a test: settings, a compiler that counts, a folder per simulated host."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from neffcache_client.node_cache import CompileResult, LeaseView, NodeCache, Obtained, Patience
from neffcache_client.settings import ClientSettings

from support.neffs import make_neff

VERSION = "2.23.6484.0+3b612583"
KEY = "ab" * 32
NEFF = make_neff()
QUICK = Patience(first_contact=2.0, first_answer=1.0, leader=0.3, poll=5.0, outage=0.5, publish=0.3, release=1.0)


class Node:
    """One rank on one simulated host."""

    def __init__(self, folder: Path, url: str, *, patience: Patience = QUICK, **env: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.settings = ClientSettings.from_env(
            {
                "NEFFCACHE_URL": url,
                "TORCH_NEURONX_NEFF_CACHE_DIR": str(folder / "cache"),
                "TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR": str(folder / "locks"),
                **env,
            }
        )
        self.log: list[str] = []
        self.abort = threading.Event()
        self.compiles = 0
        self.result = "ok"
        self.neff = NEFF
        self.private_stem = "private"
        self.on_compile: Callable[[LeaseView], None] = lambda view: None
        self.cache = NodeCache(self.settings, log=self.log.append, abort=self.abort, patience=patience)

    @property
    def tier(self) -> Path:
        return Path(self.settings.tier_dir)

    def spooled(self) -> int:
        return len(list((self.tier / "spool").glob("*.json")))

    def warnings(self) -> list[str]:
        return [line for line in self.log if line.startswith("WARNING")]

    def output(self, name: str = "out.neff") -> Path:
        return self.folder / name

    def compile(self, view: LeaseView) -> CompileResult:
        self.compiles += 1
        self.on_compile(view)
        if self.result != "ok":
            code = "NCC_EOOM001" if self.result == "deterministic" else None
            return CompileResult(exit_code=70, kind=self.result, log_tail="it went wrong", code=code, seconds=1.0)  # type: ignore[arg-type]
        private = self.folder / f"{self.private_stem}-{self.compiles}.neff"
        private.write_bytes(self.neff)
        return CompileResult(exit_code=0, kind="ok", output=str(private), seconds=2.5)

    def obtain(self, key: str = KEY, *, output: str = "out.neff", **kwargs: str | bool | None) -> Obtained:
        expect = {"expect_version": VERSION, "expect_target": "trn2", **kwargs}
        return self.cache.obtain(
            key,
            {"recipe": 1},
            output=str(self.output(output)),
            compile=self.compile,
            **expect,  # type: ignore[arg-type]
        )
