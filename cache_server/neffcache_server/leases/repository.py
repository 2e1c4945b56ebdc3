"""Statements on entries, leases and failures of one key. No decisions here, and no commit."""

from __future__ import annotations

import json
from typing import Any

from neffcache_client.wire import AcquireRequest, Artifact, Failure, HeartbeatRequest, Holder, PublishRequest
from sqlalchemy import ColumnElement, Row, case, delete, exists, func, insert, select, text, update

from neffcache_server.database.dialect import larger, upsert
from neffcache_server.database.engine import Database, ReadConnection, WriteConnection
from neffcache_server.database.models import blobs, differences, entries, failures, leases, tickets, uploads
from neffcache_server.kit.storable import storable
from neffcache_server.leases.machine import UNSHARED_SECONDS, FailureRecord, Lease, Snapshot


def blob_url(namespace: str, sha256: str) -> str:
    """Where an artifact's bytes are had from, relative to the server."""
    return f"/v1/ns/{namespace}/blobs/{sha256}"


def holder_of(row: Any) -> Holder:
    """The holder columns of a row."""
    return Holder(host=row.host, boot=row.boot, pid=row.pid, rank=row.rank, job=row.job)


def artifact_of(row: Any) -> Artifact:
    """The artifact columns of an entry's row."""
    return Artifact(
        sha256=row.sha256,
        size=row.size,
        url=blob_url(row.namespace, row.sha256),
        compiler_version=row.compiler_version,
        target=row.target,
        compile_seconds=row.compile_seconds,
        created_at=row.created_at,
    )


ARTIFACT_COLUMNS = (
    entries.c.namespace,
    entries.c.key,
    entries.c.state,
    entries.c.sha256,
    entries.c.size,
    entries.c.compiler_version,
    entries.c.target,
    entries.c.compile_seconds,
    entries.c.peak_rss_bytes,
    entries.c.created_at,
)
_JOINED_LEASE_COLUMNS = tuple(
    c for c in leases.c if c.name not in ("namespace", "key", "phase", "rss_bytes", "ended_at", "outcome")
)
_LEASE_COLUMNS = tuple(c for c in leases.c if c.name not in ("phase", "rss_bytes", "ended_at"))


def lease_of(row: Any) -> Lease:
    return Lease(
        lease_id=row.lease_id,
        epoch=row.epoch,
        namespace=row.namespace,
        key=row.key,
        status=row.status,
        confirmed=bool(row.confirmed),
        retry_failed=bool(row.retry_failed),
        granted_at=row.granted_at,
        heartbeat_at=row.heartbeat_at,
        expires_at=row.expires_at,
        holder=holder_of(row),
        outcome=row.outcome,
    )


def failure_of(row: Any) -> Failure | None:
    """The failure columns of a `failures` row, None when the row only counts."""
    if row.kind is None:
        return None
    return Failure(
        kind=row.kind,
        exit_code=row.exit_code,
        code=row.code,
        log_tail=row.log_tail or "",
        host=row.failed_host or "",
        first_seen_at=row.first_seen_at,
        until=row.until,
    )


def _record_of(row: Any) -> FailureRecord | None:
    if row.transient_count is None:
        return None
    return FailureRecord(
        transient_count=row.transient_count,
        last_failure_at=row.last_failure_at,
        yield_host=row.yield_host,
        yield_until=row.yield_until or 0.0,
        failure=failure_of(row),
        retried_job=row.retried_job,
        unshared_at=row.unshared_at,
    )


FAILURE_COLUMNS = (
    *(c for c in failures.c if c.name not in ("namespace", "key", "host")),
    failures.c.host.label("failed_host"),
)


class LeaseRepository:
    """Bound to a database only for its clock and dialect."""

    def __init__(self, database: Database) -> None:
        self._dialect = database.dialect
        self._clock = database.clock

    @property
    def _now(self) -> ColumnElement[float]:
        return self._clock.now()

    async def now(self, db: ReadConnection) -> float:
        """The database's clock."""
        return float((await db.execute(select(self._now))).scalar_one())

    async def snapshot(self, db: ReadConnection, namespace: str, key: str) -> Snapshot:
        """The state of a key, absent ones too, in one statement."""
        asked = select(self._now.label("now")).subquery("asked")
        statement = (
            select(asked.c.now, *ARTIFACT_COLUMNS, *_JOINED_LEASE_COLUMNS, *FAILURE_COLUMNS)
            .select_from(asked)
            .outerjoin(entries, (entries.c.namespace == namespace) & (entries.c.key == key))
            .outerjoin(
                leases,
                # The literal lets the planner use the partial index; a parameter would not.
                (leases.c.namespace == namespace) & (leases.c.key == key) & text("leases.status = 'live'"),
            )
            .outerjoin(failures, (failures.c.namespace == namespace) & (failures.c.key == key))
        )
        row = (await db.execute(statement)).one()
        return Snapshot(
            now=row.now,
            artifact=artifact_of(row) if row.state == "present" else None,
            live=_joined_lease(row, namespace, key) if row.lease_id is not None else None,
            failures=_record_of(row),
            usual_seconds=row.compile_seconds,
            usual_peak=row.peak_rss_bytes,
        )

    async def lock_key(self, db: WriteConnection, namespace: str, key: str) -> None:
        """Make the key's row if need be and lock it: other transitions of this key wait until the commit."""
        row = upsert(self._dialect, entries).values(namespace=namespace, key=key).on_conflict_do_nothing()
        lock = select(entries.c.key).where(entries.c.namespace == namespace, entries.c.key == key).with_for_update()
        while True:
            await db.execute(row)
            if self._dialect == "sqlite" or (await db.execute(lock)).one_or_none() is not None:
                return
            # Garbage collection forgot the key while we waited for its lock: it has to be made again.

    async def find(self, db: ReadConnection, lease_id: str) -> Lease | None:
        """The lease of that id in whatever state."""
        row = (await db.execute(select(*_LEASE_COLUMNS).where(leases.c.lease_id == lease_id))).one_or_none()
        return lease_of(row) if row is not None else None

    async def grant(self, db: WriteConnection, namespace: str, key: str, request: AcquireRequest, ttl: float) -> int:
        """A new live lease; returns its epoch. Raises IntegrityError when the key has a live one."""
        holder = request.holder
        statement = (
            insert(leases)
            .values(
                lease_id=request.lease_id,
                namespace=namespace,
                key=key,
                status="live",
                confirmed=False,
                retry_failed=request.retry_failed,
                granted_at=self._now,
                expires_at=self._now + ttl,
                host=holder.host,
                boot=holder.boot,
                pid=holder.pid,
                rank=holder.rank,
                job=holder.job,
            )
            .returning(leases.c.epoch)
        )
        return int((await db.execute(statement)).scalar_one())

    async def asked(self, db: WriteConnection, namespace: str, key: str, factors: str | None) -> None:
        """Remember that a lease was granted, and what the key was made of, if that is not known yet."""
        await db.execute(
            update(entries)
            .where(entries.c.namespace == namespace, entries.c.key == key)
            .values(asked_at=self._now, factors=func.coalesce(entries.c.factors, factors))
        )

    async def extend(self, db: WriteConnection, epoch: int, seconds: float) -> bool:
        """Let a live lease run for at least `seconds` from now. False when it is not live."""
        until = self._now + seconds
        result = await db.execute(
            update(leases)
            .where(leases.c.epoch == epoch, leases.c.status == "live")
            .values(expires_at=larger(leases.c.expires_at, until))
        )
        return result.rowcount == 1

    async def supersede(self, db: WriteConnection, epoch: int, *, only_expired: bool) -> bool:
        """Take a live lease away. False when it changed meanwhile (a heartbeat came in between)."""
        statement = update(leases).where(leases.c.epoch == epoch, leases.c.status == "live")
        if only_expired:
            statement = statement.where(leases.c.expires_at <= self._now)
        result = await db.execute(statement.values(status="superseded", ended_at=self._now))
        return result.rowcount == 1

    async def heartbeat(
        self, db: WriteConnection, namespace: str, lease_id: str, beat: HeartbeatRequest, ttl: float
    ) -> int | None:
        """Renew a live lease; its epoch, or None when there is no such live lease."""
        statement = (
            update(leases)
            .where(leases.c.lease_id == lease_id, leases.c.namespace == namespace, leases.c.status == "live")
            .values(
                confirmed=True,
                heartbeat_at=self._now,
                expires_at=self._now + ttl,
                phase=beat.phase,
                rss_bytes=beat.rss_bytes,
            )
            .returning(leases.c.epoch)
        )
        epoch = (await db.execute(statement)).scalar_one_or_none()
        return int(epoch) if epoch is not None else None

    async def end(self, db: WriteConnection, epoch: int, status: str, outcome: str | None = None) -> bool:
        """End a live lease. False when it is not live any more: then nothing may be changed on its behalf."""
        result = await db.execute(
            update(leases)
            .where(leases.c.epoch == epoch, leases.c.status == "live")
            .values(status=status, ended_at=self._now, outcome=outcome)
        )
        return result.rowcount == 1

    async def set_outcome(self, db: WriteConnection, epoch: int, outcome: str) -> None:
        """Keep the answer that ended a lease."""
        await db.execute(update(leases).where(leases.c.epoch == epoch).values(outcome=outcome))

    async def extend_after_outage(self, db: WriteConnection, since: float, ttl: float, provisional: float) -> int:
        """Let leases that ran out in the last `since` seconds (or soon will) go on for one TTL; how many."""
        until = self._now + case((leases.c.confirmed.is_(True), ttl), else_=provisional)
        result = await db.execute(
            update(leases)
            .where(leases.c.status == "live", leases.c.expires_at > self._now - since, leases.c.expires_at < until)
            .values(expires_at=until)
        )
        return result.rowcount

    async def put_failures(self, db: WriteConnection, namespace: str, key: str, record: FailureRecord) -> None:
        """Store the round of a key."""
        failure = record.failure
        values = {
            "transient_count": record.transient_count,
            "last_failure_at": record.last_failure_at,
            "yield_host": record.yield_host,
            "yield_until": record.yield_until,
            "kind": failure.kind if failure else None,
            "exit_code": failure.exit_code if failure else None,
            "code": failure.code if failure else None,
            "log_tail": storable(failure.log_tail) if failure else None,
            "host": failure.host if failure else None,
            "first_seen_at": failure.first_seen_at if failure else None,
            "until": failure.until if failure else None,
            "retried_job": record.retried_job,
        }
        await db.execute(
            upsert(self._dialect, failures)
            .values(namespace=namespace, key=key, **values)
            .on_conflict_do_update(index_elements=["namespace", "key"], set_=values)
        )

    async def note_unshared(self, db: WriteConnection, namespace: str, key: str) -> None:
        """Remember since when results of a key cannot be handed over."""
        now, before = self._now, failures.c.unshared_at
        row = {"transient_count": 0, "last_failure_at": now, "unshared_at": now}
        since = case((before > now - UNSHARED_SECONDS, before), else_=now)
        await db.execute(
            upsert(self._dialect, failures)
            .values(namespace=namespace, key=key, **row)
            .on_conflict_do_update(index_elements=["namespace", "key"], set_={"unshared_at": since})
        )

    async def clear_failures(self, db: WriteConnection, namespace: str, key: str) -> bool:
        """End the round of a key. False when there was none."""
        result = await db.execute(delete(failures).where(failures.c.namespace == namespace, failures.c.key == key))
        return result.rowcount > 0

    async def uploaded(self, db: ReadConnection, lease: Lease, sha256: str) -> Row[Any] | None:
        """The blob of that digest if this very lease has uploaded it."""
        by_lease = exists().where(uploads.c.epoch == lease.epoch, uploads.c.sha256 == sha256)
        statement = select(blobs).where(blobs.c.namespace == lease.namespace, blobs.c.sha256 == sha256, by_lease)
        return (await db.execute(statement)).one_or_none()

    async def put_artifact(self, db: WriteConnection, lease: Lease, blob: Any, request: PublishRequest) -> None:
        """Make a blob the artifact of the lease's key."""
        holder = lease.holder
        await db.execute(
            update(entries)
            .where(entries.c.namespace == lease.namespace, entries.c.key == lease.key, entries.c.state != "present")
            .values(
                state="present",
                sha256=blob.sha256,
                size=blob.size,
                compiler_version=blob.compiler_version,
                target=blob.target,
                compile_seconds=request.compile_seconds,
                cpu_seconds=request.cpu_seconds,
                peak_rss_bytes=request.peak_rss_bytes,
                created_at=self._now,
                asked_at=None,
                host=holder.host,
                boot=holder.boot,
                pid=holder.pid,
                rank=holder.rank,
                job=holder.job,
            )
        )

    async def record_difference(
        self, db: WriteConnection, lease: Lease, stored: str, blob: Any, members: list[str]
    ) -> None:
        """Note that one key gave two artifacts that differ."""
        await db.execute(
            insert(differences).values(
                namespace=lease.namespace,
                key=lease.key,
                stored_sha256=stored,
                offered_sha256=blob.sha256,
                members=json.dumps(members[:100]),
                host=lease.holder.host,
                compiler_version=blob.compiler_version,
                seen_at=self._now,
            )
        )

    async def purge(self, db: WriteConnection, older_than: float) -> int:
        """Forget leases that ended, or ran out unnoticed, `older_than` seconds ago."""
        horizon = self._now - older_than
        old = (leases.c.ended_at < horizon) | ((leases.c.status == "live") & (leases.c.expires_at < horizon))
        for table in (uploads, tickets):
            await db.execute(delete(table).where(table.c.epoch.in_(select(leases.c.epoch).where(old))))
        return (await db.execute(delete(leases).where(old))).rowcount


def _joined_lease(row: Any, namespace: str, key: str) -> Lease:
    return Lease(
        lease_id=row.lease_id,
        epoch=row.epoch,
        namespace=namespace,
        key=key,
        status="live",
        confirmed=bool(row.confirmed),
        retry_failed=bool(row.retry_failed),
        granted_at=row.granted_at,
        heartbeat_at=row.heartbeat_at,
        expires_at=row.expires_at,
        holder=holder_of(row),
    )
