"""Which of several keys is the nearest to one that missed. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from neffcache_client.explanation import Difference, GraphDifference
from neffcache_client.graph_summary import GraphSummary

from neffcache_server.explain import graphs
from neffcache_server.explain.factors import differences, distance
from neffcache_server.explain.repository import Described

_GRAPH_WEIGHT = 8.0
"""Of two graphs that have nothing in common, over the weight of two that merely differ: more than all that usually
differs between two compiles of one graph."""
UNLIKE = 0.5
"""From this share of operations on, two graphs are called different models."""


@dataclass(slots=True)
class Neighbour:
    """A key beside the one that missed."""

    described: Described
    differences: list[Difference]
    distance: float
    lateness: int
    """0: stored when the key was first asked for, 1: stored since, 2: not stored."""
    unlikeness: float = 0.0
    """Of the graphs: 0 equal, 1 nothing in common."""

    @property
    def same_graph(self) -> bool:
        return all(one.factor != "graph" for one in self.differences)

    @property
    def unlike(self) -> bool:
        """Another program rather than another version of this one."""
        return not self.same_graph and self.unlikeness > UNLIKE

    @property
    def known_in_time(self) -> bool:
        """Stored when the key was first asked for."""
        return self.lateness == 0


def ranked(asked: Described, others: list[Described]) -> list[Neighbour]:
    """`others`, the nearest first. What was stored when `asked` was first asked for comes before what was not."""
    found = [_neighbour(asked, other) for other in others]
    return sorted(found, key=_order)


def refined(asked: Described, nearest: list[Neighbour], summaries: dict[str, GraphSummary]) -> list[Neighbour]:
    """The same neighbours in an order that knows their single operations."""
    mine = summaries.get(asked.known.key)
    for one in nearest:
        other = summaries.get(one.described.known.key)
        if one.same_graph or mine is None or other is None or not mine.ops or not other.ops:
            continue
        share = len(graphs.differing(mine.ops, other.ops)) / max(len(mine.ops), len(other.ops))
        one.distance += share
    return sorted(nearest, key=_order)


def sentence(nearest: Neighbour | None, graph: GraphDifference | None) -> str:
    """Why the key missed, in one sentence."""
    if nearest is None:
        return "No other key is known that it could be compared with."
    if nearest.unlike:
        return "No stored graph resembles this one. The nearest is a different program."
    if nearest.described.known.state == "absent":
        return f"Nothing is stored under the nearest key either. What differs: {cause(nearest, graph)}."
    return f"It differs from the nearest stored key: {cause(nearest, graph)}."


def cause(nearest: Neighbour | None, graph: GraphDifference | None) -> str:
    """The differences in words; without `graph` the same for all keys that differ in their graphs."""
    if nearest is None or nearest.unlike:
        return "nothing stored resembled it"
    words = [one.text for one in nearest.differences if one.factor != "graph"]
    if not nearest.same_graph:
        words.append(graph.text if graph is not None else "the graph itself")
    return "; ".join(words) or "nothing that is kept"


def _neighbour(asked: Described, other: Described) -> Neighbour:
    found = differences(asked.factors, other.factors)
    one = Neighbour(other, found, distance(found), _lateness(asked, other))
    if not one.same_graph:
        one.unlikeness = graphs.unlikeness(asked.counts, other.counts)
        one.distance += _GRAPH_WEIGHT * one.unlikeness
    return one


def _order(one: Neighbour) -> tuple[int, float, str]:
    return one.lateness, one.distance, one.described.known.key


def _lateness(asked: Described, other: Described) -> int:
    if other.known.state == "absent":
        return 2
    created = other.known.created_at
    return 0 if created is not None and created <= asked.known.first_seen_at else 1
