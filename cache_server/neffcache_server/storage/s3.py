"""Blobs in S3: whole objects `<prefix>/<namespace>/<sha256>`, sent and fetched by presigned URLs.

boto3 blocks, so it runs in threads of its own number; it is imported when the first call needs it. Only "there is no
such object" is a BlobNotFound: throttling, credentials, DNS and a bucket that is gone stay errors, since a miss would
mark entries as lost and have the whole fleet compile again.
"""

from __future__ import annotations

import base64
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from neffcache_client.wire import UploadAnswer, check_key, check_namespace

from neffcache_server.kit.shared_read import SharedRead
from neffcache_server.problems import SetupError, StorageUnavailable
from neffcache_server.settings import ServerSettings
from neffcache_server.storage.base import BlobNotFound, StorageMisconfigured, StoredBlob, StoredObject
from neffcache_server.storage.s3_client import S3Clients, no_bucket, parse_s3_url, translated

T = TypeVar("T")

_CHUNK = 1 << 20


class S3Store:
    """A BlobStore in one bucket. Connects at first use."""

    def __init__(self, settings: ServerSettings) -> None:
        """Raises SetupError for a URL or folder that cannot be used."""
        self._bucket = parse_s3_url(settings.effective_storage_url)
        self._clients = S3Clients(settings)
        self._presign = settings.s3_presign
        self._presign_seconds = settings.s3_presign_seconds
        self._limiter = CapacityLimiter(settings.s3_connections)
        self._sizes: dict[tuple[str, str], SharedRead[StoredBlob]] = {}
        self.staging = settings.data_dir.absolute() / "staging"
        try:
            self.staging.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise SetupError(f"the folder {self.staging} for uploads cannot be made: {exc.strerror}") from exc

    def _object(self, namespace: str, sha256: str) -> dict[str, str]:
        return {"Bucket": self._bucket.name, "Key": f"{self._bucket.prefix}{namespace}/{sha256}"}

    async def _run(self, call: Callable[[Any], T]) -> T:
        """`call(client)` in a thread; its errors leave in the store's vocabulary."""

        def run() -> T:
            with translated(self._bucket):
                return call(self._clients.inner())

        return await to_thread.run_sync(run, limiter=self._limiter)

    async def put(self, namespace: str, sha256: str, file: Path) -> None:
        def put(client: Any) -> None:
            with file.open("rb") as body:
                client.put_object(**self._object(namespace, sha256), Body=body, ChecksumSHA256=_base64(sha256))

        await self._run(put)
        await to_thread.run_sync(os.unlink, file)

    async def size(self, namespace: str, sha256: str) -> int:
        # The ranks of a job ask within a moment. They share calls to the store, but no answer is remembered: the
        # blob may be removed behind our back, and a rank must hear that from us, not from a presigned URL.
        shared = self._sizes.setdefault((namespace, sha256), SharedRead(lambda: self.inspect(namespace, sha256)))
        try:
            return (await shared()).size
        finally:
            if shared.idle:
                self._sizes.pop((namespace, sha256), None)

    async def inspect(self, namespace: str, sha256: str) -> StoredBlob:
        """Length, and the SHA-256 that the store computed when it took the object. Raises BlobNotFound."""

        def head(client: Any) -> Any:
            try:
                return client.head_object(**self._object(namespace, sha256), ChecksumMode="ENABLED")
            except client.exceptions.ClientError as exc:
                # HEAD has no body that could tell a missing object from a missing bucket.
                if exc.response["ResponseMetadata"].get("HTTPStatusCode") == 404:
                    self._require_bucket(client)
                raise

        found = await self._run(head)
        return StoredBlob(int(found["ContentLength"]), _hex(found.get("ChecksumSHA256")))

    async def open(self, namespace: str, sha256: str) -> S3Reader:
        return S3Reader(self, self._object(namespace, sha256), await self.size(namespace, sha256))

    @asynccontextmanager
    async def as_file(self, namespace: str, sha256: str) -> AsyncIterator[Path]:
        reader = await self.open(namespace, sha256)
        with _translated_staging():
            descriptor, name = tempfile.mkstemp(dir=self.staging)
        try:
            with _translated_staging(), os.fdopen(descriptor, "wb") as file:
                async for chunk in reader.chunks(0, reader.size):
                    await to_thread.run_sync(file.write, chunk)
            yield Path(name)
        finally:
            os.unlink(name)

    async def download_url(self, namespace: str, sha256: str) -> str | None:
        if self._presign == "none":
            return None
        return await self._presigned("get_object", self._object(namespace, sha256))

    async def upload_ticket(self, namespace: str, sha256: str, size: int) -> UploadAnswer | None:
        if self._presign != "all":
            return None
        try:
            stored = await self.inspect(namespace, sha256)
        except BlobNotFound:
            pass
        else:
            # `If-None-Match` would keep a damaged object for ever. Through this server it is written over.
            if stored.sha256 != sha256:
                return None
        checksum = _base64(sha256)
        conditions = {"ContentLength": size, "ChecksumSHA256": checksum, "IfNoneMatch": "*"}
        url = await self._presigned("put_object", {**self._object(namespace, sha256), **conditions})
        # All of these are signed: a request that leaves one out, or says another value, is refused by the store.
        headers = {"content-length": str(size), "x-amz-checksum-sha256": checksum, "if-none-match": "*"}
        return UploadAnswer(how="presigned", url=url, headers=headers)

    async def _presigned(self, operation: str, parameters: dict[str, Any]) -> str:
        # In a thread: signing may first have to fetch fresh credentials.
        def sign() -> str:
            with translated(self._bucket):
                url: str = self._clients.public().generate_presigned_url(
                    operation, Params=parameters, ExpiresIn=self._presign_seconds
                )
                return url

        return await to_thread.run_sync(sign, limiter=self._limiter)

    async def delete(self, namespace: str, sha256: str) -> None:
        await self._run(lambda client: client.delete_object(**self._object(namespace, sha256)))

    async def listing(self) -> AsyncIterator[StoredObject]:
        asked: dict[str, str] = {"Bucket": self._bucket.name, "Prefix": self._bucket.prefix}
        while True:
            page = await self._run(lambda client: client.list_objects_v2(**asked))
            for entry in page.get("Contents", ()):
                namespace, _, sha256 = entry["Key"].removeprefix(self._bucket.prefix).partition("/")
                try:
                    check_namespace(namespace)
                    check_key(sha256)
                except ValueError:
                    continue
                yield StoredObject(namespace, sha256, int(entry["Size"]), entry["LastModified"].timestamp())
            if not page.get("IsTruncated"):
                return
            asked["ContinuationToken"] = page["NextContinuationToken"]

    async def check(self) -> None:
        await self._run(self._require_bucket)

    def _require_bucket(self, client: Any) -> None:
        try:
            client.head_bucket(Bucket=self._bucket.name)
        except client.exceptions.ClientError as exc:
            if exc.response["ResponseMetadata"].get("HTTPStatusCode") != 404:
                raise
            raise StorageMisconfigured(no_bucket(self._bucket)) from exc


class S3Reader:
    """An object of known length. Its bytes are asked for when `chunks` is read."""

    def __init__(self, store: S3Store, where: dict[str, str], size: int) -> None:
        self.size = size
        self._store = store
        self._where = where
        self._bodies: set[Any] = set()

    async def chunks(self, start: int, stop: int) -> AsyncIterator[bytes]:
        if start >= stop:
            return
        asked = {**self._where, "Range": f"bytes={start}-{stop - 1}"}
        body = await self._store._run(lambda client: client.get_object(**asked)["Body"])
        self._bodies.add(body)
        try:
            while chunk := await self._store._run(lambda _client: body.read(_CHUNK)):
                yield chunk
        finally:
            self._bodies.discard(body)
            # Closing drops the rest of the transfer; it blocks on nothing.
            body.close()

    async def close(self) -> None:
        while self._bodies:
            self._bodies.pop().close()


@contextmanager
def _translated_staging() -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise StorageUnavailable(f"the server's folder for staging cannot take a copy: {exc.strerror}") from exc


def _base64(sha256: str) -> str:
    return base64.b64encode(bytes.fromhex(sha256)).decode()


def _hex(checksum: str | None) -> str | None:
    # A checksum of parts ("…-3") is none of the whole.
    if checksum is None or "-" in checksum:
        return None
    return base64.b64decode(checksum).hex()
