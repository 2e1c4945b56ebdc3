"""`neffcache serve` and `neffcache db`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neffcache_server.problems import ServerProblem, SetupError

if TYPE_CHECKING:
    from neffcache_server.settings import ServerSettings

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def register_serve(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Add `serve`."""
    parser = subparsers.add_parser(
        "serve",
        help="run the cache server",
        description="Run the cache server. Every option has a setting NEFFCACHE_SERVER_…, see docs/settings.md.",
    )
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on, 0 for a free one (default 8765)")
    parser.add_argument("--data-dir", type=Path, help="folder of the embedded database and blob store")
    parser.add_argument("--database-url", help="another database than SQLite in the data folder")
    parser.add_argument("--storage-url", help="another store than a folder in the data folder")
    parser.add_argument("--port-file", type=Path, help="write the server's URL to this file when it is ready")
    parser.add_argument(
        "--workers", type=int, help="processes (default 1, which is all that the embedded database takes)"
    )
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), help="default: warning")
    parser.add_argument("--log-format", choices=("text", "json"), help="form of log lines (default: text)")
    parser.add_argument("--access-log", action="store_true", default=None, help="log every request")
    return parser


def register_db(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Add `db upgrade` and `db check`."""
    parser = subparsers.add_parser("db", help="look after the server's database")
    parser.add_argument(
        "action", choices=("upgrade", "check"), help="upgrade: migrate; check: exit 1 unless migrated"
    )
    parser.add_argument("--data-dir", type=Path, help="folder of the embedded database")
    parser.add_argument("--database-url", help="another database than SQLite in the data folder")
    return parser


def run_serve(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code."""
    from neffcache_server.serve import serve

    return guarded(args, lambda settings: serve(settings, port_file=args.port_file))


def run_db(args: argparse.Namespace) -> int:
    """Upgrade or check the database. Returns the exit code."""
    from neffcache_server.database.migrate import is_current, upgrade
    from neffcache_server.settings import make_data_dir

    def act(settings: ServerSettings) -> int:
        url = settings.effective_database_url
        if args.action == "upgrade":
            if settings.embedded:
                make_data_dir(settings.data_dir)
            print(f"database is at revision {upgrade(url)}")  # noqa: T201  # the command's output
            return 0
        current = is_current(url)
        print("database is up to date" if current else "database needs `neffcache db upgrade`")  # noqa: T201
        return 0 if current else 1

    return guarded(args, act)


def guarded(args: argparse.Namespace, act: Any) -> int:
    from neffcache_server.settings import ServerSettings, load_settings

    given = {name: value for name, value in vars(args).items() if name in ServerSettings.model_fields}
    try:
        return int(act(load_settings(**given)))
    except SetupError as exc:
        print(f"neffcache: {exc}", file=sys.stderr)  # noqa: T201  # a person reads it
        return 2
    except ServerProblem as exc:
        print(f"neffcache: {exc.detail}", file=sys.stderr)  # noqa: T201
        return 1
