"""What a rank says when it ends: one line in the log and a JSON file, counted from its launchers' records.

Launchers are one process per compile, so the only place that sees a rank end is the torch process itself. Runs in
users' processes at exit: reads a few small files, imports nothing heavy, never raises.
"""

from __future__ import annotations

import json
import os
import time

from neffcache_client.identity import host_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from typing import Any

    from neffcache_client.settings import ClientSettings

RUN = "NEFFCACHE_RUN"
"""`<pid>.<rank>` of the process that will speak for this rank; its children inherit it and keep quiet."""
_MOST_FILES = 2000
_HITS = ("local", "remote", "waited")


class EndOfRun:
    """From activation to exit of one rank's process."""

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings
        self.pid = os.getpid()
        # As records tell time, or one of the same millisecond would seem to come from before.
        self.started = int(time.time() * 1000) / 1000

    def __call__(self, *, report: bool = True) -> None:
        """Write the record. Does nothing in a forked child, which inherits the registration."""
        if os.getpid() != self.pid:
            return
        try:
            self._write()
            if report:
                self._report()
        except Exception:
            return  # the rank's own exit code and output are all that matters now

    def _write(self) -> None:
        from neffcache_hook.launcher.log import Log

        found = self.document()
        folder = os.path.join(self.settings.tier_dir, "runs")
        os.makedirs(folder, exist_ok=True)
        _make_room(folder)
        name = (
            f"{host_name()}.{found['rank'] if found['rank'] is not None else '-'}.{self.pid}.{int(self.started)}.json"
        )
        temp = os.path.join(folder, f".{name}.tmp")
        with open(temp, "w", encoding="utf-8") as f:
            f.write(json.dumps(found, separators=(",", ":")) + "\n")
        os.replace(temp, os.path.join(folder, name))
        Log(self.settings.tier_dir, self.settings.log)(sentence(found))

    def _report(self) -> None:
        if self.settings.mode != "readwrite":
            return
        from neffcache_client.uploader import start_in_background

        start_in_background(self.settings)

    def document(self) -> dict[str, Any]:
        """Keys, verdicts, bytes and seconds of this rank since its activation."""
        total: dict[str, Any] = {
            "time": round(time.time(), 3),
            "host": host_name(),
            "pid": self.pid,
            "rank": self.settings.rank,
            "job": self.settings.job,
            "started_at": round(self.started, 3),
            "verdicts": {},
            "reasons": {},
            "bytes": 0,
            "waited_seconds": 0.0,
            "compile_seconds": 0.0,
            "saved_seconds": 0.0,
            "fetch_seconds": 0.0,
            "ready_seconds": 0.0,
            "requests": [],
        }
        for record in self._records():
            _add(total, record, self.started)
        total["compiles"] = sum(
            n for v, n in total["verdicts"].items() if v in ("compiled", "fallback", "uncacheable")
        )
        for name in ("waited", "compile", "saved", "fetch", "ready"):
            total[f"{name}_seconds"] = round(total[f"{name}_seconds"], 3)
        return total

    def _records(self) -> list[dict[str, Any]]:
        """The records that launchers of this rank wrote on this host since the activation, earliest first."""
        from neffcache_client.records import records_dir

        folder = records_dir(self.settings.tier_dir)
        found = []
        try:
            with os.scandir(folder) as entries:
                paths = [
                    e.path
                    for e in entries
                    if e.name.startswith(f"{host_name()}.")
                    and e.name.endswith(".jsonl")
                    and e.stat().st_mtime >= self.started - 1
                ]
        except OSError:
            return []
        for path in paths:
            with open(path, "rb") as f:
                lines = f.read().splitlines()
            for line in lines:
                try:
                    fields = json.loads(line)
                    if self._is_ours(fields):
                        found.append(fields)
                except (ValueError, TypeError, AttributeError):
                    continue
        return sorted(found, key=lambda fields: fields["time"])

    def _is_ours(self, fields: dict[str, Any]) -> bool:
        same = fields.get("rank") == self.settings.rank and fields.get("job") == self.settings.job
        return same and isinstance(fields.get("time"), float | int) and fields["time"] >= self.started


_registered: EndOfRun | None = None


def finish(*, report: bool = True) -> None:
    """Speak now instead of at exit: for a process that leaves by `os._exit`."""
    global _registered
    if _registered is not None:
        import atexit

        atexit.unregister(_registered)
        _registered(report=report)
        _registered = None


def register(environ: MutableMapping[str, str], settings: ClientSettings) -> bool:
    """Have this process speak for its rank at its end, unless one above it does. True when it will."""
    global _registered
    rank = "-" if settings.rank is None else str(settings.rank)
    own, above = f"{os.getpid()}.{rank}", environ.get(RUN, "")
    if above == own or (above.endswith(f".{rank}") and _is_alive(above)):
        return False
    environ[RUN] = own
    import atexit

    _registered = EndOfRun(settings)
    atexit.register(_registered)
    return True


def sentence(found: dict[str, Any]) -> str:
    """The record in words."""
    who = [f"rank {found['rank']}"] if found["rank"] is not None else []
    who += [f"job {found['job']}"] if found["job"] else []
    counts = [f"{n} {verdict}" for verdict, n in sorted(found["verdicts"].items())]
    asked = sum(found["verdicts"].values())
    what = f"{asked} requests: {', '.join(counts)}" if asked else "nothing was asked of neffcache"
    return (
        f"end of run{', ' if who else ''}{', '.join(who)}: {what}; {found['compiles']} compiles; "
        f"{found['bytes'] / 1048576:.1f} MiB; waited {found['waited_seconds']:.1f} s, "
        f"compiled {found['compile_seconds']:.1f} s, fetched {found['fetch_seconds']:.1f} s, "
        f"saved {found['saved_seconds']:.1f} s"
    )


def _add(total: dict[str, Any], record: dict[str, Any], started: float) -> None:
    verdict = str(record.get("verdict", "unknown"))
    total["verdicts"][verdict] = total["verdicts"].get(verdict, 0) + 1
    if reason := record.get("reason"):
        name = f"{verdict}: {reason}"
        total["reasons"][name] = total["reasons"].get(name, 0) + 1
    took, waited, compiled = (float(record.get(n) or 0) for n in ("seconds", "waited_seconds", "compile_seconds"))
    total["bytes"] += int(record.get("bytes") or 0)
    total["waited_seconds"] += waited
    total["compile_seconds"] += compiled
    total["saved_seconds"] += float(record.get("saved_seconds") or 0)
    if verdict in _HITS:
        total["fetch_seconds"] += max(0.0, took - waited - compiled)
    total["ready_seconds"] = max(total["ready_seconds"], record["time"] - started)
    names = ("key", "verdict", "reason", "bytes", "seconds", "waited_seconds", "compile_seconds", "saved_seconds")
    total["requests"].append({name: record[name] for name in names if record.get(name) is not None})


def _is_alive(owner: str) -> bool:
    pid = owner.partition(".")[0]
    return pid.isdigit() and os.path.exists(f"/proc/{pid}")


def _make_room(folder: str) -> None:
    """Keep the folder bounded: a tier may serve a host for years."""
    with os.scandir(folder) as entries:
        found = [(e.stat().st_mtime, e.path) for e in entries if e.name.endswith(".json")]
    for _, path in sorted(found)[: max(0, len(found) - _MOST_FILES)]:
        os.unlink(path)
