"""The server's parts in this process, on a clock that only a test moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from neffcache_client.neff import pack_neff
from neffcache_client.wire import AcquireAnswer, AcquireRequest, Holder
from neffcache_server.app import open_state
from neffcache_server.database.clock import DatabaseClock
from neffcache_server.database.migrate import upgrade
from neffcache_server.settings import ServerSettings
from neffcache_server.state import State
from sqlalchemy import ColumnElement, Double, literal

from support import backends


class StoppedClock(DatabaseClock):
    """Shows `value` until a test changes it."""

    def __init__(self, value: float = 1_000_000.0) -> None:
        self.value = value

    def now(self) -> ColumnElement[float]:
        return literal(self.value, Double)


def server_settings(folder: Path, **given: Any) -> ServerSettings:
    """Settings for a server in `folder`, on the backend of the running test."""
    return ServerSettings(data_dir=folder, **{**backends.current().settings(folder), **given})


@cache
def _migrated_template() -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "template.sqlite3"
        # In a thread: the migration runs an event loop of its own, and tests call this from theirs.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(upgrade, f"sqlite:///{path}").result()
        return path.read_bytes()


def migrated(settings: ServerSettings) -> ServerSettings:
    """Give the settings' SQLite database the schema that the migrations make. (PostgreSQL's has it already.)"""
    if not settings.embedded:
        return settings
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    (settings.data_dir / "neffcache.sqlite3").write_bytes(_migrated_template())
    return settings


@asynccontextmanager
async def opened_state(folder: Path, clock: DatabaseClock | None = None, **given: Any) -> AsyncIterator[State]:
    """A server's parts on a fresh, migrated database; closed at the end."""
    state = open_state(migrated(server_settings(folder, **given)), clock)
    try:
        yield state
    finally:
        state.leases.stop()
        # A read that nobody waits for any more still has a connection, which closing the pool would not close.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=2.0)
        await state.database.close()
        backends.current().release(folder)


async def present() -> bool:
    """A client that has not hung up."""
    return False


def request(number: int, *, host: str = "h0", **given: Any) -> AcquireRequest:
    """An acquire under the lease id that `number` stands for; each host has one boot."""
    holder = Holder(host=host, boot=f"boot-{host}", pid=number, job=given.pop("job", None))
    return AcquireRequest(lease_id=lease_id(number), holder=holder, **given)


def lease_id(number: int) -> str:
    """A lease id, told apart by `number`."""
    return f"{number:032x}"


async def acquire(state: State, key: str, number: int, **given: Any) -> AcquireAnswer:
    """Ask for a key in the namespace `default`."""
    return await state.leases.acquire("default", key, request(number, **given), present)


def neff(text: str, uuid: bytes = bytes(16)) -> bytes:
    """A small valid NEFF; the same text with another uuid is the same compile done twice."""
    members = {
        "info.json": b'{"tool_version": "2.26.0+abc"}',
        "kelf-0.json": b'{"target": "cayman"}',
        "sg00/text": text.encode(),
    }
    return pack_neff(members, uuid=uuid)


async def chunked(data: bytes) -> AsyncIterator[bytes]:
    """A request body."""
    yield data


async def upload(state: State, number: int, data: bytes) -> str:
    """Send a blob under a lease; returns its digest."""
    import hashlib

    digest = hashlib.sha256(data).hexdigest()
    lease = await state.blobs.authorise("default", lease_id(number), len(data))
    await state.blobs.receive(lease, digest, len(data), chunked(data))
    return digest


def rows(folder: Path, statement: str) -> list[tuple[Any, ...]]:
    """What SQL says, read past the server."""
    return backends.current().rows(folder, statement)
