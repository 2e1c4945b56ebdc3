"""What happened to each compile: a JSON line per verdict, a file per process, summed by `neffcache stats --local`.

A line is a single O_APPEND write, and no two hosts share a file, so lines never mix. Losing a line loses a figure,
never a job: nothing here raises. Light imports: on the path of a local hit.
"""

from __future__ import annotations

import json
import os
import time

from neffcache_client.identity import host_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

VERDICTS = ("local", "remote", "waited", "compiled", "failed", "fallback", "uncacheable")
"""local: found in the local folder. remote: fetched from the server. waited: another process compiled it meanwhile.
compiled: this process compiled it. failed: no NEFF. fallback: compiled because the cache could not be used."""


def records_dir(tier_dir: str) -> str:
    """Where the records of a local folder live."""
    return os.path.join(tier_dir, "records")


def record(tier_dir: str, **fields: Any) -> None:
    """Append one verdict. Adds time (Unix seconds), host and pid. Never raises.

    Known fields: key, verdict, reason, bytes, waited_seconds, compile_seconds, saved_seconds, corrupt, exit_code,
    job, rank, server (true: it counted this itself). Fields that are None are left out.
    """
    try:
        line = {"time": round(time.time(), 3), "host": host_name(), "pid": os.getpid()}
        line.update((k, v) for k, v in fields.items() if v is not None)
        data = json.dumps(line, separators=(",", ":"), default=str).encode() + b"\n"
        folder = records_dir(tier_dir)
        path = os.path.join(folder, f"{host_name()}.{os.getpid()}.jsonl")
        try:
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            os.makedirs(folder, exist_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)
    except (OSError, ValueError, TypeError):
        return


def read_records(tier_dir: str) -> Iterator[dict[str, Any]]:
    """Every readable record of a local folder; torn lines are passed over."""
    try:
        names = sorted(os.listdir(records_dir(tier_dir)))
    except OSError:
        return
    for name in names:
        if not name.endswith(".jsonl"):
            continue
        try:
            with open(os.path.join(records_dir(tier_dir), name), "rb") as f:
                lines = f.read().splitlines()
        except OSError:
            continue
        for line in lines:
            try:
                fields = json.loads(line)
            except ValueError:
                continue
            if isinstance(fields, dict):
                yield fields


class Summary:
    """Records summed: counts by verdict and by reason, seconds and bytes."""

    __slots__ = ("bytes", "compile_seconds", "corrupt", "reasons", "saved_seconds", "verdicts", "waited_seconds")

    def __init__(self) -> None:
        self.verdicts: dict[str, int] = {}
        self.reasons: dict[str, dict[str, int]] = {}
        self.bytes = 0
        self.waited_seconds = 0.0
        self.compile_seconds = 0.0
        self.saved_seconds = 0.0
        self.corrupt = 0

    def add(self, fields: dict[str, Any]) -> None:
        """Count one record; a value of a wrong type counts as nothing."""
        verdict = str(fields.get("verdict", "unknown"))
        self.verdicts[verdict] = self.verdicts.get(verdict, 0) + 1
        if reason := fields.get("reason"):
            reasons = self.reasons.setdefault(verdict, {})
            reasons[str(reason)] = reasons.get(str(reason), 0) + 1
        self.bytes += int(_number(fields.get("bytes")))
        self.corrupt += int(_number(fields.get("corrupt")))
        self.waited_seconds += _number(fields.get("waited_seconds"))
        self.compile_seconds += _number(fields.get("compile_seconds"))
        self.saved_seconds += _number(fields.get("saved_seconds"))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def summarise(tier_dir: str, job: str | None = None, since: float | None = None) -> Summary:
    """The sum of a local folder's records; of one job, from a Unix time on, if given."""
    total = Summary()
    for fields in read_records(tier_dir):
        if (job is None or fields.get("job") == job) and (since is None or _number(fields.get("time")) >= since):
            total.add(fields)
    return total


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
