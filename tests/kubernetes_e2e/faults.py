"""A faulty proxy between a replica and the API server: writes are lost, delayed or misreported.

The replica speaks plain HTTP to the proxy, the proxy TLS to the API server, with the token. Writes
are numbered in the order they arrive, except those of the lease, which arrive at any time. A fault
can be set for a number. Watches are forwarded unchanged; they can be cut, or delayed so that the
replica sees an old state.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from tests.kubernetes_e2e.api import Json
from tests.kubernetes_e2e.plane import Plane

_WRITES = ("POST", "PUT", "PATCH")
_OWN = {"connection", "transfer-encoding", "content-length", "authorization", "host", "keep-alive"}
"""Headers that apply to one connection and are not forwarded."""


@dataclass(slots=True)
class Write:
    """A write that passed the proxy."""

    number: int
    """From 1; 0 for one of the lease."""
    method: str
    path: str
    body: Json
    status: int | None = None
    """The answer of the API server; None if it got no request or did not answer."""

    @property
    def of_claim(self) -> bool:
        """Whether it is of a claim, and not of an event or a pod's condition."""
        return "/resourceclaims/" in self.path

    def __str__(self) -> str:
        return f"{self.number}: {self.method} {self.path} -> {self.status}"


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to a write, in this order."""

    before: Callable[[Write], None] | None = None
    answer: int | None = None
    """Answered with this, and not forwarded."""
    forward: bool = True
    after: Callable[[Write], None] | None = None
    """Called after the write, before the replica gets the answer."""
    cut: bool = False
    """The replica gets no answer: its connection ends."""
    late: float | None = None
    """The replica's connection ends at once, and the write arrives this many seconds later."""


@dataclass(slots=True)
class Hold:
    """A write that is held back until it is released."""

    there: threading.Event = field(default_factory=threading.Event)
    free: threading.Event = field(default_factory=threading.Event)

    def __call__(self, write: Write) -> None:
        self.there.set()
        self.free.wait()


class Proxy:
    """The proxy of one replica, or of several in succession."""

    def __init__(self, plane: Plane, folder: Path, name: str = "road") -> None:
        self._plane = plane
        self._tls = ssl.create_default_context(cafile=str(plane.ca))
        self._lock = threading.Lock()
        self._faults: dict[int, Fault] = {}
        self._number = 0
        self._watches: dict[socket.socket, str] = {}
        self._lag: Mapping[str, threading.Event] = {}
        self.choose: Callable[[Write], Fault | None] = lambda write: None
        """A fault for a write that has none by its number."""
        self.open = threading.Event()
        """Nothing is forwarded unless this is set."""
        self.open.set()
        self.writes: list[Write] = []
        self.all_writes = 0
        self.cuts = 0
        """Watches that were cut."""
        self.met = 0
        """Faults that were applied to a write."""
        self._server = _Server(("127.0.0.1", 0), self._handler())
        self.kubeconfig = folder / f"{name}.kubeconfig"
        self.kubeconfig.write_text(json.dumps(_kubeconfig(self._server.server_address[1])))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the proxy."""
        self.open.set()
        for event in self._lag.values():
            event.set()
        self._server.shutdown()
        self._server.server_close()
        self.cut_watches()

    def begin(self, faults: Mapping[int, Fault] | None = None) -> None:
        """Count from 1 again, with these faults."""
        with self._lock:
            self._faults = dict(faults or {})
            self._number = 0
            self.writes = []

    def watching(self, part: str) -> int:
        """How many watches there are whose path contains ``part``."""
        with self._lock:
            return sum(part in path for path in self._watches.values())

    def cut_watches(self, part: str = "") -> int:
        """Cut all watches whose path contains ``part``, in the middle of their output."""
        with self._lock:
            found = [one for one, path in self._watches.items() if part in path]
            self.cuts += len(found)
        for one in found:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        return len(found)

    @contextmanager
    def behind(self, *parts: str) -> Iterator[None]:
        """Delay watches of these kinds meanwhile; their events are delivered afterwards."""
        self._lag = {part: threading.Event() for part in parts}
        try:
            yield
        finally:
            lag, self._lag = self._lag, {}
            for event in lag.values():
                event.set()

    # Connections

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True
            upstream: http.client.HTTPSConnection | None = None

            def log_message(self, *_: object) -> None:
                pass

            def do(self) -> None:
                try:
                    proxy._pass(self)
                except (OSError, http.client.HTTPException):
                    self.close_connection = True  # either side is gone

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do  # noqa: N815

            def finish(self) -> None:
                if self.upstream is not None:
                    self.upstream.close()
                with suppress(OSError):
                    super().finish()

        return Handler

    def _pass(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        self.open.wait()
        if handler.command not in _WRITES:
            self._relay(handler, self._forward(handler, body))
            return
        write, fault = self._note(handler, body)
        if fault.before is not None:
            fault.before(write)
        if fault.answer is not None:
            _say(handler, fault.answer)
            return
        if fault.late is not None:
            handler.close_connection = True
            threading.Timer(fault.late, self._forward_late, (handler, body, write)).start()
            return
        answer = self._forward(handler, body) if fault.forward else None
        data = b""
        if answer is not None:
            data = answer.read()
            write.status = answer.status
        if fault.after is not None:
            fault.after(write)
        if fault.cut or answer is None:
            handler.close_connection = True
            return
        _answer(handler, answer, data)

    def _note(self, handler: BaseHTTPRequestHandler, body: bytes) -> tuple[Write, Fault]:
        # Kubernetes components use their own encoding.
        known = body and "json" in handler.headers.get("Content-Type", "")
        write = Write(0, handler.command, handler.path, json.loads(body) if known else {})
        with self._lock:
            if "/leases" not in write.path:
                self._number += 1
                self.all_writes += 1
                write.number = self._number
                self.writes.append(write)
            fault = self._faults.pop(write.number, None) or self.choose(write)
            self.met += fault is not None
        return write, fault or Fault()

    def _forward(self, handler: BaseHTTPRequestHandler, body: bytes) -> http.client.HTTPResponse:
        upstream = getattr(handler, "upstream", None)
        fresh = upstream is None
        if upstream is None:
            upstream = self._connect()
            handler.upstream = upstream  # type: ignore[attr-defined]
        try:
            upstream.request(handler.command, handler.path, body or None, self._headers(handler))
            return upstream.getresponse()
        except (OSError, http.client.HTTPException):
            upstream.close()
            handler.upstream = None  # type: ignore[attr-defined]
            if fresh or handler.command in _WRITES:
                raise
            return self._forward(handler, body)  # the server had closed an idle connection

    def _forward_late(self, handler: BaseHTTPRequestHandler, body: bytes, write: Write) -> None:
        with suppress(OSError, http.client.HTTPException), closing(self._connect()) as upstream:
            upstream.request(write.method, write.path, body, self._headers(handler))
            write.status = upstream.getresponse().status

    def _headers(self, handler: BaseHTTPRequestHandler) -> dict[str, str]:
        headers = {k: v for k, v in handler.headers.items() if k.lower() not in _OWN}
        return headers | {"Authorization": f"Bearer {self._plane.token}"}

    def _connect(self) -> http.client.HTTPSConnection:
        address = urlsplit(self._plane.server)
        return http.client.HTTPSConnection(
            str(address.hostname), address.port, context=self._tls, timeout=600
        )

    def _relay(self, handler: BaseHTTPRequestHandler, answer: http.client.HTTPResponse) -> None:
        if answer.getheader("Transfer-Encoding") != "chunked" or "watch=" not in handler.path:
            _answer(handler, answer, answer.read())
            return
        _head(handler, answer)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        with self._lock:
            self._watches[handler.connection] = handler.path
        try:
            while True:
                data = answer.read1(1 << 16)
                self.open.wait()
                for part, event in self._lag.items():
                    if part in handler.path:
                        event.wait()
                handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                handler.wfile.flush()
                if not data:
                    return
        finally:
            with self._lock:
                del self._watches[handler.connection]
            # Unread data from upstream must not reach the next request.
            answer.close()
            handler.upstream.close()  # type: ignore[attr-defined]
            handler.upstream = None  # type: ignore[attr-defined]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors: tests end connections in every way."""


def _head(handler: BaseHTTPRequestHandler, answer: http.client.HTTPResponse) -> None:
    handler.send_response_only(answer.status, answer.reason)
    for name, value in answer.getheaders():
        if name.lower() not in _OWN:
            handler.send_header(name, value)


def _answer(handler: BaseHTTPRequestHandler, answer: http.client.HTTPResponse, data: bytes) -> None:
    _head(handler, answer)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)
    handler.wfile.flush()


def _say(handler: BaseHTTPRequestHandler, status: int) -> None:
    """A made-up answer in the API server's format."""
    reasons = {409: "Conflict", 429: "TooManyRequests", 500: "InternalError"}
    said = {"kind": "Status", "code": status, "reason": reasons[status], "message": "a fault"}
    data = json.dumps(said).encode()
    handler.send_response_only(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)
    handler.wfile.flush()


def _kubeconfig(port: int) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "road", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "anonymous", "user": {}}],
        "contexts": [{"name": "road", "context": {"cluster": "road", "user": "anonymous"}}],
        "current-context": "road",
    }
