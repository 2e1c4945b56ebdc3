"""A cache server that answers what a test tells it to, faults included.

Not a model of the real server: each call has a queue of replies and, when that is empty, a harmless default.
"""

from __future__ import annotations

import json
import re
import threading
from collections import defaultdict, deque
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_CALLS = (
    ("acquire", "POST", r"/keys/[0-9a-f]{64}/acquire$"),
    ("lookup", "POST", r"/keys/lookup$"),
    ("heartbeat", "POST", r"/leases/[0-9a-f]+/heartbeat$"),
    ("publish", "POST", r"/leases/[0-9a-f]+/publish$"),
    ("fail", "POST", r"/leases/[0-9a-f]+/fail$"),
    ("release", "DELETE", r"/leases/[0-9a-f]+$"),
    ("upload", "POST", r"/blobs/[0-9a-f]{64}/upload$"),
    ("report", "POST", r"/blobs/[0-9a-f]{64}/report$"),
    ("summary", "POST", r"/keys/[0-9a-f]{64}/summary$"),
    ("reports", "POST", r"/reports$"),
    ("put", "PUT", r"."),
    ("entries", "GET", r"/entries(\?.*)?$"),
    ("entry", "GET", r"/entries/[0-9a-f]{64}$"),
    ("delete_entry", "DELETE", r"/entries/[0-9a-f]{64}$"),
    ("failures", "GET", r"/failures$"),
    ("clear_failure", "DELETE", r"/failures/[0-9a-f]{64}$"),
    ("stats", "GET", r"/v1/stats"),
    ("get", "GET", r"."),
)


def classify(method: str, path: str) -> str:
    """The name of a call, as in `_CALLS`."""
    return next(call for call, its, where in _CALLS if its == method and re.search(where, path))


@dataclass
class Reply:
    """One answer. `json` or `body`; the rest are faults."""

    json: Any = None
    status: int = 200
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    drop: bool = False
    """Close the connection instead of answering; the request was read."""
    announce: int | None = None
    """Content-Length to claim, whatever the body has."""
    gate: threading.Event | None = None
    """Wait for this before answering."""


@dataclass
class Seen:
    """A request as it came."""

    call: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class _QuietServer(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is what many tests are about."""


class ScriptedServer:
    """Use as a context manager; `url` is where it listens."""

    def __init__(self, port: int = 0) -> None:
        self.seen: list[Seen] = []
        self._arrived = threading.Condition()
        self._script: dict[str, deque[Reply]] = defaultdict(deque)
        self._server = _QuietServer(("127.0.0.1", port), _handler(self))
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def script(self, call: str, *replies: Reply) -> None:
        """Queue replies for a call (see `_CALLS`)."""
        self._script[call].extend(replies)

    def calls(self, call: str) -> list[Seen]:
        """The requests of one kind so far."""
        return [s for s in self.seen if s.call == call]

    def wait_for(self, call: str, count: int = 1) -> None:
        """Until that many requests of the kind have come."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.calls(call)) >= count, 30), f"no {call} came"

    def reply_to(self, seen: Seen) -> Reply:
        with self._arrived:
            self.seen.append(seen)
            queue = self._script[seen.call]
            reply = queue.popleft() if queue else _default(seen)
            self._arrived.notify_all()
        if reply.gate is not None:
            reply.gate.wait(30)
        return reply


def _default(seen: Seen) -> Reply:
    if seen.call == "heartbeat":
        return Reply({"epoch": 1, "ttl_seconds": 30.0})
    if seen.call == "upload":
        return Reply({"how": "stream", "url": seen.path.removesuffix("/upload")})
    if seen.call == "publish":
        sent = seen.json
        return Reply(
            {"outcome": "published", "artifact": {"sha256": sent["sha256"], "size": sent["size"], "url": "/x"}}
        )
    if seen.call in ("put", "fail", "release", "delete_entry", "clear_failure"):
        return Reply({})
    return problem(404, "not_scripted")


def problem(status: int, code: str, detail: str = "said the test") -> Reply:
    """An error answer as the server makes them."""
    return Reply({"title": code, "status": status, "code": code, "detail": detail}, status=status)


def leased() -> Reply:
    return Reply({"state": "leased", "epoch": 1, "ttl_seconds": 30.0})


def busy(host: str = "other-host", **fields: Any) -> Reply:
    holder = {"host": host, "boot": "b", "pid": 7}
    return Reply({"state": "busy", "holder": holder, "elapsed_seconds": 12.0, **fields})


def hit(sha256: str, size: int, url: str | None = None, **fields: Any) -> Reply:
    artifact = {"sha256": sha256, "size": size, "url": url or f"/v1/ns/default/blobs/{sha256}", **fields}
    return Reply({"state": "hit", "artifact": artifact})


def _handler(server: ScriptedServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _any(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            body = self.rfile.read(length)
            call = classify(self.command, self.path)
            reply = server.reply_to(Seen(call, self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            if reply.drop:
                self.close_connection = True
                return
            data = reply.body if reply.body is not None else json.dumps(reply.json).encode()
            try:
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(data) if reply.announce is None else reply.announce))
                self.end_headers()
                self.wfile.write(data)
            except OSError:
                self.close_connection = True
            if reply.announce is not None:
                self.close_connection = True

        do_GET = do_POST = do_PUT = do_DELETE = _any

        def log_message(self, *args: Any) -> None:
            return

    return Handler
