"""From a storage URL to a store."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from neffcache_server.problems import SetupError
from neffcache_server.settings import ServerSettings
from neffcache_server.storage.base import BlobStore


def open_store(settings: ServerSettings) -> BlobStore:
    """The store that the settings name. Raises SetupError for one that cannot be used."""
    url = urlsplit(settings.effective_storage_url)
    if url.scheme == "file" and not url.netloc and url.path.startswith("/"):
        from neffcache_server.storage.folder import FolderStore

        return FolderStore(Path(unquote(url.path)))
    if url.scheme == "s3":
        from neffcache_server.storage.s3 import S3Store

        return S3Store(settings)
    raise SetupError(
        f"NEFFCACHE_SERVER_STORAGE_URL={settings.effective_storage_url!r} is not understood: "
        "give file:///an/absolute/folder or s3://bucket/prefix"
    )
