"""The demo's table and JSON."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from neffcache_hook.demo.fleet import Outcome


@dataclass(frozen=True, kw_only=True)
class Row:
    """One scenario's figures. Seconds are per rank, from the common start to the end of its last first step."""

    scenario: str
    ranks: int
    hosts: int
    graphs: int
    compiles: int
    host_folder_hits: int
    local_hits: int
    remote_hits: int
    waits: int
    fallbacks: int
    first_step_min: float
    first_step_median: float
    first_step_max: float
    max_abs_diff: float


def row_of(outcome: Outcome, verdicts: Counter[str]) -> Row:
    """Sum up an outcome. `verdicts` are the launchers' own records."""
    times = [r["first_step_seconds"] for r in outcome.ranks]
    return Row(
        scenario=outcome.scenario.name,
        ranks=outcome.scenario.ranks,
        hosts=outcome.scenario.hosts,
        graphs=len({g for r in outcome.ranks for g in r["graphs"]}),
        compiles=outcome.compiles,
        host_folder_hits=sum(r["host_folder_hits"] for r in outcome.ranks),
        local_hits=verdicts["local"],
        remote_hits=verdicts["remote"],
        waits=verdicts["waited"],
        fallbacks=verdicts["fallback"],
        first_step_min=min(times),
        first_step_median=statistics.median(times),
        first_step_max=max(times),
        max_abs_diff=max(r["max_abs_diff"] for r in outcome.ranks),
    )


_HEADINGS = (
    ("", lambda r: r.scenario),
    ("ranks", lambda r: f"{r.ranks}"),
    ("hosts", lambda r: f"{r.hosts}"),
    ("graphs", lambda r: f"{r.graphs}"),
    ("compiles", lambda r: f"{r.compiles}"),
    ("waited", lambda r: f"{r.waits}"),
    ("remote hits", lambda r: f"{r.remote_hits}"),
    ("local hits", lambda r: f"{r.local_hits}"),
    ("host folder hits", lambda r: f"{r.host_folder_hits}"),
    ("first step min/median/max, s", lambda r: _times(r)),
)


def _times(row: Row) -> str:
    return f"{row.first_step_min:.1f} / {row.first_step_median:.1f} / {row.first_step_max:.1f}"


def table(rows: list[Row]) -> str:
    """Aligned text, first column left, the rest right; also readable as Markdown."""
    cells = [[h for h, _ in _HEADINGS], *[[show(r) for _, show in _HEADINGS] for r in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(_HEADINGS))]
    lines = [
        "| "
        + " | ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        + " |"
        for line in cells
    ]
    rule = "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def as_json(rows: list[Row], extra: dict[str, Any]) -> str:
    """The same figures for programs, with totals of the cold and warm run on top."""
    by_name = {r.scenario: r for r in rows}
    cold, warm = by_name["neffcache cold"], by_name["neffcache warm"]
    document = {
        "graphs": cold.graphs,
        "cold": {"compiles": cold.compiles, "graphs": cold.graphs},
        "warm": {"compiles": warm.compiles, "graphs": warm.graphs},
        "max_abs_diff": max(r.max_abs_diff for r in rows),
        "scenarios": [asdict(r) for r in rows],
        **extra,
    }
    return json.dumps(document, indent=2) + "\n"
