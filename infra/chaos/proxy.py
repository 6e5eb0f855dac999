"""An HTTP proxy on loopback that makes an object store fail, between a client and a real server (moto's here).

    with FaultProxy("http://127.0.0.1:5000", seed=7) as proxy:
        os.environ["AWS_ENDPOINT_URL"] = proxy.url
        proxy.fail("lost_answer", method="PUT", path="_commits/")     # the next such request; the store performs it
        proxy.set_rates({"slow_down": 0.1, "reset": 0.05})            # from now on, each request by chance
        ...
        proxy.set_rates({})                                           # all is well again; requests that hang end too
        print(proxy.counts)

What each kind does to one request:

===============  ==================================================================================
internal_error   answers 500 InternalError; the store never hears of the request
unavailable      answers 503 ServiceUnavailable, likewise
slow_down        answers 503 SlowDown, likewise
reset            resets the connection; the store never hears of the request
lost_answer      the store performs the request, then the connection is reset
late_error       the store performs the request, then the answer is 500 InternalError
delay            up to `delay_s` seconds late, else normal
hang             takes the request and answers nothing until the rates are changed or the proxy stops
truncated        the answer's body ends half-way and the connection closes (requests without one: `lost_answer`)
slow_body        the answer's body comes in eight pieces over `delay_s` seconds
===============  ==================================================================================

Which request is hit by chance is drawn from `seed` in the order in which requests arrive.
"""

from __future__ import annotations

import http.client
import os
import random
import socket
import socketserver
import struct
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from types import TracebackType
from typing import Literal, Self, get_args
from urllib.parse import urlsplit

Kind = Literal[
    "internal_error",
    "unavailable",
    "slow_down",
    "reset",
    "lost_answer",
    "late_error",
    "delay",
    "hang",
    "truncated",
    "slow_body",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

_ANSWERS: Mapping[Kind, tuple[int, str]] = {
    "internal_error": (500, "InternalError"),
    "late_error": (500, "InternalError"),
    "unavailable": (503, "ServiceUnavailable"),
    "slow_down": (503, "SlowDown"),
}
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "expect", "te", "upgrade"}
_PIECES = 8
_UPSTREAM_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault that one request met."""

    at: float
    """Seconds of `time.time()`."""
    kind: Kind
    method: str
    path: str


@dataclass(slots=True)
class _Ordered:
    """A fault for the next `times` requests that match."""

    kind: Kind
    times: int
    method: str | None
    path: str

    def matches(self, method: str, path: str) -> bool:
        return self.times > 0 and self.method in (None, method) and self.path in path


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    reason: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


class FaultProxy:
    """The proxy; a context manager that serves from threads of this process."""

    def __init__(
        self, target: str, *, seed: int = 0, rates: Mapping[Kind, float] | None = None, delay_s: float = 1.0
    ) -> None:
        address = urlsplit(target)
        if address.hostname is None or address.port is None:
            raise ValueError(f"target must be like http://host:port, got {target!r}")
        self.target = (address.hostname, address.port)
        self.delay_s = delay_s
        self.injected: list[Injected] = []
        self.requests = 0
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._ordered: list[_Ordered] = []
        self._rates: dict[Kind, float] = {}
        self._hanging = threading.Event()  # set: those that hang now shall end
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="proxy", daemon=True)
        self.set_rates(rates or {})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def counts(self) -> Counter[Kind]:
        """Faults so far, by kind."""
        with self._lock:
            return Counter(fault.kind for fault in self.injected)

    def set_rates(self, rates: Mapping[Kind, float]) -> None:
        """From now on each request meets each kind with this probability; their sum is at most 1. `{}`: none."""
        unknown = set(rates) - set(KINDS)
        if unknown or sum(rates.values()) > 1 or any(rate < 0 for rate in rates.values()):
            raise ValueError(f"rates must be of {', '.join(KINDS)} and sum to at most 1, got {dict(rates)}")
        with self._lock:
            self._rates = dict(rates)
            self._hanging.set()
            self._hanging = threading.Event()

    def fail(self, kind: Kind, *, times: int = 1, method: str | None = None, path: str = "") -> None:
        """Let the next `times` requests of this method (default: any) whose path contains `path` meet a fault."""
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        with self._lock:
            self._ordered.append(_Ordered(kind, times, method, path))

    def draw(self, method: str, path: str) -> Kind | None:
        """The fault that a request meets: one that was ordered for it, else by chance."""
        with self._lock:
            self.requests += 1
            kind = self._by_order(method, path) or self._by_chance()
            if kind is not None:
                self.injected.append(Injected(time.time(), kind, method, path))
            return kind

    def _by_order(self, method: str, path: str) -> Kind | None:
        for ordered in self._ordered:
            if ordered.matches(method, path):
                ordered.times -= 1
                return ordered.kind
        return None

    def _by_chance(self) -> Kind | None:
        place = self._random.random()
        for kind in KINDS:
            place -= self._rates.get(kind, 0.0)
            if place < 0:
                return kind
        return None

    def wait_while_hanging(self) -> None:
        with self._lock:
            hanging = self._hanging
        hanging.wait()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.set_rates({})
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, proxy: FaultProxy) -> None:
        self.proxy = proxy
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that die or give up in the midst of a request are what this is for."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def _serve(self) -> None:
        body = self._request_body()
        proxy = self.server.proxy
        kind = proxy.draw(self.command, self.path)
        if kind == "delay":
            time.sleep(random.random() * proxy.delay_s)
        elif kind == "hang":
            proxy.wait_while_hanging()
        if kind in ("reset", "hang"):
            self._reset()
            return
        if kind is not None and kind in _ANSWERS and kind != "late_error":
            self._send(_error(kind))
            return
        answer = self._forward(body)
        has_body = bool(answer.body) and self.command != "HEAD"
        if kind == "late_error":
            self._send(_error(kind))
        elif kind == "lost_answer" or (kind == "truncated" and not has_body):
            self._reset()
        elif kind == "truncated":
            self._send(answer, keep=len(answer.body) // 2)
        else:
            self._send(answer, over_s=proxy.delay_s if kind == "slow_body" else 0.0)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def _request_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():  # trailers
            pass
        return b"".join(chunks)

    def _forward(self, body: bytes) -> _Answer:
        upstream = http.client.HTTPConnection(*self.server.proxy.target, timeout=_UPSTREAM_TIMEOUT_S)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in _HOP_BY_HOP:
                    upstream.putheader(name, value)
            upstream.putheader("Content-Length", str(len(body)))
            upstream.endheaders(body)
            response = upstream.getresponse()
            headers = [(name, value) for name, value in response.getheaders() if name.lower() not in _HOP_BY_HOP]
            content = response.read()
            length = response.headers.get("Content-Length") if self.command == "HEAD" else str(len(content))
            if length is not None:
                headers.append(("Content-Length", length))
            return _Answer(response.status, response.reason, tuple(headers), content)
        finally:
            upstream.close()

    def _send(self, answer: _Answer, *, keep: int | None = None, over_s: float = 0.0) -> None:
        """Send an answer, the body only as far as `keep` says, or spread over some seconds."""
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        body = answer.body if keep is None else answer.body[:keep]
        if over_s:
            size = max(1, -(-len(body) // _PIECES))
            for start in range(0, len(body), size):
                time.sleep(over_s / _PIECES)
                self.wfile.write(body[start : start + size])
        else:
            self.wfile.write(body)
        if keep is not None:
            self.close_connection = True

    def _reset(self) -> None:
        """Close so that the client sees a reset, not an orderly end."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self.connection.detach())

    def log_message(self, format: str, *args: object) -> None:
        """Quiet: `FaultProxy.injected` tells what happened."""


def _error(kind: Kind) -> _Answer:
    """An answer as S3 gives it."""
    status, code = _ANSWERS[kind]
    body = (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{code}</Code><Message>injected</Message><RequestId>chaos</RequestId></Error>"
    ).encode()
    headers = (("Content-Type", "application/xml"), ("Content-Length", str(len(body))))
    return _Answer(status, code, headers, body)
