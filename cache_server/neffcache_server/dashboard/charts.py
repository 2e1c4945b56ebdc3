"""Pictures as SVG, laid out by pygal and coloured by our own style sheet, so that they follow the page's theme.

What pygal adds beside the picture (scripts, styles, an address to load more from) is taken out: the pages' security
policy allows neither, and they must work without a network.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from neffcache_server.dashboard.library import Style, etree, pygal
from neffcache_server.dashboard.words import VERDICT_WORDS, number
from neffcache_server.recording.history import Figures

# pygal puts a finder for its map plugins behind all others, of a kind that Python 3.12 no longer knows; every import
# that fails in this process would stumble over it.
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "PluginImportFixer"]

STACK = tuple(v for v in VERDICT_WORDS if v != "pushed")
_STYLE = Style(label_font_size=12, major_label_font_size=12, font_family="sans-serif")
_WIDE, _NARROW = 900, 380
_MOST_LABELS = {_WIDE: 10, _NARROW: 4}
_LANE = 18
_DIGITS = re.compile(r"(\d\.\d)\d+")
MAX_LANES = 64


@dataclass(slots=True)
class Segment:
    """One request on a job's timeline: lane, start and end in seconds from the job's beginning."""

    lane: int
    verdict: str
    start: float
    end: float


def requests_over_time(series: Sequence[tuple[str, Figures]], title: str) -> Markup:
    """Bars of requests by outcome."""
    rows = {v: [f.verdicts.get(v, 0) for _, f in series] for v in STACK}
    return _bars(series, rows, title, number)


def time_over_time(series: Sequence[tuple[str, Figures]], title: str) -> Markup:
    """Bars of compile time saved and spent, side by side."""
    largest = max((max(f.saved_seconds, f.spent_seconds) for _, f in series), default=0.0)
    unit, name = (3600.0, "h") if largest >= 7200 else (60.0, "min") if largest >= 120 else (1.0, "s")
    rows = {
        "saved": [f.saved_seconds / unit for _, f in series],
        "spent": [f.spent_seconds / unit for _, f in series],
    }
    return _bars(series, rows, title, lambda v: f"{v:,.1f}".removesuffix(".0") + f" {name}", stacked=False)


def _bars(
    series: Sequence[tuple[str, Figures]], rows: dict[str, Any], title: str, words: Any, *, stacked: bool = True
) -> Markup:
    labels = [label for label, _ in series]

    def draw(width: int) -> str:
        kind = pygal.StackedBar if stacked else pygal.Bar
        chart = kind(**_common(width, 260), value_formatter=words, show_minor_x_labels=False, truncate_label=-1)
        chart.x_labels = labels
        step = max(1, -(-len(labels) // _MOST_LABELS[width]))
        chart.x_labels_major = labels[::step]
        for name, values in rows.items():
            chart.add(name, [v or None for v in values])
        return _svg(chart, title, list(rows), labels)

    return Markup('<div class="wide">{}</div><div class="narrow">{}</div>').format(
        Markup(draw(_WIDE)), Markup(draw(_NARROW))
    )


def timeline(segments: Sequence[Segment], lanes: Sequence[str], title: str) -> Markup:
    """Who compiled, who waited, on one line for each rank."""
    span = max((s.end for s in segments), default=1.0) or 1.0
    chart = pygal.XY(
        **_common(_WIDE, 90 + _LANE * len(lanes)),
        show_dots=False,
        allow_interruptions=True,
        x_value_formatter=_clock,
        xrange=(0, span),
        range=(-0.5, len(lanes) - 0.5),
        inverse_y_axis=False,
        truncate_label=28,
    )
    chart.x_labels = _ticks(span)
    top = len(lanes) - 1
    chart.y_labels = [{"label": name, "value": top - i} for i, name in enumerate(lanes)]
    for verdict in STACK:
        points: list[tuple[float, float] | tuple[None, None]] = []
        for s in segments:
            if s.verdict == verdict:
                # A fetch lasts milliseconds: it is drawn wide enough to be seen.
                end = max(s.end, s.start + span / 250)
                points += [(s.start, top - s.lane), (end, top - s.lane), (None, None)]
        chart.add(verdict, points)
    return Markup('<div class="timeline">{}</div>').format(Markup(_svg(chart, title, list(STACK), ())))


def _clock(value: float) -> str:
    # In whole units: the digits of a fraction are cut with those of the coordinates.
    small, unit, large = (round(value), "s", "min") if value < 7200 else (round(value / 60), "min", "h")
    whole, rest = divmod(small, 60)
    return " ".join([f"{whole} {large}"] * (whole > 0) + [f"{rest} {unit}"] * (rest > 0 or not whole))


def _ticks(span: float) -> list[float]:
    """Round instants for an axis of `span` seconds."""
    steps = [unit * n for unit in (1, 60, 3600, 86400) for n in (1, 2, 5, 10, 15, 30)]
    step = next((s for s in steps if span / s <= 8), span / 8)
    return [float(step * i) for i in range(int(span / step) + 1)]


def mix(verdicts: dict[str, int]) -> Markup:
    """A thin bar that shows how requests ended."""
    total = sum(verdicts.get(v, 0) for v in STACK)
    if not total:
        return Markup("")
    at, parts, words = 0.0, [], []
    for verdict in STACK:
        if count := verdicts.get(verdict, 0):
            width = 100 * count / total
            parts.append(f'<rect class="fill-{verdict}" x="{at:.2f}" width="{width:.2f}" height="8"/>')
            words.append(f"{count} {VERDICT_WORDS[verdict]}")
            at += width
    label = escape(", ".join(words))
    return Markup(
        f'<svg class="mix" viewBox="0 0 100 8" preserveAspectRatio="none" role="img" aria-label="{label}">'
        f"<title>{label}</title>{''.join(parts)}</svg>"
    )


def day_label(start: int) -> str:
    """11-30"""
    return time.strftime("%m-%d", time.gmtime(start))


def hour_label(start: int) -> str:
    """30 14:00"""
    return time.strftime("%d. %H:%M", time.gmtime(start))


def _common(width: int, height: int) -> dict[str, Any]:
    return {
        "width": width,
        "height": height,
        "css": (),
        "js": (),
        "style": _STYLE,
        "show_legend": False,
        "disable_xml_declaration": True,
        "margin": 8,
        "max_scale": 5,
        "spacing": 6,
    }


def _svg(chart: Any, title: str, names: Sequence[str], labels: Sequence[str]) -> str:
    root = chart.render_tree()
    for parent in list(root.iter()):
        for child in list(parent):
            tag = _tag(child)
            if tag in ("script", "style", "title") or not isinstance(child.tag, str):
                parent.remove(child)
    _tidy(root)
    _name_series(root, names)
    _titles(root, labels)
    root.attrib.pop("id", None)
    root.set("class", "chart")
    root.set("role", "img")
    root.set("aria-label", title)
    text: str = _DIGITS.sub(r"\1", etree.tostring(root, encoding="unicode"))
    return text.replace('xmlns:xlink="http://www.w3.org/1999/xlink" ', "")


def _tidy(root: Any) -> None:
    """Less to send: no inline styles (refused by our policy), nothing of no height, no names for scripts."""
    for parent in list(root.iter()):
        parent.attrib.pop("style", None)
        classes = parent.get("class", "")
        if "reactive" in classes:
            parent.attrib.pop("class")
        for child in list(parent):
            empty = _tag(child) == "g" and any(_tag(c) == "rect" and float(c.get("height", "1")) == 0 for c in child)
            if empty or child.get("class", "") in ("tooltip", "tooltip-overlay", "text-overlay"):
                parent.remove(child)
        for name in ("rx", "ry"):
            if parent.get(name) == "0":
                parent.attrib.pop(name)


def _tag(element: Any) -> str:
    return element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""


def _name_series(root: Any, names: Sequence[str]) -> None:
    """`serie-3` becomes what it shows, so that one style sheet colours every picture."""
    for element in root.iter():
        classes = element.get("class", "").split()
        for cls in classes:
            if cls.startswith("serie-") and cls[6:].isdigit() and int(cls[6:]) < len(names):
                element.set("class", f"series of-{names[int(cls[6:])]}")


def _titles(root: Any, labels: Sequence[str]) -> None:
    """pygal's descriptions for its tooltips become titles, which browsers show by themselves."""
    for parent in list(root.iter()):
        words: list[str] = []
        for child in list(parent):
            if _tag(child) == "desc":
                if child.get("class") in ("value", "x_label") and child.text:
                    words.append(child.text)
                parent.remove(child)
        if words and labels:
            title = etree.Element("title")
            title.text = ", ".join(reversed(words))
            parent.insert(0, title)
