"""What a server under test keeps its state in: SQLite and a folder, or PostgreSQL and S3, both real.

A test that uses the fixture `backend` runs on both. It need not know: `support.cache_state` and `support.server` ask
`current()` for their settings.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from neffcache_server.settings import PREFIX

from support.postgres import Postgres
from support.s3 import BUCKET, S3

NAMES = ("sqlite+folder", "postgres+s3")


class Embedded:
    """SQLite and a folder in the server's data folder."""

    shared = False

    def settings(self, folder: Path) -> dict[str, Any]:
        """Settings for a server whose data folder is `folder`; the same for the same folder."""
        return {}

    def release(self, folder: Path) -> None:
        """The test is done with the state of that folder."""

    def release_all(self) -> None:
        """Nobody needs any state that servers were given so far."""

    def staging(self, folder: Path) -> Path:
        """Where uploads are checked."""
        return folder / "blobs" / ".staging"

    def remove_blob(self, folder: Path, namespace: str, sha256: str) -> None:
        """Take a blob away behind the server's back."""
        (folder / "blobs" / namespace / sha256[:2] / sha256).unlink()

    def replace_blob(self, folder: Path, namespace: str, sha256: str, data: bytes) -> None:
        """Put other bytes in its place."""
        (folder / "blobs" / namespace / sha256[:2] / sha256).write_bytes(data)

    def blobs(self, folder: Path) -> list[str]:
        """Digests of the blobs that are stored, in whatever namespace."""
        return sorted(p.name for p in (folder / "blobs").glob("*/??/*") if p.is_file())

    def read_blob(self, folder: Path, namespace: str, sha256: str) -> bytes:
        """The stored bytes."""
        return (folder / "blobs" / namespace / sha256[:2] / sha256).read_bytes()

    @contextmanager
    def locked(self, folder: Path) -> Iterator[None]:
        """Somebody else keeps the server from writing to its database."""
        with closing(sqlite3.connect(folder / "neffcache.sqlite3", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            yield
            other.execute("ROLLBACK")

    def rows(self, folder: Path, statement: str) -> list[tuple[Any, ...]]:
        """What SQL says, read past the server."""
        connection = sqlite3.connect(f"file:{folder / 'neffcache.sqlite3'}?mode=ro", uri=True)
        try:
            return connection.execute(statement).fetchall()
        finally:
            connection.close()


class Production(Embedded):
    """PostgreSQL and S3: a migrated database and a prefix in the bucket for each data folder."""

    shared = True

    def __init__(self, postgres: Postgres, s3: S3) -> None:
        self.postgres = postgres
        self.s3 = s3
        self._databases: dict[Path, str] = {}

    def settings(self, folder: Path) -> dict[str, Any]:
        if folder not in self._databases:
            self._databases[folder] = self.postgres.take()
        return {
            "database_url": self.postgres.url(self._databases[folder]),
            "storage_url": f"s3://{BUCKET}/{self.prefix(folder)}",
            "s3_endpoint_url": self.s3.endpoint,
            "s3_addressing": "path",
        }

    def prefix(self, folder: Path) -> str:
        """Where in the bucket the blobs of that folder's server are."""
        return hashlib.sha256(str(folder).encode()).hexdigest()[:16]

    def staging(self, folder: Path) -> Path:
        return folder / "staging"

    def _object(self, folder: Path, namespace: str, sha256: str) -> dict[str, str]:
        return {"Bucket": BUCKET, "Key": f"{self.prefix(folder)}/{namespace}/{sha256}"}

    def remove_blob(self, folder: Path, namespace: str, sha256: str) -> None:
        self.s3.client().delete_object(**self._object(folder, namespace, sha256))

    def replace_blob(self, folder: Path, namespace: str, sha256: str, data: bytes) -> None:
        self.s3.client().put_object(**self._object(folder, namespace, sha256), Body=data)

    def blobs(self, folder: Path) -> list[str]:
        return sorted(key.rpartition("/")[2] for key in self.s3.keys(self.prefix(folder)))

    def read_blob(self, folder: Path, namespace: str, sha256: str) -> bytes:
        data: bytes = self.s3.client().get_object(**self._object(folder, namespace, sha256))["Body"].read()
        return data

    @contextmanager
    def locked(self, folder: Path) -> Iterator[None]:
        name = self._databases[folder]
        # As a rewrite of the table does; readers wait as well.
        self.postgres.execute(name, "BEGIN; LOCK TABLE entries, leases IN ACCESS EXCLUSIVE MODE")
        try:
            yield
        finally:
            self.postgres.execute(name, "ROLLBACK")

    def release(self, folder: Path) -> None:
        name = self._databases.pop(folder, None)
        if name is not None:
            self.postgres.give_back(name)

    def release_all(self) -> None:
        for folder in list(self._databases):
            self.release(folder)

    def rows(self, folder: Path, statement: str) -> list[tuple[Any, ...]]:
        return self.postgres.fetch(self._databases[folder], statement)


_current: Embedded = Embedded()


def current() -> Embedded:
    """What servers of this moment are given."""
    return _current


def environment(folder: Path) -> dict[str, str]:
    """The settings for a server process, AWS's own variables included."""
    settings = {PREFIX + name.upper(): str(value) for name, value in _current.settings(folder).items()}
    return {**settings, **(_current.s3.environment if isinstance(_current, Production) else {})}


@contextmanager
def using(backend: Embedded) -> Iterator[Embedded]:
    """Servers are given this backend until the block ends."""
    global _current
    saved, aws = _current, {}
    if isinstance(backend, Production):
        # boto3 in this process finds its credentials where it finds them in production.
        aws = {name: os.environ.get(name) for name in backend.s3.environment}
        os.environ.update(backend.s3.environment)
    _current = backend
    try:
        yield backend
    finally:
        _current = saved
        for name, value in aws.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        backend.release_all()
