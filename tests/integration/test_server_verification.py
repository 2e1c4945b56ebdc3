"""Reading a blob again that a client has called damaged."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from neffcache_client.wire import PublishRequest
from neffcache_server.problems import StorageUnavailable
from neffcache_server.state import State
from support import backends
from support.cache_state import acquire, lease_id, neff, opened_state, upload

KEY = "a" * 64


async def published(state: State, data: bytes) -> str:
    await acquire(state, KEY, 1)
    digest = await upload(state, 1, data)
    await state.publishing.publish(
        "default", lease_id(1), PublishRequest(sha256=digest, size=len(data), compile_seconds=1.0)
    )
    return digest


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Nobody in this process can open a file any more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    taken: list[int] = []
    try:
        while True:
            try:
                taken.append(os.dup(0))
            except OSError:
                break
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_blob_that_cannot_be_read_just_now_is_not_called_damaged(tmp_path: Path) -> None:
    """A server without descriptors, or a file system that is away for a moment, must not cost the fleet a compile."""

    async def scenario() -> None:
        async with opened_state(tmp_path) as state:
            digest = await published(state, neff("sound"))
            with no_descriptors(), pytest.raises(StorageUnavailable):
                await state.blobs.verifier.verify("default", digest)
            assert (await acquire(state, KEY, 2)).state == "hit"
            assert await state.blobs.verifier.verify("default", digest) == "sound"

    asyncio.run(scenario())


@pytest.mark.parametrize("damage", ["changed", "short", "gone"])
def test_a_damaged_blob_is_served_to_nobody_any_more(tmp_path: Path, damage: str) -> None:
    async def scenario() -> None:
        async with opened_state(tmp_path) as state:
            data = neff("to be damaged")
            digest = await published(state, data)
            if damage == "gone":
                backends.current().remove_blob(tmp_path, "default", digest)
            else:
                changed = data[:-1] + bytes([data[-1] ^ 1]) if damage == "changed" else data[:-1]
                backends.current().replace_blob(tmp_path, "default", digest, changed)
            verdict = await state.blobs.verifier.verify("default", digest)
            assert verdict == ("missing" if damage == "gone" else "quarantined")
            assert (await acquire(state, KEY, 2)).state == "leased"

    asyncio.run(scenario())
