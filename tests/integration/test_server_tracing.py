"""OpenTelemetry: a started server sends its spans to a collector, and they hold no secret."""

from __future__ import annotations

import gzip
import hashlib
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from neffcache_server.kit.tracing import open_tracing
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from support.cache_state import lease_id, neff
from support.leash import free_port
from support.server import ServerProcess, running_server
from support.waiting import wait_until

KEY = "a" * 64
NEFF = neff("one")
SHA = hashlib.sha256(NEFF).hexdigest()
ADMIN = "an-admin-token-for-the-traces"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Takes what an OTLP exporter sends over HTTP."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                outer.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for request in self.requests
            for of_resource in request.resource_spans
            for scope in of_resource.scope_spans
            for span in scope.spans
        ]


@pytest.fixture
def collector() -> Iterator[Collector]:
    running = Collector()
    yield running
    running.close()


def waiters(server: ServerProcess, headers: dict[str, str]) -> float:
    text = httpx.get(f"{server.url}/metrics", headers=headers).text
    return next(float(v) for n, _, v in (r.partition("} ") for r in text.splitlines()) if "worker_waiters{" in n)


def called(server: ServerProcess) -> None:
    """A rank compiles, another waits for it, a third downloads."""
    bearer = {"authorization": f"Bearer {ADMIN}"}
    with httpx.Client(base_url=f"{server.url}/v1/ns/default", headers=bearer, timeout=60) as api:

        def ask(number: int, wait: float = 0) -> Any:
            holder = {"host": f"h{number}", "boot": "b", "pid": number}
            body = {"lease_id": lease_id(number), "holder": holder, "wait_seconds": wait}
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            return api.post(f"keys/{KEY}/acquire", json=body, headers=headers).raise_for_status().json()

        assert ask(1)["state"] == "leased"
        api.post(f"leases/{lease_id(1)}/heartbeat", json={}).raise_for_status()
        answers: list[Any] = []
        waiter = threading.Thread(target=lambda: answers.append(ask(2, 25)))
        waiter.start()
        wait_until(lambda: waiters(server, bearer) == 1, what="one waits")
        api.put(f"blobs/{SHA}", content=NEFF, headers={"neffcache-lease": lease_id(1)}).raise_for_status()
        body = {"sha256": SHA, "size": len(NEFF), "compile_seconds": 3.0}
        api.post(f"leases/{lease_id(1)}/publish", json=body).raise_for_status()
        waiter.join()
        assert answers[0]["state"] == "hit"
        assert api.get(f"blobs/{SHA}").content == NEFF


def test_a_plainly_started_server_sends_its_spans(collector: Collector, tmp_path: Path) -> None:
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "NEFFCACHE_SERVER_ADMIN_TOKEN": ADMIN}
    with running_server(tmp_path, env=env) as server:
        called(server)
        assert server.stop() == 0, "what was not sent yet is sent at the end"
    spans = {span.span_id: span for span in collector.spans}
    names = sorted(span.name for span in spans.values())
    assert names == [
        "neffcache.acquire",
        "neffcache.acquire",
        "neffcache.download",
        "neffcache.upload",
        "neffcache.wait",
    ]
    (wait,) = [span for span in spans.values() if span.name == "neffcache.wait"]
    acquire = spans[wait.parent_span_id]
    assert acquire.name == "neffcache.acquire"
    assert acquire.start_time_unix_nano <= wait.start_time_unix_nano < wait.end_time_unix_nano
    assert (acquire.trace_id.hex(), acquire.parent_span_id.hex()) == (TRACE, PARENT), "within the asker's own trace"
    told = {a.key: a.value for a in acquire.attributes}
    assert told["neffcache.namespace"].string_value == "default"
    assert told["http.response.status_code"].int_value == 200
    (resource, *_) = [r.resource for request in collector.requests for r in request.resource_spans]
    assert {a.key: a.value.string_value for a in resource.attributes}["service.name"] == "neffcache"
    everything = "".join(str(request) for request in collector.requests)
    for secret in (KEY, KEY[:12], SHA, ADMIN, lease_id(1), lease_id(2)):
        assert secret not in everything


def test_a_refused_request_tells_no_more(collector: Collector, tmp_path: Path) -> None:
    """A waiter that is sent elsewhere ends by an exception, whose message and stack are nobody's business."""
    env = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{collector.url}/v1/traces", "OTEL_SERVICE_NAME": "our-cache"}
    with running_server(tmp_path, env=env) as server:
        asked = {"lease_id": lease_id(1), "holder": {"host": "h", "boot": "b", "pid": 1}}
        url = f"{server.url}/v1/ns/default/keys/{KEY}/acquire"
        httpx.post(url, json=asked).raise_for_status()
        answers: list[httpx.Response] = []
        later = {**asked, "lease_id": lease_id(2), "wait_seconds": 25}
        waiter = threading.Thread(target=lambda: answers.append(httpx.post(url, json=later, timeout=60)))
        waiter.start()
        wait_until(lambda: waiters(server, {}) == 1, what="one waits")
        assert server.stop() == 0
        waiter.join()
    assert answers[0].status_code == 503
    (wait,) = [span for span in collector.spans if span.name == "neffcache.wait"]
    assert not wait.events
    (failed,) = [span for span in collector.spans if span.span_id == wait.parent_span_id]
    assert failed.status.code == 2, "an error"
    assert not failed.status.message
    assert "our-cache" in str(collector.requests[0])
    assert lease_id(2) not in str(collector.requests)


def test_a_collector_that_is_gone_holds_nothing_up(tmp_path: Path) -> None:
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}"}
    with running_server(tmp_path, env=env) as server:
        asked = {"lease_id": lease_id(1), "holder": {"host": "h", "boot": "b", "pid": 1}}
        httpx.post(f"{server.url}/v1/ns/default/keys/{KEY}/acquire", json=asked).raise_for_status()
        assert server.stop() == 0


def test_nothing_happens_unless_it_is_asked_for() -> None:
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    unasked = [{}, {"OTEL_TRACES_EXPORTER": "none", **endpoint}, {"OTEL_SDK_DISABLED": "true", **endpoint}]
    code = (
        "import sys, neffcache_server.app\n"
        "from neffcache_server.kit.tracing import open_tracing, span\n"
        f"assert [open_tracing(environ) for environ in {unasked!r}] == [None] * 3\n"
        "with span('neffcache.wait'): pass\n"
        "assert not [m for m in sys.modules if m.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_library_that_is_missing_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with caplog.at_level(logging.WARNING):
        assert open_tracing({"OTEL_TRACES_EXPORTER": "otlp"}) is None
    assert "pip install 'neffcache[otel]'" in caplog.text


def test_an_exporter_that_is_missing_is_a_sentence(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert open_tracing({"OTEL_TRACES_EXPORTER": "zipkin"}) is None
    assert "no exporter 'zipkin' is installed" in caplog.text


INSTRUMENTED = """
import sys
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
trace.set_tracer_provider(provider)
from neffcache_server.__main__ import main
sys.exit(main())
"""


def test_a_provider_that_is_there_already_is_used_and_told_no_more(collector: Collector, tmp_path: Path) -> None:
    """As with `opentelemetry-instrument`: the web framework would add spans of its own, which name paths."""
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "NEFFCACHE_SERVER_ADMIN_TOKEN": ADMIN}
    with running_server(tmp_path, env=env, program=("-c", INSTRUMENTED)) as server:
        called(server)
        assert server.stop() == 0
    assert len(collector.spans) == 5
    assert {span.name.partition(".")[0] for span in collector.spans} == {"neffcache"}
    everything = "".join(str(request) for request in collector.requests)
    for secret in (KEY, SHA, ADMIN, lease_id(1), lease_id(2)):
        assert secret not in everything
