"""The key of one compile."""

from __future__ import annotations

from collections.abc import Mapping

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from neffcache_hook.key.command import CompileCommand
    from neffcache_hook.key.identity import CompilerIdentity


class ComputedKey:
    """`key` is None when the compile cannot be cached; `uncacheable` then says why. `about` describes, outside the key."""

    __slots__ = ("about", "factors", "key", "raw_digest", "uncacheable")

    def __init__(self, raw_digest: str = "") -> None:
        self.key: str | None = None
        self.factors: dict[str, Any] = {}
        self.uncacheable: str | None = None
        self.raw_digest = raw_digest
        self.about: dict[str, Any] = {}


def compute_key(
    cmd: CompileCommand,
    *,
    cwd: str,
    environ: Mapping[str, str],
    compiler: CompilerIdentity,
    index_dir: str,
) -> ComputedKey:
    """The key of `cmd`, run in `cwd` by `compiler`. Never raises for what the input holds."""
    raise NotImplementedError
