"""`python -m neffcache_server serve …`: the server's commands without the client's."""

from __future__ import annotations

import argparse
import sys

from neffcache_server.cli import register_db, register_serve, run_db, run_serve


def main() -> int:
    """Parse and run `serve` or `db`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="neffcache")
    commands = parser.add_subparsers(dest="command_name", required=True)
    register_serve(commands)
    register_db(commands)
    args = parser.parse_args()
    return run_serve(args) if args.command_name == "serve" else run_db(args)


if __name__ == "__main__":
    sys.exit(main())
