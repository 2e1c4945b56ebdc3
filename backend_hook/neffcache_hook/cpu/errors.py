"""What the CPU stand-in raises on purpose; part of the client's tree of errors.

NeffcacheError
└── CpuToolchainError
    ├── UnsupportedGraph    the graph cannot be lowered; names the operation
    ├── CompilerFailed      `neuronx-cc` exited with an error; carries `exit_code` and `code`
    └── NeffNotRunnable     a valid NEFF, but not one that this CPU can run
"""

from __future__ import annotations

from neffcache_client.errors import NeffcacheError


class CpuToolchainError(NeffcacheError):
    """The CPU stand-in toolchain could not do this."""


class UnsupportedGraph(CpuToolchainError):
    """The graph holds something that the CPU stand-in cannot lower."""


class CompilerFailed(CpuToolchainError):
    """neuronx-cc failed."""

    def __init__(self, message: str | None = None, *, exit_code: int = 70, code: str | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.code = code


class NeffNotRunnable(CpuToolchainError):
    """This NEFF was not made by the CPU stand-in compiler."""
