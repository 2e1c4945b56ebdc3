"""This host's room for one key's compile: what it is expected to take, and whether it may begin."""

from __future__ import annotations

import threading

from neffcache_client.admission import Ticket, wait_for_turn
from neffcache_client.errors import Aborted
from neffcache_client.heartbeat import LeaseView
from neffcache_client.history import Expected, History
from neffcache_client.results import CompileResult
from neffcache_client.settings import ClientSettings
from neffcache_client.wire import AcquireAnswer


class Room:
    """Made for one key; knows from history what a compile of it takes."""

    def __init__(self, settings: ClientSettings, key: str, graph_bytes: int | None) -> None:
        self.starved = 0
        """Compiles of this process that were killed for memory."""
        self._key = key
        self._graph_bytes = graph_bytes
        self._history = History(settings.tier_dir)
        self._ticket = Ticket(settings.lock_dir, settings.host_compiles)
        self._known: Expected | None = None

    def enter(self) -> bool:
        """May the compile begin? Asked before a lease is, or the lease would wait for the room. False queues it."""
        return self._ticket.enter(self._expected())

    def keeps_lease(self, answer: AcquireAnswer) -> bool:
        """False when there is no room for the compile now that it was granted: others shall have the lease."""
        if self._expected().peak is None and answer.usual_peak_rss_bytes is not None:
            # The fleet knows what this host did not.
            self._known = Expected(answer.usual_peak_rss_bytes, answer.usual_seconds)
            self._ticket.leave()
        return self.enter()

    def came(self) -> bool:
        """For looking at while waiting: True once, when this compile's turn in the queue has come."""
        return self._ticket.queued and self._ticket.worth_a_try() and self.enter()

    def wait(self, view: LeaseView, abort: threading.Event) -> None:
        """Return when the compile may begin; what `view` is told is then this host's business too. Raises Aborted."""
        if not wait_for_turn(self._ticket, self._expected(), abort):
            raise Aborted
        view.told = self._ticket.note

    def give_up_unused(self) -> None:
        """The compile is not needed now; a place in the queue is kept."""
        if self._ticket.running:
            self._ticket.leave()

    def leave(self) -> None:
        """The compile has ended, or never will begin."""
        self._ticket.leave()

    def learn(self, result: CompileResult) -> None:
        """Remember what the compile took, for the next of this graph or of one like it."""
        peak = result.peak_rss_bytes or 0
        if result.out_of_memory:
            self.starved += 1
            peak = max(2 * (self._expected().peak or 0), peak * 3 // 2)
        if not peak or not (result.kind == "ok" or result.out_of_memory):
            return
        self._history.note(
            self._key, self._graph_bytes, peak=peak, seconds=result.seconds, too_little=result.out_of_memory
        )
        self._known = Expected(peak, result.seconds)

    def _expected(self) -> Expected:
        if self._known is None:
            self._known = self._history.expect(self._key, self._graph_bytes)
        return self._known
