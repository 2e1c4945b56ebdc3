"""`neffcache explain KEY` and `neffcache explain --job J`: why a graph was not in the cache."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from neffcache_client.api import CacheClient
from neffcache_client.cli.output import instant, pairs, say, say_json, seconds, table
from neffcache_client.cli.session import server
from neffcache_client.errors import SettingsError
from neffcache_client.explanation import (
    Explanation,
    GraphDifference,
    KnownKey,
    Miss,
    OpPlace,
    VariantGroup,
)
from neffcache_client.wire import MIN_KEY_PREFIX

_DIGITS = 16
_MISSES = 5
_PLACES = 5


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `explain` to the command line."""
    parser = subparsers.add_parser(
        "explain",
        help="why a graph was not in the cache",
        description="Compares a key that missed with the nearest stored one and says what differs; or shows what the "
        "ranks of a job missed, in groups of near-identical graphs. The launcher's log names the key of every miss.",
    )
    parser.add_argument(
        "key", nargs="?", metavar="KEY", help=f"a key, or at least {MIN_KEY_PREFIX} of its first digits"
    )
    parser.add_argument("--job", metavar="J", help="everything that this job missed")
    parser.add_argument("--json", action="store_true", help="for machines")


def run(args: argparse.Namespace) -> int:
    """Print the explanation."""
    if bool(args.key) == bool(args.job):
        raise SettingsError("name a key, or a job with --job")
    with server() as client:
        return _job(client, args) if args.job else _key(client, args)


def _key(client: CacheClient, args: argparse.Namespace) -> int:
    found = client.explain(_checked(args.key))
    if args.json:
        say_json(asdict(found))
        return 0
    say(pairs(_key_rows(found)))
    say()
    say(found.text)
    if found.nearest is not None:
        _say_differences(found)
    if found.graph is not None:
        _say_graph(found.graph)
    return 0


def _checked(text: str) -> str:
    key = text.lower()
    if not MIN_KEY_PREFIX <= len(key) <= 64 or any(c not in "0123456789abcdef" for c in key):
        raise SettingsError(f"{text[:80]!r} is no key: expected {MIN_KEY_PREFIX} to 64 hex digits")
    return key


def _key_rows(found: Explanation) -> list[tuple[str, str]]:
    rows = [
        ("key", found.key.key),
        ("state", _state(found.key)),
        ("first asked for", instant(found.key.first_seen_at)),
    ]
    rows += [("missed by" if i == 0 else "", _who(miss)) for i, miss in enumerate(found.misses[:_MISSES])]
    if len(found.misses) > _MISSES:
        rows.append(("", f"and {len(found.misses) - _MISSES} more, see --json"))
    if found.nearest is not None:
        rows += [("nearest", found.nearest.key), ("", _state(found.nearest))]
    return rows


def _state(known: KnownKey) -> str:
    if known.state == "absent":
        return "nothing is published under it"
    text = "published" if known.state == "present" else known.state
    if known.created_at:
        text += f" {instant(known.created_at)}"
    if known.compile_seconds is not None:
        text += f", compiled in {seconds(known.compile_seconds)}"
    holder = known.holder
    if holder is not None:
        text += f" on {holder.host}" + (f", job {holder.job}" if holder.job else "")
    return text


def _who(miss: Miss) -> str:
    rank = "" if miss.rank is None else f"rank {miss.rank} on "
    return f"{rank}{miss.host}" + (f", job {miss.job}" if miss.job else "") + f", {instant(miss.at)}"


def _say_differences(found: Explanation) -> None:
    rows = [(d.factor, d.here or "-", d.there or "-") for d in found.differences]
    if rows:
        say()
        say(table(("DIFFERS", "HERE", "THERE"), rows))
    same = {"compiler", "target", "graph"} - {d.factor for d in found.differences}
    if rows and same:
        say(f"The same on both sides: {', '.join(sorted(same))} and everything not named.")


def _say_graph(graph: GraphDifference) -> None:
    if graph.counts:
        say()
        rows = [(one.op, str(one.here), str(one.there)) for one in graph.counts]
        say(table(("OPERATION", "HERE", "THERE"), rows, right=("HERE", "THERE")))
    first = graph.first
    if first is None:
        return
    say()
    say("first operation that differs" + (", in its operands only" if first.wiring else ""))
    say(pairs([*_place_rows("here", first.here), *_place_rows("there", first.there)], "  "))


def _place_rows(side: str, place: OpPlace | None) -> list[tuple[str, str]]:
    if place is None:
        return [(side, "has no such operation")]
    where = f", {place.where}" if place.where else ""
    return [(side, f"op {place.number}, {place.op}{where}"), ("", place.text)]


def _job(client: CacheClient, args: argparse.Namespace) -> int:
    found = client.explain_job(args.job)
    if args.json:
        say_json(asdict(found))
        return 0
    say(f"job {found.job}: {_number(found.ranks, 'rank')} missed {_number(found.keys, 'key')}")
    if found.truncated:
        say("There is more than is shown here.")
    say("what differs from the nearest key that was stored then:")
    say(pairs([(_number(len(cause.keys), "key"), cause.text) for cause in found.causes], "  "))
    split = [group for group in found.groups if len(group.variants) > 1]
    for group in split:
        _say_group(group)
    single = [group for group in found.groups if len(group.variants) == 1]
    if single:
        say()
        say("graphs without variants" if split else "no graph has variants")
        say(table(_HEAD, [_single_row(group) for group in single], right=_RIGHT))
    say()
    say("neffcache explain KEY compares one of them with the nearest stored key.")
    return 0


_HEAD = ("KEY", "OPS", "RANKS", "COMPILE", "STATE")
_RIGHT = ("OPS", "COMPILE")


def _single_row(group: VariantGroup) -> tuple[str, ...]:
    variant = group.variants[0]
    known = variant.key
    ops = "-" if group.ops is None else str(group.ops)
    return known.key[:_DIGITS], ops, _ranks(variant.ranks), seconds(known.compile_seconds), known.state


def _say_group(group: VariantGroup) -> None:
    ops = f", {group.ops} operations" if group.ops is not None else ""
    say()
    ranks = {rank for variant in group.variants for rank in variant.ranks}
    say(f"{_number(len(ranks), 'rank')}, {len(group.variants)} variants{ops}: {group.text}")
    for place in group.differing[:_PLACES]:
        say(f"  op {place.number} {place.op}" + (f", {place.where}" if place.where else ""))
    if len(group.differing) > _PLACES:
        say(f"  and {len(group.differing) - _PLACES} more operations, see --json")
    head = ("KEY", "RANKS", "COMPILE", f"OP {group.differing[0].number}" if group.differing else "")
    rows = [(v.key.key[:_DIGITS], _ranks(v.ranks), seconds(v.key.compile_seconds), v.detail) for v in group.variants]
    say(table(head, rows, right=("COMPILE",)))


def _ranks(ranks: list[int]) -> str:
    """`0-3,6`."""
    parts: list[str] = []
    start = 0
    for at in range(1, len(ranks) + 1):
        if at == len(ranks) or ranks[at] != ranks[at - 1] + 1:
            parts.append(str(ranks[start]) if at - start == 1 else f"{ranks[start]}-{ranks[at - 1]}")
            start = at
    return ",".join(parts) or "-"


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
