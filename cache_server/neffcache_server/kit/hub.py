"""Telling waiters that something about a key has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

Topic = tuple[str, str]
"""Namespace and key."""


class EventHub(Protocol):
    """Announcements of changes. May lose none, may repeat any, carries no content: listeners read again."""

    def subscribe(self, topic: Topic, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` at each change of `topic`; returns what ends it."""

    async def announce(self, topic: Topic) -> None:
        """A committed change of `topic` is there to be seen."""

    async def run(self) -> None:
        """Whatever has to go on in the background for that, until it is cancelled."""


class LocalHub:
    """The hub of a single process."""

    def __init__(self) -> None:
        self._listeners: dict[Topic, list[Callable[[], None]]] = {}

    def subscribe(self, topic: Topic, listener: Callable[[], None]) -> Callable[[], None]:
        listeners = self._listeners.setdefault(topic, [])
        listeners.append(listener)

        def end() -> None:
            listeners.remove(listener)
            if not listeners and self._listeners.get(topic) is listeners:
                del self._listeners[topic]

        return end

    async def announce(self, topic: Topic) -> None:
        self.announce_now(topic)

    async def run(self) -> None:
        return

    def announce_now(self, topic: Topic) -> None:
        """The same for callers that cannot await."""
        for listener in tuple(self._listeners.get(topic, ())):
            listener()

    def announce_everything(self) -> None:
        """Announcements may have been missed: everybody looks."""
        for topic in tuple(self._listeners):
            self.announce_now(topic)
