"""A TCP proxy between client and server that drops, delays, truncates, trickles or damages what passes.

It looks at the first line of each request to know which call it is, and treats what follows as bytes.
"""

from __future__ import annotations

import re
import socket
import threading
from dataclasses import dataclass, field
from typing import Literal

from support.scripted_server import classify

Kind = Literal["drop", "delay", "truncate", "damage", "trickle", "stall", "cut_request", "damage_request", "answer"]


@dataclass
class Fault:
    """What happens to a call (a name of `scripted_server`, or `any`), the first `times` times that it is made.

    drop: the server acts, its answer is lost. delay: the answer comes `seconds` later. truncate: the connection ends
    after `at` bytes of the answer. damage: one byte of the answer, `at` from its start, is flipped. trickle: a byte
    every `seconds`. stall: `at` bytes of the answer, then silence. cut_request: the connection ends after `at` bytes
    of the request. damage_request: one byte of the request is flipped. answer: `data` instead of the server's.
    """

    call: str
    kind: Kind
    times: int = 1_000_000
    at: int = 0
    seconds: float = 0.0
    data: bytes = b""
    happened: int = field(default=0, init=False)


class Proxy:
    """Use as a context manager. `url` is where it listens; `faults` may change at any time."""

    def __init__(self, target: str, *faults: Fault) -> None:
        host, _, port = target.removeprefix("http://").partition(":")
        self._target = (host, int(port))
        self.faults = list(faults)
        self.calls: list[str] = []
        self.idle_seconds: float | None = None
        """New connections that are silent for so long are ended, as a load balancer does."""
        self.cut = 0
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._ended = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        # A listener that is only closed would keep its accept(2) going.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.break_connections()

    def break_connections(self) -> None:
        """Every connection breaks now, as when a switch is restarted."""
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for one in sockets:
            _break(one)

    def happened(self) -> int:
        """How often a fault was injected so far."""
        return sum(fault.happened for fault in self.faults)

    def fault_for(self, call: str) -> Fault | None:
        """The fault of the call that begins now."""
        with self._lock:
            self.calls.append(call)
            for fault in self.faults:
                if fault.call in (call, "any") and fault.happened < fault.times:
                    fault.happened += 1
                    return fault
        return None

    def wait(self, seconds: float) -> None:
        """Sleep, unless the proxy ends."""
        self._ended.wait(seconds)

    def _listen(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target, timeout=30)
            except OSError:
                if self._ended.is_set():
                    return
                _break(client)
                continue
            server.settimeout(self.idle_seconds)
            with self._lock:
                self._sockets |= {client, server}
            _Connection(self, client, server).start()


class _Connection:
    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy, self._client, self._server = proxy, client, server
        self._fault: Fault | None = None
        self._sent = self._answered = 0

    def start(self) -> None:
        for pump in (self._requests, self._answers):
            threading.Thread(target=self._run, args=(pump,), daemon=True).start()

    def _run(self, pump: object) -> None:
        try:
            pump()  # type: ignore[operator]
        except TimeoutError:
            self._proxy.cut += 1
        except OSError:
            pass
        finally:
            _break(self._client)
            _break(self._server)

    def _requests(self) -> None:
        while data := self._client.recv(1 << 16):
            if begins := re.match(rb"([A-Z]+) (\S+) HTTP/1", data):
                self._fault = self._proxy.fault_for(classify(begins[1].decode(), begins[2].decode()))
                self._sent = self._answered = 0
            fault = self._fault
            if fault is not None and fault.kind == "answer":
                self._client.sendall(fault.data)
                self._client.shutdown(socket.SHUT_WR)
                # Closed with a part of the request unread, the kernel would take the answer back.
                while self._client.recv(1 << 16):
                    pass
                return
            if fault is not None and fault.kind == "cut_request":
                data = data[: max(0, fault.at - self._sent)]
            if fault is not None and fault.kind == "damage_request":
                data = _flipped(data, fault.at - self._sent)
            self._server.sendall(data)
            self._sent += len(data)
            if fault is not None and fault.kind == "cut_request" and self._sent >= fault.at:
                return

    def _answers(self) -> None:
        while data := self._server.recv(1 << 16):
            fault = self._fault
            if fault is None:
                self._client.sendall(data)
                continue
            if fault.kind == "drop":
                return
            if fault.kind == "delay" and self._answered == 0:
                self._proxy.wait(fault.seconds)
            if fault.kind == "damage":
                data = _flipped(data, fault.at - self._answered)
            if fault.kind in ("truncate", "stall"):
                data = data[: max(0, fault.at - self._answered)]
            if fault.kind == "trickle":
                self._trickle(data, fault.seconds)
            else:
                self._client.sendall(data)
            self._answered += len(data)
            if fault.kind == "truncate" and self._answered >= fault.at:
                return

    def _trickle(self, data: bytes, seconds: float) -> None:
        for n in range(len(data)):
            self._client.sendall(data[n : n + 1])
            self._proxy.wait(seconds)


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if 0 <= at < len(data) else data


def _break(one: socket.socket) -> None:
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    one.close()
