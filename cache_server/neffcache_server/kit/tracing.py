"""OpenTelemetry spans of what ranks wait for: acquire, the wait in it, upload, download. Off unless `OTEL_*` asks.

Lease ids, keys, digests and tokens are in none: whoever may read traces may not therefore publish or read artifacts.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from importlib.metadata import entry_points, version
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_log = logging.getLogger(__name__)
_BLOB = r"/v1/ns/([^/]+)/blobs/[0-9a-f]{64}"
_KINDS = (
    ("POST", re.compile(r"/v1/ns/([^/]+)/keys/[0-9a-f]{64}/acquire"), "neffcache.acquire"),
    ("PUT", re.compile(_BLOB), "neffcache.upload"),
    ("POST", re.compile(rf"{_BLOB}/upload"), "neffcache.upload"),
    ("GET", re.compile(_BLOB), "neffcache.download"),
)
_CLOSE_SECONDS = 3.0
# An exception's message and stack would become attributes, with whatever they hold.
_QUIET = {"record_exception": False, "set_status_on_exception": False}

_current: ContextVar[Any | None] = ContextVar("tracer", default=None)


def span(name: str) -> AbstractContextManager[Any]:
    """A span within the one of the running request; nothing where there is none."""
    tracer = _current.get()
    return nullcontext() if tracer is None else tracer.start_as_current_span(name, **_QUIET)


class Tracing:
    """Where this process's spans go."""

    def __init__(self, tracer: Any, shut: Callable[[], None] | None = None) -> None:
        self.tracer = tracer
        self._shut = shut

    def close(self) -> None:
        """Send what is left, for 3 s at most: a collector that is gone may not hold up the server's end."""
        if self._shut is not None:
            thread = threading.Thread(target=self._shut, name="last-spans", daemon=True)
            thread.start()
            thread.join(_CLOSE_SECONDS)


def open_tracing(environ: Mapping[str, str] = os.environ) -> Tracing | None:
    """Tracing as `OTEL_*` asks for it, None when it does not. What cannot be had is warned about, and left out.

    A provider that is there already (the program was started by `opentelemetry-instrument`) is used as it is. To be
    called in the process that serves: the sender is a thread, and a fork would lose it.
    """
    names = _exporters(environ)
    if not names:
        return None
    try:
        from opentelemetry import trace

        given = trace.get_tracer_provider()
        if not isinstance(given, trace.ProxyTracerProvider):
            return Tracing(given.get_tracer("neffcache"))
        provider = _provider(names, environ)
    except ImportError:
        _log.warning("OTEL_* asks for traces and OpenTelemetry is not installed: pip install 'neffcache[otel]'")
        return None
    except Exception as exc:  # an exporter says in its own way what is wrong with its settings
        _log.warning("no traces, since %s: %s", type(exc).__name__, exc)
        return None
    return Tracing(provider.get_tracer("neffcache"), provider.shutdown)


def _exporters(environ: Mapping[str, str]) -> list[str]:
    """Names of exporters among the entry points `opentelemetry_traces_exporter`."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return []
    endpoint = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    asked = environ.get("OTEL_TRACES_EXPORTER") or ("otlp" if endpoint else "none")
    names = [name.strip() for name in asked.split(",")]
    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "")
    otlp = "otlp_proto_grpc" if protocol.strip() == "grpc" else "otlp_proto_http"
    return [otlp if name == "otlp" else name for name in names if name not in ("", "none")]


def _provider(names: list[str], environ: Mapping[str, str]) -> Any:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    own = {"service.version": version("neffcache")}
    if not environ.get("OTEL_SERVICE_NAME") and "service.name=" not in environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        own["service.name"] = "neffcache"
    provider = TracerProvider(resource=Resource.create(own), shutdown_on_exit=False)
    for name in names:
        found = next(iter(entry_points(group="opentelemetry_traces_exporter", name=name)), None)
        if found is None:
            raise LookupError(f"no exporter {name!r} is installed (`otlp` and `console` come with 'neffcache[otel]')")
        provider.add_span_processor(BatchSpanProcessor(found.load()()))
    return provider


class Traced:
    """Makes a span of each request of those kinds, within its sender's trace where it names one."""

    def __init__(self, app: ASGIApp, tracer: Any) -> None:
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._app = app
        self._tracer = tracer
        self._kind = SpanKind.SERVER
        self._error = StatusCode.ERROR
        self._context = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name, namespace = _kind(scope)
        if not name:
            await self._app(scope, receive, send)
            return
        sent = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"] if k == b"traceparent"}
        given = {"context": self._context.extract(sent), "kind": self._kind, **_QUIET}
        with self._tracer.start_as_current_span(name, attributes={"neffcache.namespace": namespace}, **given) as own:

            async def noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    own.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        own.set_status(self._error)
                await send(message)

            token = _current.set(self._tracer)
            try:
                await self._app(scope, receive, noted)
            finally:
                _current.reset(token)


def _kind(scope: Scope) -> tuple[str, str]:
    if scope["type"] == "http":
        for method, pattern, name in _KINDS:
            if scope["method"] == method and (found := pattern.fullmatch(scope["path"])):
                return name, found.group(1)
    return "", ""
