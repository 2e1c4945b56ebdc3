"""Empties the spool: called by `neffcache push`, and run in the background by whoever finds the server healthy.

The background uploader is a process of its own, because a launcher lives for a second and nobody shall wait for an
upload. It has no terminal, lives for 90 s at most, and there is one per host and server (by flock).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from neffcache_client import reports
from neffcache_client.contact import Contact
from neffcache_client.errors import (
    CacheUnavailable,
    LocalTierError,
    NeffcacheError,
    NeffInvalid,
    RequestRefused,
)
from neffcache_client.heartbeat import Heart, LeaseView
from neffcache_client.host_lock import open_private
from neffcache_client.local_tier import describe
from neffcache_client.publishing import send
from neffcache_client.results import Patience
from neffcache_client.settings import ClientSettings
from neffcache_client.spool import Spool, SpoolEntry

if TYPE_CHECKING:
    from neffcache_client.api import CacheClient

BACKGROUND_SECONDS = 90.0
_AGAIN_SECONDS = 2.0


@dataclass(slots=True)
class PushReport:
    """What became of the spool's entries."""

    published: int = 0
    already_present: int = 0
    nondeterministic: int = 0
    damaged: int = 0
    busy: int = 0
    kept: list[str] = field(default_factory=list)
    """Why, for each entry that stays."""
    unavailable: str | None = None
    """The server could not be used, so the rest was not tried."""

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def drain(
    settings: ClientSettings, client: CacheClient, *, say: Callable[[str], None], deadline: float | None = None
) -> PushReport:
    """Try every entry of the spool once; stops at the first sign of an unusable server, or at `deadline`."""
    spool = Spool(settings.tier_dir)
    report = PushReport()
    for entry in spool.pending():
        if deadline is not None and time.monotonic() > deadline:
            break
        if entry.namespace != settings.namespace:
            report.kept.append(f"{entry.key[:12]} belongs to namespace {entry.namespace}")
            continue
        try:
            outcome = _push(spool, client, settings, entry)
        except CacheUnavailable as exc:
            report.unavailable = str(exc)
            break
        except (RequestRefused, LocalTierError) as exc:
            report.kept.append(f"{entry.key[:12]}: {exc}")
            continue
        except OSError as exc:
            # Somebody else may have sent and removed it meanwhile.
            report.kept.append(f"{entry.key[:12]}: {describe(exc)}")
            continue
        _count(report, entry, outcome, say)
    return report


def _count(report: PushReport, entry: SpoolEntry, outcome: str, say: Callable[[str], None]) -> None:
    if outcome == "busy":
        report.busy += 1
        report.kept.append(f"{entry.key[:12]} is being compiled by somebody else")
        return
    setattr(report, outcome, getattr(report, outcome) + 1)
    say(f"{entry.key[:12]}: {outcome.replace('_', ' ')}")


def _push(spool: Spool, client: CacheClient, settings: ClientSettings, entry: SpoolEntry) -> str:
    try:
        info = spool.check(entry)
    except NeffInvalid:
        spool.remove(entry)
        return "damaged"
    if entry.lease_id is not None:
        # The lease it was compiled under outlives an outage unless somebody superseded it.
        try:
            outcome = send(client, entry, entry.neff, info, from_spool=True)
            spool.remove(entry)
            return outcome
        except RequestRefused:
            entry.lease_id = None
    contact = Contact(
        client,
        settings,
        entry.key,
        entry.factors,
        abort=threading.Event(),
        patience=Patience(),
        log=lambda text: None,
    )
    request = contact.request(0.0)
    request.from_spool = True
    answer = client.acquire(entry.key, request)
    if answer.state == "hit":
        spool.remove(entry)
        return "already_present"
    if answer.state != "leased":
        return "busy"
    entry.lease_id = contact.lease_id
    heart = Heart(client, contact.lease_id, LeaseView(phase="uploading"), lambda text: None)
    try:
        outcome = send(client, entry, entry.neff, info, from_spool=True)
    except BaseException:
        contact.release()
        raise
    finally:
        heart.stop()
    spool.remove(entry)
    return outcome


def start_in_background(settings: ClientSettings) -> bool:
    """Start an uploader for this host's spool and reports, unless there is nothing to send. Never raises."""
    if not (len(Spool(settings.tier_dir)) or reports.due(settings.tier_dir)):
        return False
    fd = _only_one(settings)
    if fd is None:
        return False
    os.close(fd)
    import subprocess

    # The launcher runs with a bare path and without `site`: the child is told where this process found things.
    code = f"import sys; sys.path[:] = {json.dumps(sys.path)}; from neffcache_client.uploader import main; main()"
    try:
        subprocess.Popen(
            [sys.executable, "-IS", "-c", code],
            env={**os.environ, **_environment(settings)},
            cwd="/",
            stdin=subprocess.DEVNULL,
            # The caller reads our output to its end, which must not be the uploader's end.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ).returncode = 0  # Never waited for, so not worth a ResourceWarning; init reaps it.
    except OSError:
        return False
    return True


def main() -> None:
    """Body of the background process."""
    from neffcache_client.api import CacheClient

    settings = ClientSettings.from_env()
    if _only_one(settings) is None:
        return
    spool = Spool(settings.tier_dir)
    deadline = time.monotonic() + BACKGROUND_SECONDS
    try:
        with CacheClient(settings) as client:
            _send_reports(settings, client)
            while len(spool) and time.monotonic() < deadline:
                report = drain(settings, client, say=lambda text: None, deadline=deadline)
                if not (report.unavailable or report.busy):
                    return
                time.sleep(_AGAIN_SECONDS)
    except NeffcacheError:
        return


def _send_reports(settings: ClientSettings, client: CacheClient) -> None:
    """Once, and once more for the ranks that end at the same time as the one that started this process."""
    for pause in (0.0, _AGAIN_SECONDS):
        time.sleep(pause)
        try:
            reports.send(settings, client)
        except NeffcacheError:
            return  # figures are not worth more than this try; the next one has them


def _only_one(settings: ClientSettings) -> int | None:
    """A descriptor that holds the uploaders' lock, None when another process has it or no lock can be had."""
    digest = hashlib.sha256(f"{settings.url}\n{settings.tier_dir}".encode()).hexdigest()[:16]
    fd = open_private(os.path.join(settings.lock_dir, "neffcache", f"uploader-{digest}"))
    if fd is None:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def _environment(settings: ClientSettings) -> dict[str, str]:
    env = {
        "NEFFCACHE_URL": settings.url,
        "NEFFCACHE_NAMESPACE": settings.namespace,
        "NEFFCACHE_MODE": settings.mode,
        "NEFFCACHE_LOCAL_DIR": settings.cache_dir,
        "TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR": settings.lock_dir,
    }
    if settings.token:
        env["NEFFCACHE_TOKEN"] = settings.token
    return env
