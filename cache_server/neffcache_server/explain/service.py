"""Answers to "why did this miss?"."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Collection

from anyio import to_thread
from neffcache_client.explanation import Cause, Explanation, GraphDifference, JobExplanation
from neffcache_client.graph_summary import GraphSummary, decode

from neffcache_server.database.engine import Database, ReadConnection
from neffcache_server.explain import graphs
from neffcache_server.explain.groups import grouped
from neffcache_server.explain.misses import MissLog
from neffcache_server.explain.nearest import Neighbour, cause, ranked, refined, sentence
from neffcache_server.explain.repository import Described, ExplainRepository
from neffcache_server.problems import InvalidRequest, JobUnknown, KeyAmbiguous, KeyUnknown, ServerProblem

KEEP_SECONDS = 30 * 86400.0
"""How long misses and summaries are kept. Factors stay with their keys."""
_LOOKED_INTO = 8
_MISSES_SHOWN = 20
_JOB_ROWS = 20_000
_JOB_KEYS = 200
_CAUSES = 50


class ExplainService:
    """Reads for people."""

    def __init__(self, database: Database, misses: MissLog) -> None:
        self._db = database
        self._misses = misses
        self._repo = ExplainRepository(database)

    async def keep_summary(self, namespace: str, key: str, text: str) -> None:
        """Keep a graph's summary. Raises KeyUnknown, InvalidRequest."""
        try:
            summary = await to_thread.run_sync(decode, text)
        except ValueError as exc:
            raise InvalidRequest(f"summary: {exc}") from exc
        async with self._db.write() as db:
            known = await self._repo.keep_summary(db, namespace, key, text, summary.counts)
        if not known:
            raise KeyUnknown

    async def explain(self, namespace: str, prefix: str) -> Explanation:
        """Why the key that begins with `prefix` missed. Raises KeyUnknown, KeyAmbiguous."""
        await self._misses.flush()
        async with self._db.read() as db:
            asked = await self._the_one(db, namespace, prefix)
            key = asked.known.key
            misses = await self._repo.misses_of_key(db, namespace, key, _MISSES_SHOWN)
            nearest = await self._nearest(db, namespace, asked, ())
            if nearest is None:
                return Explanation(key=asked.known, text=sentence(None, None), misses=misses)
            other = nearest.described.known
            graph = None
            if not nearest.same_graph:
                texts = await self._repo.summaries(db, namespace, [key, other.key])
                graph = await to_thread.run_sync(_compared, texts, key, other.key)
        return Explanation(
            key=asked.known,
            text=sentence(nearest, graph),
            misses=misses,
            nearest=other,
            differences=nearest.differences,
            graph=graph,
        )

    async def explain_job(self, namespace: str, job: str) -> JobExplanation:
        """What a job missed. Raises JobUnknown."""
        await self._misses.flush()
        async with self._db.read() as db:
            rows = await self._repo.misses_of_job(db, namespace, job, _JOB_ROWS)
            if not rows:
                raise JobUnknown
            keys = list(dict.fromkeys(row.key for row in rows))
            shown = keys[:_JOB_KEYS]
            described = await self._repo.describe(db, namespace, shown)
            texts = await self._repo.summaries(db, namespace, shown)
            askers = await self._repo.askers_of_job(db, namespace, job, _JOB_ROWS)
            groups = await to_thread.run_sync(lambda: grouped(described, rows + askers, _decoded(texts)))
            causes = await self._causes(db, namespace, [described[k] for k in shown if k in described], keys)
        return JobExplanation(
            job=job,
            ranks=len({(row.miss.rank, row.miss.host if row.miss.rank is None else "") for row in rows}),
            keys=len(keys),
            groups=groups,
            causes=causes,
            truncated=len(rows) == _JOB_ROWS or len(keys) > len(shown),
        )

    async def purge_every(self, seconds: float) -> None:
        """Forget what is too old, for ever."""
        while True:
            await asyncio.sleep(seconds)
            with contextlib.suppress(ServerProblem):
                async with self._db.write() as db:
                    await self._repo.purge(db, KEEP_SECONDS)

    async def _the_one(self, db: ReadConnection, namespace: str, prefix: str) -> Described:
        keys = await self._repo.keys_from(db, namespace, prefix)
        if not keys:
            raise KeyUnknown
        if len(keys) > 1:
            raise KeyAmbiguous
        described = await self._repo.describe(db, namespace, keys)
        if keys[0] not in described:
            raise KeyUnknown
        return described[keys[0]]

    async def _nearest(
        self, db: ReadConnection, namespace: str, asked: Described, leave_out: Collection[str]
    ) -> Neighbour | None:
        candidates = await self._repo.neighbours(db, namespace, asked.known.key) - set(leave_out)
        others = await self._repo.describe(db, namespace, candidates)
        best = ranked(asked, [one for one in others.values() if one.factors])[:_LOOKED_INTO]
        if len(best) > 1 and not best[0].same_graph:
            keys = [asked.known.key, *(one.described.known.key for one in best)]
            texts = await self._repo.summaries(db, namespace, keys)
            near = best
            best = await to_thread.run_sync(lambda: refined(asked, near, _decoded(texts)))
        return best[0] if best else None

    async def _causes(
        self, db: ReadConnection, namespace: str, asked: list[Described], leave_out: Collection[str]
    ) -> list[Cause]:
        """Reasons against keys that are not the job's own, the most frequent first."""
        found: dict[str, list[str]] = defaultdict(list)
        for one in asked[:_CAUSES]:
            nearest = await self._nearest(db, namespace, one, leave_out)
            if nearest is not None and not nearest.known_in_time:
                nearest = None
            found[cause(nearest, None)].append(one.known.key)
        causes = [Cause(text=text, keys=keys) for text, keys in found.items()]
        return sorted(causes, key=lambda one: (-len(one.keys), one.text))


# Thousands of operations are decoded and compared in threads: leases must not wait for an explanation.


def _decoded(texts: dict[str, str]) -> dict[str, GraphSummary]:
    found = {}
    for key, text in texts.items():
        # One of a later version, after a downgrade, is as good as none.
        with contextlib.suppress(ValueError):
            found[key] = decode(text)
    return found


def _compared(texts: dict[str, str], here: str, there: str) -> GraphDifference:
    summaries = _decoded(texts)
    return graphs.compare(summaries.get(here), summaries.get(there))
