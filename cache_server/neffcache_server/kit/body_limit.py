"""A bound on request bodies that are read whole."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """Refuses bodies of more than `limit` bytes with 413, except of blobs: those stream and count for themselves."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        blob = scope["type"] == "http" and scope["method"] == "PUT" and "/blobs/" in scope["path"]
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD") or blob:
            await self._app(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                # Raised out of the endpoint's reading, where the framework lets an HTTPException through.
                raise HTTPException(413, f"a request body may have at most {self._limit} bytes")
            return message

        await self._app(scope, counted, send)
