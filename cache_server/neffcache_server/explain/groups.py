"""The keys that a job missed, in groups of near-identical graphs. Pure functions."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from neffcache_client.explanation import OpPlace, Variant, VariantGroup
from neffcache_client.graph_summary import GraphSummary

from neffcache_server.explain import graphs
from neffcache_server.explain.factors import differences, graph_digest
from neffcache_server.explain.repository import Described, MissRow

_MAX_NAMED = 3
_MAX_DIFFERING = 20

Rows = dict[str, list[MissRow]]


def grouped(
    described: dict[str, Described], rows: list[MissRow], summaries: dict[str, GraphSummary]
) -> list[VariantGroup]:
    """One group per graph, those with most variants first; keys are together when they have the same operations
    equally often, or the same graph under other settings."""
    by_key: Rows = defaultdict(list)
    for row in rows:
        by_key[row.key].append(row)
    made = [_group(members, by_key, summaries) for members in _together(described)]
    return sorted(made, key=lambda group: (-len(group.variants), -(group.ops or 0), group.variants[0].key.key))


def _together(described: dict[str, Described]) -> list[list[Described]]:
    parent = {key: key for key in described}

    def root(key: str) -> str:
        while parent[key] != key:
            key = parent[key]
        return key

    first: dict[tuple[str, str], str] = {}
    for key, one in sorted(described.items()):
        for mark in (("shape", one.shape), ("graph", graph_digest(one.factors))):
            if mark[1] is not None:
                other = first.setdefault((mark[0], mark[1]), key)
                parent[root(key)] = root(other)
    found: dict[str, list[Described]] = defaultdict(list)
    for key, one in sorted(described.items()):
        found[root(key)].append(one)
    return list(found.values())


def _group(members: list[Described], rows: Rows, summaries: dict[str, GraphSummary]) -> VariantGroup:
    variants = [_variant(one, rows) for one in members]
    # The variant that most ranks share is what the others are compared with.
    order = sorted(
        range(len(members)), key=lambda i: (-len(variants[i].ranks), variants[i].ranks, members[i].known.key)
    )
    members, variants = [members[i] for i in order], [variants[i] for i in order]
    counts = members[0].counts
    places = _differing_places(members, summaries)
    for variant in variants:
        variant.detail = _detail(variant.key.key, places, summaries)
    return VariantGroup(
        text=_text(members, places),
        variants=variants,
        ops=sum(counts.values()) or None,
        differing=places[:_MAX_DIFFERING],
    )


def _variant(one: Described, rows: Rows) -> Variant:
    mine = [row.miss for row in rows.get(one.known.key, [])]
    return Variant(
        key=replace(one.known, factors=None),
        ranks=sorted({miss.rank for miss in mine if miss.rank is not None}),
        hosts=sorted({miss.host for miss in mine}),
    )


def _differing_places(members: list[Described], summaries: dict[str, GraphSummary]) -> list[OpPlace]:
    """The operations of the first variant in which any other differs."""
    first = summaries.get(members[0].known.key)
    found: dict[int, OpPlace] = {}
    for other in members[1:]:
        theirs = summaries.get(other.known.key)
        if first is None or theirs is None or not first.ops or not theirs.ops:
            continue
        pairs = graphs.differing(first.ops, theirs.ops)
        inner = [one for one in pairs if not graphs.in_container(one)] or pairs
        found.update({one.here.number: one.here for one in inner if one.here is not None})
    return [found[number] for number in sorted(found)]


def _detail(key: str, places: list[OpPlace], summaries: dict[str, GraphSummary]) -> str:
    """What a variant has at the first place where the variants differ."""
    summary = summaries.get(key)
    if not places or summary is None or len(summary.ops) < places[0].number:
        return ""
    return summary.ops[places[0].number - 1].text


def _text(members: list[Described], places: list[OpPlace]) -> str:
    if len(members) == 1:
        return ""
    first, *others = members
    different = sorted({one.factor for other in others for one in differences(first.factors, other.factors)})
    if "graph" in different:
        different.remove("graph")
        named = ", ".join(graphs.name_of(one) for one in places[:_MAX_NAMED]) or "operations that are not known"
        rest = len(places) - _MAX_NAMED
        different.append(named + (f" and {rest} more operations" if rest > 0 else ""))
    return f"differ in {'; '.join(different)}"
