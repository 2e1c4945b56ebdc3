"""OpenTelemetry spans of what ranks wait for: acquire (waiting included), upload, download. Off unless asked for."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_KINDS = (
    ("POST", re.compile(r"/v1/ns/([^/]+)/keys/[0-9a-f]{64}/acquire"), "neffcache.acquire"),
    ("PUT", re.compile(r"/v1/ns/([^/]+)/blobs/[0-9a-f]{64}"), "neffcache.upload"),
    ("GET", re.compile(r"/v1/ns/([^/]+)/blobs/[0-9a-f]{64}"), "neffcache.download"),
)


def tracer(environ: Mapping[str, str] = os.environ) -> Any | None:
    """A tracer when `OTEL_*` says where spans go and the library is there; None otherwise."""
    told = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or environ.get("OTEL_TRACES_EXPORTER", "none") != "none"
    if not told or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    return trace.get_tracer("neffcache")


class Traced:
    """Makes a span of each request of those kinds. Lease ids, keys and tokens are in none."""

    def __init__(self, app: ASGIApp, tracer: Any) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name, namespace = _kind(scope)
        if not name:
            await self._app(scope, receive, send)
            return
        with self._tracer.start_as_current_span(name, attributes={"neffcache.namespace": namespace}) as span:

            async def noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                await send(message)

            await self._app(scope, receive, noted)


def _kind(scope: Scope) -> tuple[str, str]:
    if scope["type"] == "http":
        for method, pattern, name in _KINDS:
            if scope["method"] == method and (found := pattern.fullmatch(scope["path"])):
                return name, found.group(1)
    return "", ""
