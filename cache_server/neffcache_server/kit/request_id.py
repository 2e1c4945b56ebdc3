"""A name for every request, in its answer and in the log lines it causes."""

from __future__ import annotations

import re
import secrets
from contextvars import ContextVar

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the request that the running code serves."""

# What a proxy or client sends goes into logs, so it has to be short and plain; anything else gets an id of ours.
_USABLE = re.compile(rb"[A-Za-z0-9._:+=@-]{1,128}")


class RequestIds:
    """Takes the id from X-Request-ID or makes one, and sends it back."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == HEADER.encode()), b"")
        own = given.decode() if _USABLE.fullmatch(given) else secrets.token_hex(8)
        # Not taken back at the end: the answer to an unexpected fault is made outside of this middleware.
        request_id.set(own)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = own
            await send(message)

        await self._app(scope, receive, named)
