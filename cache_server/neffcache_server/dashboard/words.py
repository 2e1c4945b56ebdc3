"""Numbers, times and factors as people read them: filters of the templates."""

from __future__ import annotations

import json
import re
import time
from typing import Any

from markupsafe import Markup, escape
from neffcache_client.cli.output import instant, seconds, size

VERDICT_WORDS = {
    "local": "from the host's folder",
    "remote": "fetched from the server",
    "waited": "waited for another's compile",
    "compiled": "compiled and shared",
    "fallback": "compiled without the cache",
    "uncacheable": "compiled, never cached",
    "failed": "failed",
    "pushed": "uploaded later",
}
"""In the order in which pictures stack them: hits first."""

REASON_WORDS = {
    "deterministic": "a compiler error, answered to everybody",
    "transient": "a compile that died for no reason of its own",
    "exhausted": "three compiles died in a row",
    "lost": "the host that compiled fell silent",
    "aborted": "the rank was stopped",
    "required": "NEFFCACHE_MODE=require and no NEFF",
    "unreachable": "the server could not be reached",
    "breaker_open": "the server could not be reached a moment before",
    "not_allowed": "the token lacks a right",
    "refused": "the server refused the request",
    "corrupt": "the artifact arrived damaged",
    "blob_missing": "the artifact's bytes are gone",
    "server_lost": "the server was lost while waiting",
    "not_shared": "another host's result could not be handed over",
    "lease_lost": "another host took the compile over",
    "spooled": "not published yet, waits for upload on its host",
    "not_spooled": "not published and not kept",
    "publish_refused": "the server refused the NEFF",
    "readonly": "this job only reads the cache",
    "no_target": "the target cannot be told",
    "missing_kernel": "a kernel file is missing",
    "compiler_unknown": "the compiler cannot be identified",
}


def number(value: float | None) -> str:
    """12,345"""
    return "–" if value is None else f"{value:,.0f}"


def count(value: float, one: str, many: str = "") -> str:
    """1 request, 12,345 requests"""
    return f"{number(value)} {one if value == 1 else many or one + 's'}"


def milliseconds(value: float) -> str:
    """Seconds that are few: 12 ms"""
    return "under 1 ms" if value < 0.001 else f"{value * 1000:,.0f} ms"


def percent(value: float | None) -> str:
    """98.4 %; never 100 % for less than all."""
    if value is None:
        return "–"
    if value in (0.0, 1.0):
        return f"{value:.0%}".replace("%", " %")
    return f"{min(99.9, max(0.1, 100 * value)):.1f} %"


def hours(value: float | None) -> str:
    """Seconds as hours, for sums of compile time."""
    if value is None:
        return "–"
    amount = value / 3600
    if amount < 1:
        return seconds(value)
    return f"{amount:,.1f} h" if amount < 1000 else f"{amount:,.0f} h"


def ago(then: float | None, now: float) -> str:
    """3 min ago"""
    if then is None:
        return "never"
    passed = now - then
    if passed < 5:
        return "just now"
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if passed < limit:
            return f"{passed / unit:.0f} {name} ago"
    return f"{passed / 86400:,.0f} days ago"


def iso(unix: float) -> str:
    """For `<time datetime>`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix))


def money(amount: float, currency: str) -> str:
    """An amount with its currency, if one was named."""
    text = f"{amount:,.2f}" if amount < 100 else f"{amount:,.0f}"
    return f"{text} {currency}".rstrip()


def breakable(text: str) -> Markup:
    """A dotted name or version that may go on in the next line after a dot, plus or underscore."""
    return Markup(re.sub("([._+])", r"\1<wbr>", str(escape(text))))


def names(text: str | None) -> str:
    """A JSON list of names, separated by commas."""
    try:
        return ", ".join(str(name) for name in json.loads(text or "[]"))
    except ValueError:
        return text or ""


def factor_rows(factors: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Factors of a key as lines: nested names joined by dots, lists in one line where they are short."""
    rows: list[tuple[str, str]] = []
    _flatten("", factors or {}, rows)
    return rows


def _flatten(name: str, value: Any, rows: list[tuple[str, str]]) -> None:
    if isinstance(value, dict) and value:
        for inner, of_inner in value.items():
            _flatten(f"{name}.{inner}" if name else str(inner), of_inner, rows)
    elif isinstance(value, list) and value and all(isinstance(v, list) and len(v) == 2 for v in value):
        # Options: pairs of name and value.
        for option, given in value:
            rows.append((f"{name} {option}", _text(given)))
    else:
        rows.append((name, _text(value)))


def _text(value: Any) -> str:
    if value is None:
        return "–"
    if value == {} or value == []:
        return "none"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 2000 else f"{text[:2000]}… ({len(text)} characters)"


FILTERS = {
    "number": number,
    "count": count,
    "milliseconds": milliseconds,
    "percent": percent,
    "hours": hours,
    "size": size,
    "seconds": seconds,
    "instant": instant,
    "ago": ago,
    "iso": iso,
    "names": names,
    "breakable": breakable,
}
