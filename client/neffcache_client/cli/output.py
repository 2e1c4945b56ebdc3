"""How commands talk: aligned tables for people, JSON for machines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def say(text: str = "") -> None:
    """A line on stdout. Names of jobs and hosts come from anywhere: what would steer the terminal is left out."""
    sys.stdout.write(text.translate(_CONTROLS) + "\n")


def say_json(value: Any) -> None:
    """One JSON document on stdout."""
    say(json.dumps(value, indent=2, sort_keys=True))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> str:
    """Columns as wide as they must be; those named in `right` hold numbers and stand on the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(head, row, widths, strict=True)
        ).rstrip()
        for row in [head, *rows]
    )


def show_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """The same table on stdout; on a terminal by `rich`, where that is installed."""
    if sys.stdout.isatty():
        try:
            from rich.box import SIMPLE_HEAD
            from rich.console import Console
            from rich.table import Table
            from rich.text import Text
        except ImportError:
            pass
        else:
            grid = Table(box=SIMPLE_HEAD, pad_edge=False)
            for name in head:
                grid.add_column(name, justify="right" if name in right else "left", overflow="fold")
            for row in rows:
                # As text: names of jobs and hosts may hold what rich takes for markup.
                grid.add_row(*(Text(cell) for cell in row))
            Console().print(grid)
            return
    say(table(head, rows, right=right))


def pairs(rows: Sequence[tuple[str, str]], indent: str = "") -> str:
    """Names and values, the values aligned."""
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{indent}{name.ljust(width)}  {value}" for name, value in rows)


def size(count: float | None) -> str:
    """Bytes for people: 12.3 MiB."""
    if count is None:
        return "-"
    value = float(count)
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def seconds(value: float | None) -> str:
    """A duration for people: 3.2 s, 12 min 5 s, 4 h 10 min."""
    if value is None:
        return "-"
    if value < 100:
        return f"{value:.1f} s" if value else "0 s"
    whole = round(value)
    large, small = (whole // 60, whole % 60) if whole < 3600 else (whole // 3600, whole % 3600 // 60)
    units = ("min", "s") if whole < 3600 else ("h", "min")
    return f"{large} {units[0]}" + (f" {small} {units[1]}" if small else "")


def instant(unix: float | None) -> str:
    """A point in time, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix)) if unix else "-"
