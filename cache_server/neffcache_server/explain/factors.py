"""Two keys' factors compared, each difference in words. Pure functions over JSON that any client may have sent."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from itertools import zip_longest
from typing import Any

from neffcache_client.explanation import Difference

Factors = dict[str, Any]

NOT_GIVEN = "not given"
_MAX_SHOWN = 160
_SHORT = 12
_SPELLING = {"optlevel": "-O"}
_WEIGHTS = {"recipe": 3.0, "compiler": 3.0, "target": 3.0, "lnc": 2.0, "graph": 2.0}
_OWN_WORDS = ("recipe", "ir", "compiler", "target", "lnc", "options", "files", "env")


def graph_digest(factors: Factors) -> str | None:
    """The digest of the graph that the factors name."""
    digest = _dict(factors.get("ir")).get("digest")
    return digest if isinstance(digest, str) and len(digest) <= 64 else None


def settings_digest(factors: Factors) -> str:
    """Equal for keys that differ in nothing but their graph."""
    rest = {name: value for name, value in factors.items() if name != "ir"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()[:16]


def differences(here: Factors, there: Factors) -> list[Difference]:
    """What differs, most telling first. Empty for equal factors, and only then."""
    found = [
        *_plain("recipe", "key recipe", here, there),
        *_compiler(_dict(here.get("compiler")), _dict(there.get("compiler"))),
        *_plain("target", "target", here, there),
        *_plain("lnc", "lnc", here, there),
        *_options(_dict(here.get("options")), _dict(there.get("options"))),
        *_environment(_dict(here.get("env")), _dict(there.get("env"))),
        *_files(_list(here.get("files")), _list(there.get("files"))),
        *_graph(_dict(here.get("ir")), _dict(there.get("ir"))),
    ]
    for name in sorted((here.keys() | there.keys()) - set(_OWN_WORDS)):
        found += _plain(name, name, here, there)
    if not found and here != there:
        found.append(Difference(factor="other", text="the factors are written down differently"))
    return found


def distance(found: list[Difference]) -> float:
    """How far apart two keys with these differences are; the graph counts as merely different here."""
    return sum(_WEIGHTS.get(one.factor, 1.0) for one in found)


def _plain(name: str, words: str, here: Factors, there: Factors) -> list[Difference]:
    if here.get(name) == there.get(name):
        return []
    return [_difference(name, words, _shown(here.get(name)), _shown(there.get(name)))]


def _difference(factor: str, words: str, here: str | None, there: str | None) -> Difference:
    text = f"{words} {_or_absent(here)} here, {_or_absent(there)} there"
    return Difference(factor=factor, text=text, here=here, there=there)


def _compiler(here: Factors, there: Factors) -> list[Difference]:
    if here == there:
        return []
    versions = _shown(here.get("version")), _shown(there.get("version"))
    if versions[0] != versions[1]:
        return [_difference("compiler", "compiler", *versions)]
    digests = str(here.get("digest"))[:_SHORT], str(there.get("digest"))[:_SHORT]
    text = (
        f"compiler {versions[0]} on both sides, but not the same files: "
        f"{here.get('kind')} {digests[0]} here, {there.get('kind')} {digests[1]} there"
    )
    return [Difference(factor="compiler", text=text, here=digests[0], there=digests[1])]


def _options(here: Factors, there: Factors) -> list[Difference]:
    found = _named_options("option", _pairs(here.get("known")), _pairs(there.get("known")))
    found += _unknown_options(_list(here.get("unknown")), _list(there.get("unknown")))
    found += _flags(_pairs(here.get("environment")), _pairs(there.get("environment")))
    if not found and here != there:
        found.append(Difference(factor="option", text="the options come in another order"))
    return found


def _named_options(words: str, here: list[tuple[str, Any]], there: list[tuple[str, Any]]) -> list[Difference]:
    found = []
    for name in sorted({name for name, _ in here + there}):
        mine = [value for n, value in here if n == name]
        other = [value for n, value in there if n == name]
        if mine != other:
            sides = _spelled(name, mine), _spelled(name, other)
            found.append(_difference(f"{words} {name}", words, *sides))
    return found


def _flags(here: list[tuple[str, Any]], there: list[tuple[str, Any]]) -> list[Difference]:
    """What NEURON_CC_FLAGS says that the command line does not repeat; usually nothing on either side."""
    if here == there:
        return []
    mine, other = (" ".join(_spelled(name, [value]) or "" for name, value in side) or None for side in (here, there))
    text = f"NEURON_CC_FLAGS adds {mine or 'nothing'} here, {other or 'nothing'} there"
    return [Difference(factor="NEURON_CC_FLAGS", text=text, here=mine, there=other)]


def _spelled(name: str, values: list[Any]) -> str | None:
    if not values:
        return None
    if name == "?":
        return _clip(" ".join(str(v) for v in values))
    spelling = _SPELLING.get(name, f"--{name}")
    glue = "" if spelling == "-O" else " "
    return _clip(" ".join(spelling if v is None else f"{spelling}{glue}{v}" for v in values))


def _unknown_options(here: list[Any], there: list[Any]) -> list[Difference]:
    mine, other = Counter(map(str, here)), Counter(map(str, there))
    only_mine, only_other = list((mine - other).elements()), list((other - mine).elements())
    if not only_mine and not only_other:
        if here == there:
            return []
        return [Difference(factor="option", text="options that neffcache does not know come in another order")]
    sides = (_clip(" ".join(only_mine)) or None, _clip(" ".join(only_other)) or None)
    return [_difference("option", "option", *sides)]


def _environment(here: Factors, there: Factors) -> list[Difference]:
    found = []
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            mine, other = (_quoted(side.get(name)) for side in (here, there))
            text = f"env {name} {mine or 'not set'} here, {other or 'not set'} there"
            found.append(Difference(factor=f"env {name}", text=text, here=mine, there=other))
    return found


def _files(here: list[Any], there: list[Any]) -> list[Difference]:
    found = []
    words = {"kernel": "kernel file", "option": "file named by an option", "mention": "file named in the graph"}
    for mine, other in zip_longest(here, there):
        if mine == other:
            continue
        kind = str(next(iter(_list(mine or other)), ""))
        digests = _file_digest(mine), _file_digest(other)
        if mine is None or other is None:
            text = f"{words.get(kind, 'file')}: {digests[0] or 'none'} here, {digests[1] or 'none'} there"
        else:
            text = f"{words.get(kind, 'file')}, content differs: {digests[0]} here, {digests[1]} there"
        found.append(Difference(factor="file", text=text, here=digests[0], there=digests[1]))
    return found


def _file_digest(entry: Any) -> str | None:
    if entry is None:
        return None
    parts = _list(entry)
    return f"sha256 {str(parts[1])[:_SHORT]}" if len(parts) > 1 and parts[1] is not None else "missing"


def _graph(here: Factors, there: Factors) -> list[Difference]:
    if here == there:
        return []
    for name, words in (("kind", "graph read as"), ("canonicaliser", "canonical form")):
        if here.get(name) != there.get(name):
            return [_difference("graph", words, _shown(here.get(name)), _shown(there.get(name)))]
    digests = str(here.get("digest"))[:_SHORT], str(there.get("digest"))[:_SHORT]
    return [Difference(factor="graph", text="the graph differs", here=digests[0], there=digests[1])]


def _or_absent(value: str | None) -> str:
    return NOT_GIVEN if value is None else value


def _shown(value: Any) -> str | None:
    if value is None:
        return None
    return _clip(value if isinstance(value, str) else json.dumps(value, sort_keys=True))


def _quoted(value: Any) -> str | None:
    return None if value is None else _clip(json.dumps(value))


def _clip(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _pairs(value: Any) -> list[tuple[str, Any]]:
    return [(str(one[0]), one[1]) for one in _list(value) if isinstance(one, list) and len(one) == 2]
