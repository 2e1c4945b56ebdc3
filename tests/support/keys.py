"""Short cuts to keys: a command, a compiler and an input, parsed in this process instead of a worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from neffcache_hook.key import ir, spawn
from neffcache_hook.key.command import parse
from neffcache_hook.key.compute import ComputedKey, compute_key
from neffcache_hook.key.identity import CompilerIdentity

COMPILER = CompilerIdentity("2.23.6484.0+3b612583", "c" * 64, "wheel")
ARGV = (
    "compile {input} --framework XLA --target trn2 --lnc 2 -O2 --model-type transformer --auto-cast=none "
    "--output out.neff"
)


def in_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let graphs be parsed in this process; the list returned grows by the digest of each graph parsed."""
    parsed: list[str] = []

    def canonicalise(fd: int, raw_digest: str) -> dict[str, Any]:
        parsed.append(raw_digest)
        with open(fd, "rb", closefd=False) as file:
            found = ir.canonicalise(file.read())
        assert found.pop("raw") == raw_digest
        return found

    monkeypatch.setattr(spawn, "canonicalise", canonicalise)
    return parsed


class Keys:
    """Computes keys of inputs under one folder, with one local index."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = folder / "index"

    def compute(
        self,
        data: bytes | Path,
        argv: str | list[str] = ARGV,
        *,
        environ: dict[str, str] | None = None,
        compiler: CompilerIdentity = COMPILER,
        cwd: Path | None = None,
    ) -> ComputedKey:
        """The key of `data`, a file or bytes that are written to one; `{input}` in argv stands for its path."""
        path = data if isinstance(data, Path) else self.folder / "module.bin"
        if isinstance(data, bytes):
            path.write_bytes(data)
        words = argv.split() if isinstance(argv, str) else argv
        command = parse([word.replace("{input}", str(path)) for word in words], environ or {})
        assert command is not None
        return compute_key(
            command, cwd=str(cwd or self.folder), environ=environ or {}, compiler=compiler, index_dir=str(self.index)
        )

    def key(self, data: bytes | Path, argv: str | list[str] = ARGV, **more: Any) -> str:
        """The key; fails when there is none."""
        computed = self.compute(data, argv, **more)
        assert computed.uncacheable is None
        assert computed.key is not None
        return computed.key
