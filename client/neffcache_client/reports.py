"""Telling the server what it did not see: local hits, fallbacks, compiles that are never cached, ends of runs.

Launchers only write lines (`records`). Whoever has contact with the server sends them on in batches, one process of
a host at a time: the background uploader, or `neffcache push`. A cursor beside the records says how far each file was
sent. A batch whose answer was lost is sent again as it was, and the server counts it once.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from typing import TYPE_CHECKING, Any

from neffcache_client.identity import host_name
from neffcache_client.local_tier import remove_quietly, unique
from neffcache_client.records import records_dir
from neffcache_client.wire import MAX_REPORTS, VERDICTS, Report, ReportsRequest, RunReport

if TYPE_CHECKING:
    from neffcache_client.api import CacheClient
    from neffcache_client.settings import ClientSettings

EVERY_SECONDS = 60.0
"""A host's background reports are at least this far apart: a launcher that talks to the server shall not start one
process after the other."""
_MOST_BATCHES = 50
_OLDEST_SECONDS = 7 * 86400.0
_KEEP_SECONDS = 30 * 86400.0


def runs_dir(tier_dir: str) -> str:
    """Where the end-of-run records of ranks live."""
    return os.path.join(tier_dir, "runs")


def due(tier_dir: str) -> bool:
    """True when this host has something to report and did not just do so. Never raises."""
    try:
        if time.time() - os.stat(_cursor_path(tier_dir)).st_mtime < EVERY_SECONDS:
            return False
    except OSError:
        pass
    cursor = _read_cursor(tier_dir)
    return any(size > cursor.get(name, 0) for name, _, size, _ in _files(tier_dir))


def send(settings: ClientSettings, client: CacheClient) -> int:
    """Report what was not reported yet, at most 50 batches; how many lines. Only one process of a host may do this.

    Raises CacheUnavailable or RequestRefused; what was taken before stays taken.
    """
    sent = 0
    for _ in range(_MOST_BATCHES):
        batch = _Batch(settings.tier_dir)
        if batch.lines:
            client.report(batch.request)
            sent += batch.lines
        batch.done()
        if not batch.full:
            break
    return sent


class _Batch:
    """The next lines of this host's files, and the cursor behind them."""

    def __init__(self, tier_dir: str) -> None:
        self._tier_dir = tier_dir
        self._before = _read_cursor(tier_dir)
        self._cursor: dict[str, int] = {}
        self._now = time.time()
        self._digest = hashlib.sha256()
        self._finished: list[str] = []
        self.full = False
        self.reports: list[Report] = []
        self.runs: list[RunReport] = []
        for name, path, size, changed in _files(tier_dir):
            self._cursor[name] = self._before.get(name, 0)
            if not self.full and size > self._cursor[name]:
                self._read(name, path)
            elif size <= self._cursor[name] and self._now - changed > _KEEP_SECONDS:
                self._finished.append(path)

    @property
    def lines(self) -> int:
        return len(self.reports) + len(self.runs)

    @property
    def request(self) -> ReportsRequest:
        return ReportsRequest(batch=self._digest.hexdigest(), reports=self.reports, runs=self.runs)

    def done(self) -> None:
        """The batch was taken: move the cursor, remove files that are old and sent."""
        path = _cursor_path(self._tier_dir)
        temp = os.path.join(records_dir(self._tier_dir), unique("cursor"))
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(temp, "w", encoding="utf-8") as f:
                json.dump(self._cursor, f)
            os.replace(temp, path)
        except OSError:
            remove_quietly(temp)
        for old in self._finished:
            remove_quietly(old)

    def _read(self, name: str, path: str) -> None:
        try:
            with open(path, "rb") as f:
                f.seek(self._cursor[name])
                data = f.read()
        except OSError:
            return
        # A line without its end is still being written.
        for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
            if self.lines >= MAX_REPORTS:
                self.full = True
                return
            self._digest.update(f"{name} {self._cursor[name]} ".encode() + line)
            self._cursor[name] += len(line)
            self._take(line, run=name.startswith("runs/"))

    def _take(self, line: bytes, *, run: bool) -> None:
        try:
            fields = json.loads(line)
            age = max(0.0, self._now - float(fields["time"]))
            if age > _OLDEST_SECONDS:
                return
            if run and fields.get("job"):
                self.runs.append(_run(fields, age))
            elif not run and not fields.get("server") and fields.get("verdict") in VERDICTS:
                self.reports.append(_report(fields, age))
        except (ValueError, TypeError, KeyError, AttributeError):
            return  # a torn line: one figure less


def _report(fields: dict[str, Any], age: float) -> Report:
    return Report(
        verdict=fields["verdict"],
        age_seconds=age,
        host=str(fields.get("host") or ""),
        rank=fields.get("rank"),
        job=fields.get("job"),
        key=fields.get("key"),
        reason=fields.get("reason"),
        waited_seconds=max(0.0, float(fields.get("waited_seconds") or 0)),
        compile_seconds=max(0.0, float(fields.get("compile_seconds") or 0)),
        bytes=max(0, int(fields.get("bytes") or 0)),
    )


def _run(fields: dict[str, Any], age: float) -> RunReport:
    return RunReport(
        host=str(fields.get("host") or ""),
        job=str(fields["job"]),
        age_seconds=age,
        rank=fields.get("rank"),
        ready_seconds=fields.get("ready_seconds"),
        fetch_seconds=fields.get("fetch_seconds"),
    )


def _files(tier_dir: str) -> list[tuple[str, str, int, float]]:
    """(name, path, size, time of change) of this host's records and runs, oldest first.

    The folder may be shared with other hosts; each sends its own, so that no two send the same.
    """
    prefix = f"{host_name()}."
    found = []
    for folder, kind, suffix in ((records_dir(tier_dir), "", ".jsonl"), (runs_dir(tier_dir), "runs/", ".json")):
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.startswith(prefix) and entry.name.endswith(suffix) and entry.is_file():
                        stat = entry.stat()
                        found.append((kind + entry.name, entry.path, stat.st_size, stat.st_mtime))
        except OSError:
            continue
    return sorted(found, key=lambda f: f[3])


def _cursor_path(tier_dir: str) -> str:
    return os.path.join(records_dir(tier_dir), f"{host_name()}.sent")


def _read_cursor(tier_dir: str) -> dict[str, int]:
    try:
        with open(_cursor_path(tier_dir), encoding="utf-8") as f:
            found = json.load(f)
        return {str(name): int(offset) for name, offset in found.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
