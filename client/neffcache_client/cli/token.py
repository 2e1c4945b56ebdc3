"""`neffcache token create|ls|revoke`: who may use the server."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import asdict

from neffcache_client.api import CacheClient
from neffcache_client.cli.output import instant, say, say_json, table
from neffcache_client.cli.session import server
from neffcache_client.wire import ROLES, TokenInfo, TokenRequest

_HEAD = ("ID", "NAME", "ROLE", "NAMESPACE", "CREATED", "EXPIRES", "STATE")
_UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 604800}


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `token` to the command line."""
    parser = subparsers.add_parser(
        "token",
        help="make, list and revoke tokens",
        description="Needs a token with the role admin in NEFFCACHE_TOKEN. The first one is what the server was "
        "started with in NEFFCACHE_SERVER_ADMIN_TOKEN.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="create|ls|revoke")
    create = actions.add_parser("create", help="make a token; it is shown once, on stdout")
    create.add_argument("name", help="what it is for, such as ci-main")
    create.add_argument("--role", choices=ROLES, default="write", help="default: %(default)s")
    create.add_argument("--namespace", metavar="NAME", help="one namespace, or '*' for all; default: this one's")
    create.add_argument("--expires", type=duration, metavar="30d", help="m, h, d, w; default: never")
    ls = actions.add_parser("ls", help="tokens that you administer, newest first")
    ls.add_argument("--namespace", metavar="NAME", help="only this namespace's")
    revoke = actions.add_parser("revoke", help="make a token useless, within 5 seconds")
    revoke.add_argument("id", help="as `ls` shows it")
    for sub in (create, ls, revoke):
        sub.add_argument("--json", action="store_true", help="for machines")


def run(args: argparse.Namespace) -> int:
    """Do the action."""
    with server() as client:
        return {"create": _create, "ls": _ls, "revoke": _revoke}[args.action](client, args)


def _create(client: CacheClient, args: argparse.Namespace) -> int:
    try:
        request = TokenRequest(
            name=args.name,
            role=args.role,
            namespace=args.namespace or client.namespace,
            expires_in_seconds=args.expires,
        )
    except ValueError as exc:
        sys.stderr.write(f"neffcache: {exc}\n")
        return 2
    made = client.create_token(request)
    if args.json:
        say_json({"token": made.token, **asdict(made.info)})
        return 0
    # The token alone on stdout, so that `TOKEN=$(neffcache token create …)` works.
    info = made.info
    sys.stderr.write(f"token {info.id}: {info.role} in {_where(info)}; it is not shown again\n")
    say(made.token)
    return 0


def _ls(client: CacheClient, args: argparse.Namespace) -> int:
    tokens = client.tokens(args.namespace)
    now = client.whoami().now
    if args.json:
        say_json({"tokens": [asdict(t) for t in tokens]})
    elif tokens:
        say(table(_HEAD, [_row(t, now) for t in tokens]))
    else:
        say("no tokens")
    return 0


def _revoke(client: CacheClient, args: argparse.Namespace) -> int:
    client.revoke_token(args.id)
    if args.json:
        say_json({"revoked": args.id})
    else:
        say(f"revoked {args.id}")
    return 0


def _row(token: TokenInfo, now: float) -> tuple[str, ...]:
    if token.revoked_at is not None:
        state = "revoked"
    elif token.expires_at is not None and token.expires_at <= now:
        state = "expired"
    else:
        state = "valid"
    expires = instant(token.expires_at) if token.expires_at is not None else "never"
    return token.id, token.name, token.role, token.namespace, instant(token.created_at), expires, state


def _where(token: TokenInfo) -> str:
    return "every namespace" if token.namespace == "*" else f"namespace {token.namespace}"


def duration(text: str) -> float:
    """`30d` in seconds. Raises argparse's error for anything else."""
    match = re.fullmatch(r"([0-9]{1,6})([mhdw])", text)
    if match is None or match[1].strip("0") == "":
        raise argparse.ArgumentTypeError(f"{text!r} is no duration; give a number with m, h, d or w, such as 30d")
    return float(int(match[1]) * _UNITS[match[2]])
