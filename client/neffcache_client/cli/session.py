"""The server that a command talks to."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from neffcache_client.api import CacheClient
from neffcache_client.errors import NeffcacheError, SettingsError
from neffcache_client.settings import ClientSettings

_SHORTEST_PREFIX = 6


def server_settings() -> ClientSettings:
    """Settings that name a server. Raises SettingsError otherwise."""
    settings = ClientSettings.from_env()
    if not settings.url:
        raise SettingsError("NEFFCACHE_URL is not set; name the server: export NEFFCACHE_URL=http://host:8765")
    return settings


@contextmanager
def server() -> Iterator[CacheClient]:
    """A client of the server that NEFFCACHE_URL names."""
    with CacheClient(server_settings()) as client:
        yield client


def positive(text: str) -> int:
    """A number for argparse: how many to show."""
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text)):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no number of at least 1")
    return int(text)


def check_key(text: str) -> str:
    """A key or the beginning of one. Raises SettingsError for what can be neither."""
    key = text.lower()
    if not _SHORTEST_PREFIX <= len(key) <= 64 or any(c not in "0123456789abcdef" for c in key):
        raise SettingsError(f"{text[:80]!r} is no key: expected {_SHORTEST_PREFIX} to 64 hex digits")
    return key


def the_one(key: str, keys: Iterator[str], what: str) -> str:
    """The only one of `keys` that begins with `key`. Raises NeffcacheError when there are none or several."""
    found = sorted({k for k in keys if k.startswith(key)})
    if not found:
        raise NeffcacheError(f"there is no {what} with key {key}")
    if len(found) > 1:
        raise NeffcacheError(f"{len(found)} keys begin with {key}; give more digits")
    return found[0]
