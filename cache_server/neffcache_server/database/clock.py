"""The one clock that decides about leases: the database's.

A server's or client's clock may be wrong by minutes, and two replicas then disagree about who holds a lease. So every
"now" in a statement is this expression, and Python only ever compares numbers that came out of it.
"""

from __future__ import annotations

from sqlalchemy import ColumnElement, Double, cast, func, literal_column

_SQLITE_NOW = "((julianday('now') - 2440587.5) * 86400.0)"


class DatabaseClock:
    """Makes the SQL expression for the present instant in Unix seconds. Tests put another in its place."""

    def __init__(self, dialect: str) -> None:
        self._dialect = dialect

    def now(self) -> ColumnElement[float]:
        """The instant at which the database evaluates the statement (not the start of its transaction)."""
        if self._dialect == "postgresql":
            return cast(func.extract("epoch", func.clock_timestamp()), Double)
        return literal_column(_SQLITE_NOW, Double)
