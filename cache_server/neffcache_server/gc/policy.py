"""What may go, and what has gone."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from neffcache_server.settings import ServerSettings


@dataclass(slots=True, frozen=True)
class Policy:
    """Which entries are removed. 0 and nothing: the rule is off. Pinned entries stay whatever it says."""

    max_bytes: int = 0
    """Per namespace: those unused for longest go until the rest fits."""
    unused_seconds: float = 0.0
    """Since the last hit, or since the publish where there was none."""
    age_seconds: float = 0.0
    compilers: tuple[str, ...] = ()
    """Patterns of compiler versions, such as 2.19.*"""
    history_seconds: float = 0.0
    """Keys that have no artifact, pinned or not, are forgotten when nobody asked for them this long."""
    grace_seconds: float = 7200.0
    """Nothing that was stored or used within it is touched, and bytes are deleted no sooner than this after the last
    entry that referred to them: a rank that was told where they are can still fetch them, and a lease that has
    uploaded them can still publish."""

    def names(self, version: str | None) -> bool:
        """True when the policy removes what that compiler made."""
        return version is not None and any(fnmatchcase(version, pattern) for pattern in self.compilers)


def policy_of(settings: ServerSettings) -> Policy:
    """What the settings say."""
    return Policy(
        max_bytes=settings.gc_max_bytes,
        unused_seconds=settings.gc_unused_seconds,
        age_seconds=settings.gc_age_seconds,
        compilers=tuple(settings.gc_compilers),
        history_seconds=settings.gc_history_seconds,
        grace_seconds=settings.gc_grace_seconds,
    )


@dataclass(slots=True)
class Removed:
    """A number of things and their size."""

    number: int = 0
    bytes: int = 0

    def add(self, size: int, number: int = 1) -> None:
        self.number += number
        self.bytes += size


@dataclass(slots=True)
class Report:
    """What a collection removed, or would have."""

    dry_run: bool = False
    entries: dict[str, Removed] = field(default_factory=dict)
    """By reason: compiler, age, unused, size."""
    keys: int = 0
    """Keys without an artifact that were forgotten with their history."""
    blobs: Removed = field(default_factory=Removed)
    orphans: Removed = field(default_factory=Removed)
    """Objects that no row knows."""
    abandoned: Removed = field(default_factory=Removed)
    """Uploads that were never finished."""
    waiting: Removed = field(default_factory=Removed)
    """Blobs that go when their grace has passed."""
    spared_orphans: int = 0
    """So many that the database is more likely the wrong one; nothing was done about them."""

    def removed(self, reason: str, size: int, number: int = 1) -> None:
        """Count entries."""
        self.entries.setdefault(reason, Removed()).add(size, number)

    @property
    def anything(self) -> bool:
        """Whether there was anything to do."""
        return bool(self.entries or self.keys or self.blobs.number or self.orphans.number or self.abandoned.number)
