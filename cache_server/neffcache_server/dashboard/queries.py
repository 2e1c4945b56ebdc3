"""Statements of the dashboard alone: listings with search and order, sums over what is stored."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Boolean, ColumnElement, Select, case, func, literal, literal_column, or_, select

from neffcache_server.database.engine import Database, ReadConnection
from neffcache_server.database.models import counters, differences, entries, failures

ORDERS: dict[str, ColumnElement[Any]] = {
    "created": entries.c.created_at,
    "size": entries.c.size,
    "compile": entries.c.compile_seconds,
    "hits": entries.c.hits,
    "used": entries.c.last_hit_at,
}
PAGE = 50
MOST_PAGES = 200
"""Deeper ones cost a sort of everything before them; a search gets there sooner."""
MOST_COUNTED = PAGE * MOST_PAGES
_COLUMNS = tuple(c for c in entries.c if c.name not in ("factors", "boot", "pid"))
_DAY = 86400.0
AGES = (("today", 1.0), ("this week", 7.0), ("this month", 30.0), ("this quarter", 90.0), ("longer ago", 1e6))


@dataclass(slots=True, kw_only=True)
class Group:
    """Part of what is stored."""

    name: str
    number: int
    bytes: int
    seconds: float = 0.0
    """Compile time that it would take to make it again."""


class Queries:
    """Reads."""

    def __init__(self, database: Database) -> None:
        self._clock = database.clock
        self._dialect = database.dialect

    async def namespaces(self, db: ReadConnection) -> list[str]:
        """All that were ever used, at most 1000."""
        statement = select(counters.c.namespace).order_by(counters.c.namespace).limit(1000)
        return [row.namespace for row in await db.execute(statement)]

    async def graphs(
        self, db: ReadConnection, namespace: str | None, search: str, order: str, page: int, *, up: bool = False
    ) -> tuple[list[Any], int]:
        """A page of entries and how many there are in all, counted to `MOST_COUNTED` at most."""
        where = _matching(namespace, search, self._dialect)
        found = select(literal(1)).select_from(entries).where(*where)
        if search:
            # Counting every match would read every row; a page of them rarely does.
            found = found.limit(MOST_COUNTED)
        total = int((await db.execute(select(func.count()).select_from(found.subquery()))).scalar_one())
        column = ORDERS[order]
        statement = (
            select(*_COLUMNS)
            .where(*where)
            .order_by((column.asc() if up else column.desc()).nulls_last(), entries.c.key)
            .limit(PAGE)
            .offset((page - 1) * PAGE)
        )
        return list(await db.execute(statement)), total

    async def entry(self, db: ReadConnection, namespace: str, key: str) -> Any:
        """A row of `entries`, with nothing published under it too; None when the key is unknown."""
        statement = select(entries).where(entries.c.namespace == namespace, entries.c.key == key)
        return (await db.execute(statement)).one_or_none()

    async def differences(self, db: ReadConnection, namespace: str | None, key: str | None, limit: int) -> list[Any]:
        """Keys that gave two artifacts, latest first."""
        statement = select(differences).order_by(differences.c.seen_at.desc()).limit(limit)
        if namespace is not None:
            statement = statement.where(differences.c.namespace == namespace)
        if key is not None:
            statement = statement.where(differences.c.key == key)
        return list(await db.execute(statement))

    async def failures(
        self, db: ReadConnection, namespace: str | None, limit: int, key: str | None = None
    ) -> list[Any]:
        """Failures in force, latest first."""
        columns = [c for c in failures.c if c.name not in ("yield_host", "yield_until", "retried_job")]
        statement = (
            select(*columns)
            .where(failures.c.until > self._clock.now(), failures.c.kind.is_not(None))
            .order_by(failures.c.last_failure_at.desc())
            .limit(limit)
        )
        if namespace is not None:
            statement = statement.where(failures.c.namespace == namespace)
        if key is not None:
            statement = statement.where(failures.c.key == key)
        return list(await db.execute(statement))

    async def stored_by(self, db: ReadConnection, namespace: str | None, column: str, limit: int = 20) -> list[Group]:
        """What is stored, by a column of entries, largest first."""
        name = func.coalesce(entries.c[column], "unknown").label("name")
        statement = _sums(namespace, name).group_by(name).order_by(func.sum(entries.c.size).desc()).limit(limit)
        return [_group(row) for row in await db.execute(statement)]

    async def stored_by_age(self, db: ReadConnection, namespace: str | None, now: float) -> list[Group]:
        """What is stored, by when it was last asked for (or made, when nobody ever did)."""
        used = func.coalesce(entries.c.last_hit_at, entries.c.created_at)
        name = case(*((used >= now - days * _DAY, label) for label, days in AGES), else_="longer ago").label("name")
        found = {r.name: _group(r) for r in await db.execute(_sums(namespace, name).group_by(name))}
        return [found.get(label) or Group(name=label, number=0, bytes=0) for label, _ in AGES]

    async def older(
        self, db: ReadConnection, namespace: str | None, before: float, *, published: bool = False
    ) -> Group:
        """What was last used (or, with `published`, stored) before an instant and is not pinned."""
        when = entries.c.created_at if published else func.coalesce(entries.c.last_hit_at, entries.c.created_at)
        statement = _sums(namespace, literal("").label("name")).where(when < before, entries.c.pinned.is_(False))
        return _group((await db.execute(statement)).one())


def _matching(namespace: str | None, search: str, dialect: str) -> list[ColumnElement[bool]]:
    # Literal: the planner does not match a parameter with the index on entries that are not absent.
    where: list[ColumnElement[bool]] = [literal_column("entries.state <> 'absent'", Boolean)]
    if namespace is not None:
        where.append(entries.c.namespace == namespace)
    if re.fullmatch(r"[0-9a-f]{4,64}", search):
        where.append(entries.c.key.startswith(search, autoescape=True))
    elif search:
        columns = (entries.c.compiler_version, entries.c.target, entries.c.job, entries.c.host, entries.c.state)
        # SQLite's LIKE ignores case by itself, in a third of the time that lower() takes.
        like = "contains" if dialect == "sqlite" else "icontains"
        where.append(or_(*(getattr(c, like)(search, autoescape=True) for c in columns)))
    return where


def _sums(namespace: str | None, name: Any) -> Select[Any]:
    statement = select(
        name,
        func.count().label("number"),
        func.sum(entries.c.size).label("bytes"),
        func.sum(entries.c.compile_seconds).label("seconds"),
    ).where(entries.c.state == "present")
    return statement if namespace is None else statement.where(entries.c.namespace == namespace)


def _group(row: Any) -> Group:
    return Group(name=row.name, number=row.number, bytes=int(row.bytes or 0), seconds=float(row.seconds or 0))
