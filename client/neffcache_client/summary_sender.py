"""Sends what a missed graph consists of, beside the compile and never in its way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from neffcache_client.errors import NeffcacheError
from neffcache_client.wire import SummaryRequest

if TYPE_CHECKING:
    from neffcache_client.api import CacheClient

Summarise = Callable[[], str | None]
"""Makes the encoded summary of the graph, or None when there is none. May take seconds; must not raise."""

_LINGER_SECONDS = 1.0
"""What a summary may cost whoever compiled faster than it was made. Real compiles take minutes."""


class SummarySender:
    """At most one summary of one key, made and sent in a thread of its own once `start` is called."""

    def __init__(
        self, client: CacheClient, key: str, summarise: Summarise | None, log: Callable[[str], None]
    ) -> None:
        self._client = client
        self._key = key
        self._summarise = summarise
        self._log = log
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; nothing happens the second time."""
        if self._summarise is not None and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="neffcache-summary", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Give it a moment to end; what is not done then is given up with the process."""
        if self._thread is not None:
            self._thread.join(_LINGER_SECONDS)

    def _run(self) -> None:
        assert self._summarise is not None
        try:
            text = self._summarise()
            if text is not None:
                self._client.keep_summary(self._key, SummaryRequest(summary=text))
        except (NeffcacheError, OSError, ValueError, RuntimeError) as exc:
            # A miss that cannot be explained in every detail is no reason to bother a job.
            self._log(f"the graph of {self._key[:12]} could not be described to the server: {exc}")
