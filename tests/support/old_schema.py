"""What the program of an older revision knows of a database, and whether it can go on with a newer one.

An upgrade migrates first and replaces servers afterwards, so a revision may only add what older code
does not notice. What older code used goes a release later, when nothing uses it any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

from sqlalchemy import (
    Boolean,
    Column,
    Connection,
    Double,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    delete,
    insert,
    select,
    update,
)

# What a CHECK of some revision allows. A new one that these do not meet is either a mistake or wants a word here.
ALLOWED: dict[tuple[str, str], Any] = {
    ("entries", "state"): "absent",
    ("leases", "status"): "live",
    ("tokens", "role"): "read",
}
INTERNAL = "alembic_version"
_numbers = count(1)


@dataclass(frozen=True, slots=True)
class Schema:
    """The tables of a database at one moment."""

    tables: dict[str, Table]

    @classmethod
    def read(cls, connection: Connection) -> Schema:
        """As the database itself describes them."""
        metadata = MetaData()
        metadata.reflect(connection)
        return cls({name: table for name, table in metadata.tables.items() if name != INTERNAL})


def differences(before: Schema, connection: Connection) -> list[str]:
    """What a program that knows `before` would stumble over in the database as it is now."""
    after = Schema.read(connection)
    found: list[str] = []
    for name, old in before.tables.items():
        new = after.tables.get(name)
        if new is None:
            found.append(f"table {name} is gone")
            continue
        found += [f"{name}.{column.name} is gone" for column in old.columns if column.name not in new.columns]
        found += [_of_column(name, old.columns.get(column.name), column) for column in new.columns]
        found += _of_keys(connection, old, name)
    return [sentence for sentence in found if sentence]


def _of_column(table: str, old: Column[Any] | None, new: Column[Any]) -> str:
    name = f"{table}.{new.name}"
    if old is None:
        return "" if new.nullable or new.server_default is not None else f"{name} is new, NOT NULL and has no default"
    if old.nullable and not new.nullable:
        return f"{name} does not take NULL any more"
    if old.server_default is not None and new.server_default is None and not new.nullable:
        return f"{name} has no default any more"
    if _narrower(old, new):
        return f"{name} was {old.type!r} and is {new.type!r}"
    return ""


def _narrower(old: Column[Any], new: Column[Any]) -> bool:
    if old.type._type_affinity is not new.type._type_affinity:
        return True
    lengths = [getattr(column.type, "length", None) for column in (old, new)]
    return lengths[1] is not None and (lengths[0] is None or lengths[0] > lengths[1])


def _of_keys(connection: Connection, old: Table, name: str) -> list[str]:
    """Rows that were allowed and are not: other keys, more that has to be unique."""
    now = _unique_of(Table(name, MetaData(), autoload_with=connection))
    more = now - _unique_of(old)
    return [f"{name}: {', '.join(columns) or 'an expression'} has to be unique" for columns in sorted(more)]


def _unique_of(table: Table) -> set[tuple[str, ...]]:
    keys = [table.primary_key.columns.keys()]
    keys += [[c.name for c in i.expressions if isinstance(c, Column)] for i in table.indexes if i.unique]
    keys += [rule.columns.keys() for rule in table.constraints if isinstance(rule, UniqueConstraint)]
    return {tuple(sorted(key)) for key in keys}


class OldProgram:
    """The statements of a program that knows the schema of its own time, and no column more."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema

    def work(self, connection: Connection) -> None:
        """In every table: add a row with all columns and one with those it must, find, change and remove them.

        Raises what the database raises.
        """
        for table in self._schema.tables.values():
            for required_only in (False, True):
                number = next(_numbers)
                row = {
                    column.name: _value(column, number)
                    for column in table.columns
                    if not required_only or _required(column)
                }
                connection.execute(insert(table).values(row))
                this = [column == row[column.name] for column in table.primary_key.columns]
                found = connection.execute(select(table).where(*this)).mappings().one()
                other = {name: found[name] for name in row if found[name] != row[name]}
                assert not other, f"{table.name} gives other values back: {other}"
                plain = next((c for c in table.columns if not c.primary_key), None)
                if plain is not None:
                    connection.execute(update(table).where(*this).values({plain.name: found[plain.name]}))
                assert connection.execute(delete(table).where(*this)).rowcount == 1

    def leave_rows(self, connection: Connection) -> None:
        """One row in every table, for a migration to meet."""
        for table in self._schema.tables.values():
            number = next(_numbers)
            row = {column.name: _value(column, number) for column in table.columns}
            connection.execute(insert(table).values(row))


def _required(column: Column[Any]) -> bool:
    return column.primary_key or (not column.nullable and column.server_default is None)


def _value(column: Column[Any], number: int) -> Any:
    assert column.table is not None
    if (value := ALLOWED.get((column.table.name, column.name))) is not None:
        return value
    kind = column.type
    if isinstance(kind, Boolean):
        return True
    if isinstance(kind, Integer):
        return 1_000_000 + number
    if isinstance(kind, Double) or kind.python_type is float:
        return float(number)
    if isinstance(kind, Text):
        return "{}"
    length = getattr(kind, "length", None) or 8
    return f"{number}"[-length:]
