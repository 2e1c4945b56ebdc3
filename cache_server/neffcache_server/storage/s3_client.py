"""boto3: clients as the settings want them, and its errors in the store's vocabulary."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from neffcache_server.problems import SetupError, StorageUnavailable
from neffcache_server.settings import ServerSettings
from neffcache_server.storage.base import BlobNotFound, StorageMisconfigured

_ATTEMPTS = 4
_CONNECT_SECONDS = 3.0
_NOT_FOUND = ("404", "NoSuchKey", "NotFound")
_DENIED = ("401", "403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken")


class Bucket(NamedTuple):
    """Where the blobs are. `prefix` is empty or ends with a slash."""

    name: str
    prefix: str


def parse_s3_url(url: str) -> Bucket:
    """`s3://bucket`, `s3://bucket/some/prefix`, with or without a last slash. Raises SetupError."""
    parts = urlsplit(url)
    prefix = parts.path.strip("/")
    if parts.scheme != "s3" or not parts.netloc or parts.query or parts.fragment or "@" in parts.netloc:
        raise SetupError(f"NEFFCACHE_SERVER_STORAGE_URL={url!r} is not understood: give s3://bucket/prefix")
    if "//" in prefix:
        raise SetupError(f"NEFFCACHE_SERVER_STORAGE_URL={url!r}: the prefix has an empty part")
    return Bucket(parts.netloc, f"{prefix}/" if prefix else "")


class S3Clients:
    """boto3 clients, made when they are first wanted (the import alone takes a good part of a second)."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._made: dict[str, Any] = {}

    def inner(self) -> Any:
        """What this server itself talks to."""
        return self._client(self._settings.s3_endpoint_url)

    def public(self) -> Any:
        """What presigned URLs name: ranks may see the store under another address."""
        return self._client(self._settings.s3_public_endpoint_url or self._settings.s3_endpoint_url)

    def _client(self, endpoint: str) -> Any:
        # Clients may be shared by threads, making one may not.
        with self._lock:
            client = self._made.get(endpoint)
            if client is None:
                client = self._made[endpoint] = _make(self._settings, endpoint)
            return client


def _make(settings: ServerSettings, endpoint: str) -> Any:
    import boto3
    from botocore.config import Config

    config = Config(
        # Version 2, which some endpoints would get by default, signs neither length nor checksum.
        signature_version="s3v4",
        retries={"mode": "adaptive", "total_max_attempts": _ATTEMPTS},
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=settings.s3_timeout_seconds,
        max_pool_connections=settings.s3_connections,
        s3={"addressing_style": settings.s3_addressing},
        # Uploads carry a SHA-256 of the whole; other checksums would only cost time, and fail on older stores.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    return boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint or None,
        region_name=settings.s3_region or None,
        verify=str(settings.s3_ca_file) if settings.s3_ca_file else None,
        config=config,
    )


@contextmanager
def translated(bucket: Bucket) -> Iterator[None]:
    """Raises BlobNotFound for a missing object, StorageUnavailable for everything else boto3 raises."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as exc:
        raise _from_answer(exc.response, bucket) from exc
    except BotoCoreError as exc:
        # Its sentences name endpoints and files, never keys or signatures.
        raise StorageUnavailable(f"the cache's object store cannot be used: {exc}") from exc
    except OSError as exc:
        raise StorageUnavailable(f"the cache's object store cannot be used: {exc.strerror or exc}") from exc


def no_bucket(bucket: Bucket) -> str:
    """What to say of a missing bucket."""
    return f"the bucket {bucket.name!r} does not exist; create it, the server never does"


def _from_answer(response: dict[str, Any], bucket: Bucket) -> Exception:
    code = str(response.get("Error", {}).get("Code", ""))
    status = str(response.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
    if code in _NOT_FOUND:
        return BlobNotFound()
    if code == "NoSuchBucket":
        return StorageMisconfigured(no_bucket(bucket))
    if code in _DENIED or status in ("401", "403"):
        return StorageMisconfigured(
            f"the object store refuses the server's credentials for the bucket {bucket.name!r} ({code or status}); "
            "they need to list the bucket and to get, put and delete its objects"
        )
    return StorageUnavailable(f"the cache's object store answered {code or status}")
