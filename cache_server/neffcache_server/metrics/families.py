"""What /metrics tells.

Whatever is in SQL is read from SQL at the scrape, so that every replica and worker tells the same and any of them may
be scraped; a sum over replicas would count twice. What only one process knows has a `worker` label and the prefix
`neffcache_worker_`. Labels have few values: no keys, jobs or hosts, and at most 100 namespaces by name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from time import monotonic

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import func, select

from neffcache_server.database.engine import ReadConnection
from neffcache_server.database.models import counters, entries, failures, leases
from neffcache_server.recording.history import Figures
from neffcache_server.state import State

MAX_NAMESPACES = 100
OTHER = "other"
_STORED_SHARE = 0.02
"""Of a process's time for sums over all entries. With few they are as new as the rest and equal on every worker; with
a million, where they take 0.3 s, they are a quarter of a minute old at most."""
_SILENT_SECONDS = 20.0
_STARTED = time.time()


@dataclass(slots=True)
class Snapshot:
    """Figures of one scrape, by namespace where they are mappings."""

    requests: dict[str, Figures] = field(default_factory=dict)
    published: dict[str, int] = field(default_factory=dict)
    nondeterministic: dict[str, int] = field(default_factory=dict)
    stored: dict[str, tuple[int, int]] = field(default_factory=dict)
    leases: dict[str, int] = field(default_factory=dict)
    silent: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    waiters: int = 0
    unwritten: int = 0
    dropped: int = 0


class Scraper:
    """Reads snapshots of one application."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._stored: tuple[float, dict[str, tuple[int, int]]] | None = None
        """When to read again, and what was read."""

    async def read(self) -> Snapshot:
        """The figures now. Raises DatabaseUnavailable."""
        state = self._state
        await state.counter.flush()
        await state.recorder.flush()
        now = state.database.clock.now()
        snapshot = Snapshot(
            waiters=state.leases.gates.waiting, unwritten=state.recorder.waiting, dropped=state.recorder.dropped
        )
        async with state.database.read() as db:
            snapshot.requests = await state.history.by_namespace(db, 0.0, "total")
            for row in await db.execute(select(counters)):
                snapshot.published[row.namespace] = row.publishes
                snapshot.nondeterministic[row.namespace] = row.nondeterministic
            running = leases.c.status == "live"
            heard = func.coalesce(leases.c.heartbeat_at, leases.c.granted_at)
            counts = select(leases.c.namespace, func.count().label("number")).group_by(leases.c.namespace)
            snapshot.leases = await _numbers(db, counts.where(running, leases.c.expires_at > now))
            snapshot.silent = await _numbers(db, counts.where(running, heard < now - _SILENT_SECONDS))
            failed = select(failures.c.namespace, func.count().label("number")).group_by(failures.c.namespace)
            snapshot.failures = await _numbers(db, failed.where(failures.c.until > now))
            snapshot.stored = await self._read_stored(db)
        return snapshot

    async def _read_stored(self, db: ReadConnection) -> dict[str, tuple[int, int]]:
        began = monotonic()
        if self._stored is None or began >= self._stored[0]:
            statement = (
                select(entries.c.namespace, func.count().label("number"), func.sum(entries.c.size).label("bytes"))
                .where(entries.c.state == "present")
                .group_by(entries.c.namespace)
            )
            found = {row.namespace: (row.number, int(row.bytes or 0)) for row in await db.execute(statement)}
            took = monotonic() - began
            self._stored = began + took / _STORED_SHARE, found
        return self._stored[1]


async def _numbers(db: ReadConnection, statement: object) -> dict[str, int]:
    return {row.namespace: row.number for row in await db.execute(statement)}  # type: ignore[call-overload]  # a Select


def exposition(snapshot: Snapshot) -> bytes:
    """The snapshot in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Families(snapshot))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._of = snapshot
        ranked = sorted(snapshot.requests, key=lambda n: -snapshot.requests[n].requests)
        rest = sorted((snapshot.stored.keys() | snapshot.published.keys()) - snapshot.requests.keys())
        self._named = set((ranked + rest)[:MAX_NAMESPACES])

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield self._counter("published", "Artifacts that were published.", self._of.published)
        yield self._counter("nondeterministic", "Second artifacts that differed.", self._of.nondeterministic)
        stored = self._of.stored
        yield self._gauge("entries", "Artifacts that are served.", {n: v[0] for n, v in stored.items()})
        yield self._gauge("stored_bytes", "Bytes of artifacts that are served.", {n: v[1] for n, v in stored.items()})
        yield self._gauge("live_leases", "Compiles under way.", self._of.leases)
        yield self._gauge("silent_leases", "Leases without a heartbeat for 20 s.", self._of.silent)
        yield self._gauge("failures_in_force", "Keys that are answered with a failure.", self._of.failures)
        build = GaugeMetricFamily("neffcache_build_info", "Version of the server.", labels=["version"])
        build.add_metric([version("neffcache")], 1)
        yield build
        yield from self._worker()

    def _requests(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "neffcache_requests",
            "Requests of ranks by how they ended, with the reason where there is one.",
            labels=["namespace", "verdict", "reason"],
        )
        counts: dict[tuple[str, str, str], float] = {}
        for namespace, figures in self._of.requests.items():
            for verdict, number in figures.verdicts.items():
                explained = sum(n for (v, _), n in figures.reasons.items() if v == verdict)
                _add(counts, (self._label(namespace), verdict, ""), number - explained)
            for (verdict, reason), number in figures.reasons.items():
                _add(counts, (self._label(namespace), verdict, reason), number)
        for labels, amount in sorted(counts.items()):
            if amount:
                requests.add_metric(labels, amount)
        yield requests
        of = self._of.requests
        yield self._counter(
            "waited_seconds", "Seconds that ranks waited.", {n: f.waited_seconds for n, f in of.items()}
        )
        yield self._counter("compile_seconds", "Seconds of compiles.", {n: f.spent_seconds for n, f in of.items()})
        saved = {n: f.saved_seconds for n, f in of.items()}
        yield self._counter("compile_saved_seconds", "Seconds of compiles saved, see docs/savings.md.", saved)
        yield self._counter(
            "served_bytes", "Bytes of NEFFs that ranks were given.", {n: f.bytes for n, f in of.items()}
        )
        errors = {n: f.write_errors for n, f in of.items()}
        yield self._counter("write_errors", "NEFFs that were compiled and reached nobody else.", errors)

    def _worker(self) -> Iterator[Metric]:
        worker = [str(os.getpid())]
        for name, text, value in (
            ("waiters", "Requests that this process answers at the moment.", self._of.waiters),
            ("unwritten_events", "Events that wait to be written.", self._of.unwritten),
            ("start_time_seconds", "When this process started, in Unix seconds.", _STARTED),
        ):
            gauge = GaugeMetricFamily(f"neffcache_worker_{name}", text, labels=["worker"])
            gauge.add_metric(worker, value)
            yield gauge
        dropped = CounterMetricFamily(
            "neffcache_worker_dropped_events", "Events that the database could not take in time.", labels=["worker"]
        )
        dropped.add_metric(worker, self._of.dropped)
        yield dropped

    def _counter(self, name: str, text: str, values: dict[str, float] | dict[str, int]) -> Metric:
        family = CounterMetricFamily(f"neffcache_{name}", text, labels=["namespace"])
        for namespace, value in self._by_label(values):
            family.add_metric([namespace], value)
        return family

    def _gauge(self, name: str, text: str, values: dict[str, int]) -> Metric:
        family = GaugeMetricFamily(f"neffcache_{name}", text, labels=["namespace"])
        for namespace, value in self._by_label(values):
            family.add_metric([namespace], value)
        return family

    def _by_label(self, values: dict[str, float] | dict[str, int]) -> list[tuple[str, float]]:
        # Zero is said: an alert on a series that is not there never fires.
        sums: dict[str, float] = dict.fromkeys(self._named, 0.0)
        for namespace, value in values.items():
            label = self._label(namespace)
            sums[label] = sums.get(label, 0.0) + value
        return sorted(sums.items())

    def _label(self, namespace: str) -> str:
        return namespace if namespace in self._named else OTHER


def _add(counts: dict[tuple[str, str, str], float], labels: tuple[str, str, str], number: float) -> None:
    counts[labels] = counts.get(labels, 0.0) + number
