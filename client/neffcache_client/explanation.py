"""The part of the protocol that explains misses: why a key was not there, and how the graphs of a job relate.

In every comparison "here" is the key that was asked about and "there" the other one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from neffcache_client.wire import NESTED, Holder


@dataclass(slots=True, kw_only=True)
class Miss:
    """Somebody asked for a key and it was not there. `at` is the last time."""

    host: str = ""
    rank: int | None = None
    job: str | None = None
    at: float = 0.0


@dataclass(slots=True, kw_only=True)
class Difference:
    """One factor in which a key ("here") differs from another ("there"), and the same in words."""

    factor: str
    text: str
    here: str | None = None
    there: str | None = None


@dataclass(slots=True, kw_only=True)
class OpCount:
    """How often an operation occurs in two graphs that differ in it."""

    op: str
    here: int
    there: int


@dataclass(slots=True, kw_only=True)
class OpPlace:
    """One operation of a graph: its number from 1, its text, and its source line when the graph tells."""

    number: int
    op: str
    text: str = ""
    result: str | None = None
    where: str | None = None


@dataclass(slots=True, kw_only=True)
class OpDifference:
    """Operations that stand in one place of two graphs; one side is None where the other graph has more."""

    here: OpPlace | None = None
    there: OpPlace | None = None
    wiring: bool = False
    """True when only the operands differ."""


@dataclass(slots=True, kw_only=True)
class GraphDifference:
    """How two graphs differ, as far as their summaries tell."""

    text: str
    counts: list[OpCount] = field(default_factory=list)
    ops_here: int | None = None
    ops_there: int | None = None
    differing: int | None = None
    """Operations of the larger side that have no equal in the other; None when only counts are known."""
    first: OpDifference | None = None


@dataclass(slots=True, kw_only=True)
class KnownKey:
    """A key that somebody asked for once. `state` is `absent` while nothing is published under it."""

    key: str
    state: str
    first_seen_at: float = 0.0
    created_at: float | None = None
    compiler_version: str | None = None
    compile_seconds: float | None = None
    holder: Holder | None = None
    """Who compiled what is published."""
    factors: dict[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class Explanation:
    """Why a key missed: the nearest stored key and what differs. `text` says it in one sentence."""

    key: KnownKey
    text: str
    misses: list[Miss] = field(default_factory=list)
    nearest: KnownKey | None = None
    differences: list[Difference] = field(default_factory=list)
    graph: GraphDifference | None = None


@dataclass(slots=True, kw_only=True)
class Variant:
    """One of several graphs that are nearly the same. `detail` is what it has where they differ."""

    key: KnownKey
    ranks: list[int] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    detail: str = ""


@dataclass(slots=True, kw_only=True)
class VariantGroup:
    """Graphs with the same operations, or one graph under several settings; `text` says in what they differ and is
    empty for a single variant."""

    text: str
    variants: list[Variant]
    ops: int | None = None
    differing: list[OpPlace] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Cause:
    """A reason that several keys of a job share."""

    text: str
    keys: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class JobExplanation:
    """What the ranks of a job missed, in groups of near-identical graphs, and why."""

    job: str
    ranks: int = 0
    keys: int = 0
    groups: list[VariantGroup] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    truncated: bool = False


NESTED.update(
    {
        ("OpDifference", "here"): OpPlace,
        ("OpDifference", "there"): OpPlace,
        ("GraphDifference", "counts"): OpCount,
        ("GraphDifference", "first"): OpDifference,
        ("KnownKey", "holder"): Holder,
        ("Explanation", "key"): KnownKey,
        ("Explanation", "misses"): Miss,
        ("Explanation", "nearest"): KnownKey,
        ("Explanation", "differences"): Difference,
        ("Explanation", "graph"): GraphDifference,
        ("Variant", "key"): KnownKey,
        ("VariantGroup", "variants"): Variant,
        ("VariantGroup", "differing"): OpPlace,
        ("JobExplanation", "groups"): VariantGroup,
        ("JobExplanation", "causes"): Cause,
    }
)
