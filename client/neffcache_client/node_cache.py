"""The node cache: what the launcher calls when its own look into the local tier found nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from neffcache_client.breaker import Breaker
from neffcache_client.errand import Compile, Errand
from neffcache_client.errors import Aborted
from neffcache_client.heartbeat import LeaseView
from neffcache_client.local_tier import LocalTier
from neffcache_client.records import record
from neffcache_client.results import CACHE_FAULT_EXIT, CompileResult, Obtained, Patience, Verdict
from neffcache_client.settings import ClientSettings
from neffcache_client.summary_sender import Summarise

__all__ = ["CACHE_FAULT_EXIT", "CompileResult", "LeaseView", "NodeCache", "Obtained", "Patience", "Verdict"]


class NodeCache:
    """Gets NEFFs for one process. Each kind of trouble is warned about once per object."""

    def __init__(
        self,
        settings: ClientSettings,
        *,
        log: Callable[[str], None],
        abort: threading.Event,
        patience: Patience | None = None,
    ) -> None:
        self._settings = settings
        self._log = log
        self._abort = abort
        self._patience = patience or Patience()
        self._tier = LocalTier(settings.tier_dir, settings.local_max_bytes)
        self._breaker = Breaker(
            settings.lock_dir, "\n".join((settings.url, settings.namespace, settings.token or ""))
        )
        self._warned: set[str] = set()

    def obtain(
        self,
        key: str,
        factors: dict[str, Any],
        *,
        output: str,
        compile: Compile,
        expect_version: str | None,
        expect_target: str | None,
        retry_failed: bool = False,
        graph_bytes: int | None = None,
        summarise: Summarise | None = None,
    ) -> Obtained:
        """Put the NEFF of `key` at `output`, compiling it if it is this process's turn, and record the verdict.

        `compile` may be called up to three times (a compile that died for no reason of its own is tried again where
        nobody else does). Raises Aborted soon after `abort` is set, with the lease released; LocalTierError when
        `output` cannot be written; and whatever `compile` raises. `graph_bytes` is the size of the compiler's input,
        from which the memory of a first compile is guessed. `summarise` is called on a miss only, in a thread
        of its own: it describes the graph for `neffcache explain`.
        """
        errand = Errand(
            self._settings,
            self._tier,
            self._breaker,
            key,
            factors,
            output=output,
            compile=compile,
            expect_version=expect_version,
            expect_target=expect_target,
            retry_failed=retry_failed,
            graph_bytes=graph_bytes,
            summarise=summarise,
            abort=self._abort,
            log=self._log,
            warn=self._warn,
            patience=self._patience,
        )
        began = time.monotonic()
        try:
            obtained = errand.run()
        except Aborted:
            self._record(key, errand, began, verdict="failed", reason="aborted")
            raise
        self._record(
            key,
            errand,
            began,
            verdict=obtained.verdict,
            reason=obtained.reason,
            exit_code=obtained.exit_code,
            bytes=obtained.bytes,
            saved_seconds=obtained.saved_seconds,
            server=obtained.counted or None,
        )
        self._log(_summary(key, obtained, time.monotonic() - began))
        return obtained

    def _record(self, key: str, errand: Errand, began: float, **fields: Any) -> None:
        record(
            self._settings.tier_dir,
            key=key,
            seconds=round(time.monotonic() - began, 3),
            waited_seconds=round(errand.waited_seconds, 3),
            compile_seconds=errand.compile_seconds,
            cpu_seconds=errand.cpu_seconds,
            peak_rss_bytes=errand.peak_rss_bytes,
            corrupt=errand.corrupt or None,
            job=self._settings.job,
            rank=self._settings.rank,
            **fields,
        )

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self._log(f"WARNING: {text}")


def _summary(key: str, obtained: Obtained, seconds: float) -> str:
    reason = f" ({obtained.reason})" if obtained.reason else ""
    return f"{obtained.verdict}{reason} {key[:12]} in {seconds:.1f} s"
