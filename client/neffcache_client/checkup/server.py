"""The server as this host sees it: reachable, ready, what the token allows, and 1 MiB there and back."""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
import time
from collections.abc import Generator, Iterator

from neffcache_client.api import CacheClient
from neffcache_client.checkup.finding import Finding, fail, ok, warn
from neffcache_client.contact import this_holder
from neffcache_client.errors import CacheUnavailable, NeffcacheError, NotAllowed, RequestRefused
from neffcache_client.identity import host_name
from neffcache_client.local_tier import describe
from neffcache_client.neff import check_neff, pack_neff
from neffcache_client.settings import ClientSettings
from neffcache_client.transfer import download, upload
from neffcache_client.wire import LEASE_HEADER, AcquireRequest, Artifact, WhoAmI

_SIZE = 1 << 20
_NOTICEABLE_SECONDS = 5.0
_PRESIGNED_FAILS_SECONDS = 600.0


def check_server(settings: ClientSettings) -> Iterator[Finding]:
    """Everything about the server that `settings` name. Publishes nothing."""
    try:
        with CacheClient(settings) as client:
            who = yield from _reach(client)
            if who is None:
                return
            yield from _rights(settings, who)
            yield from _store(client, settings, who)
    except CacheUnavailable as exc:
        yield fail("server", f"{settings.url}: {exc}", "see whether it runs, and what lies between")


def _reach(client: CacheClient) -> Generator[Finding, None, WhoAmI | None]:
    began, wall = time.monotonic(), time.time()
    try:
        who = client.whoami()
    except NotAllowed as exc:
        yield fail("token", str(exc), "set NEFFCACHE_TOKEN to a valid token: `neffcache token create` makes one")
        return None
    except RequestRefused as exc:
        yield fail("server", f"{client.url}: {exc}", "it may be older than this client: upgrade the server first")
        return None
    seconds = time.monotonic() - began
    yield ok("server", f"{client.url} answers in {seconds * 1000:.0f} ms")
    try:
        if (trouble := client.ready()) is not None:
            yield fail("server", trouble, "leases go on for a while without the store; see the server's log")
        else:
            yield ok("server", "its database and store can be used")
    except NeffcacheError as exc:
        yield fail("server", str(exc), "see the server's log and /readyz")
    yield _clock(who.now - (wall + seconds / 2))
    return who


def _clock(difference: float) -> Finding:
    text = f"this host's clock is {abs(difference):.1f} s {'behind' if difference > 0 else 'ahead of'} the database's"
    if abs(difference) < _NOTICEABLE_SECONDS:
        return ok("clock", text)
    if abs(difference) < _PRESIGNED_FAILS_SECONDS:
        return warn("clock", f"{text}; leases do not mind, logs will puzzle you", "run an NTP client")
    return fail("clock", f"{text}; TLS and presigned URLs may be refused", "run an NTP client")


def _rights(settings: ClientSettings, who: WhoAmI) -> Iterator[Finding]:
    where = "every namespace" if who.namespace == "*" else f"namespace {who.namespace}"
    text = f"{who.name}: {who.role} in {where}"
    if who.trusted:
        text += f", reads {who.trusted} too"
    if not who.may("read", settings.namespace):
        todo = "set NEFFCACHE_NAMESPACE or NEFFCACHE_TOKEN to ones that belong together"
        yield fail("token", f"{text}; nothing in namespace {settings.namespace}", todo)
    elif settings.mode == "readwrite" and not who.may("write", settings.namespace):
        todo = "set NEFFCACHE_MODE=readonly if that is meant, else use a token with the role write"
        yield warn("token", f"{text}; what is compiled here is shared with nobody", todo)
    else:
        yield ok("token", text)


def _store(client: CacheClient, settings: ClientSettings, who: WhoAmI) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory(prefix="neffcache-doctor-") as folder:
        try:
            if settings.mode == "readwrite" and who.may("write", settings.namespace):
                yield _round_trip(client, settings, folder)
            elif who.may("read", settings.namespace):
                yield _read_only(client, folder)
        except NeffcacheError as exc:
            yield fail("store", str(exc), "see the server's log; with S3 also whether this host reaches the bucket")
        except OSError as exc:
            yield fail("store", f"not tried: {describe(exc)}", "make room in TMPDIR or name another")


def _round_trip(client: CacheClient, settings: ClientSettings, folder: str) -> Finding:
    """1 MiB under a lease that is given back, so the server's garbage collection takes the bytes away again."""
    sent, got = os.path.join(folder, "sent.neff"), os.path.join(folder, "got.neff")
    noise = os.urandom(_SIZE)
    with open(sent, "wb") as f:
        f.write(pack_neff({"info.json": b'{"tool_version": "neffcache-doctor"}', "noise": noise}))
    info = check_neff(sent)
    # One key per host, of no graph: a doctor that runs every minute leaves one row behind.
    key = hashlib.sha256(f"neffcache doctor on {host_name()}".encode()).hexdigest()
    lease = secrets.token_hex(16)
    request = AcquireRequest(lease_id=lease, holder=this_holder(settings), wait_seconds=10.0, from_spool=True)
    answer = client.acquire(key, request)
    if answer.state != "leased":
        return warn("store", "not tried: another doctor of this host is at it", "run it again")
    try:
        began = time.monotonic()
        upload(client, lease, sent, info)
        up = time.monotonic() - began
        artifact = Artifact(
            sha256=info.sha256, size=info.size, url=f"/v1/ns/{settings.namespace}/blobs/{info.sha256}"
        )
        began = time.monotonic()
        try:
            download(client, artifact, got)
        except RequestRefused:
            # What went to the store directly is known to the server when it is published, which this never is.
            _stream(client, lease, sent, artifact)
            began = time.monotonic()
            download(client, artifact, got)
        down = time.monotonic() - began
    finally:
        client.release(lease)
    return ok("store", f"1 MiB up in {up * 1000:.0f} ms, down in {down * 1000:.0f} ms, equal")


def _stream(client: CacheClient, lease: str, path: str, artifact: Artifact) -> None:
    with open(path, "rb") as f:
        client.put(artifact.url, iter([f.read()]), artifact.size, {LEASE_HEADER: lease})


def _read_only(client: CacheClient, folder: str) -> Finding:
    newest = client.entries(limit=1).entries
    if not newest:
        return ok("store", "nothing to read yet")
    artifact = client.lookup([newest[0].key]).present.get(newest[0].key)
    if artifact is None:
        return warn("store", "the newest entry is not served at present", "neffcache entries show")
    began = time.monotonic()
    download(client, artifact, os.path.join(folder, "got.neff"))
    return ok("store", f"the newest entry, {artifact.size} bytes, came in {(time.monotonic() - began) * 1000:.0f} ms")
