"""Which compiler it is, told without running it."""

from __future__ import annotations

from neffcache_client.errors import NeffcacheError


class IdentityUnknown(NeffcacheError):
    """The compiler does not tell its version; its results are not cached."""


class CompilerIdentity:
    """`version` with its git suffix, `digest` of what is installed, `text` for folder names, `kind` wheel or executable."""

    __slots__ = ("digest", "kind", "text", "version")

    def __init__(self, version: str, digest: str, kind: str) -> None:
        self.version = version
        self.digest = digest
        self.kind = kind
        self.text = digest[:16]


def identify(executable: str, cache_dir: str) -> CompilerIdentity:
    """Identify the compiler at `executable`. Raises IdentityUnknown."""
    raise NotImplementedError
