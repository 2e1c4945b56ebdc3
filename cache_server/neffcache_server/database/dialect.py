"""The few statements that SQLite and PostgreSQL spell differently."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Table, case
from sqlalchemy.dialects import postgresql, sqlite

Insert = sqlite.Insert | postgresql.Insert


def upsert(dialect: str, table: Table) -> Any:
    """An INSERT that knows `on_conflict_do_nothing` and `on_conflict_do_update`."""
    return postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)


def larger(a: Any, b: Any) -> Any:
    """The larger of two values of a row: SQLite's two-argument max() is PostgreSQL's greatest()."""
    return case((a > b, a), else_=b)
