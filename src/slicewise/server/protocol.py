"""The HTTP/1.1 protocol of a connection: one request at a time, with time and size limits."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import unquote

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from slicewise.config.logs import logger
from slicewise.control.answers import RefusedError
from slicewise.server.auth import PEER
from slicewise.server.certificates import Certificate, read_certificate
from slicewise.server.framing import RequestBody, RequestHead, read_head, refused
from slicewise.server.limits import Connections

log = logger("slicewise.http")

REQUEST_SECONDS = 30.0
"""Time in which a client must have sent its whole request."""
UNREAD_SECONDS = 30.0
"""Time in which a client must read MIN_READ bytes of a pending response."""
MIN_READ = 1 << 14
LINGER_SECONDS = 1.0
"""Time for a client to read a refusal before its connection is closed."""
DRAIN_BYTES = 1 << 20
"""Bytes of a body that are discarded after its request was answered."""
LOG_SECONDS = 1.0
"""Minimum time between two log lines about refused requests."""

_UNKNOWN_LENGTH = 1 << 60
"""Larger than any Content-Length."""

_REFUSAL = (
    b"HTTP/1.1 %d %b\r\nconnection: close\r\ncontent-type: application/problem+json\r\n"
    b"content-length: %d\r\n\r\n"
)
_PHRASES = {400: b"Bad Request", 431: b"Request Header Fields Too Large"}


class GuardedProtocol(HttpToolsProtocol):
    """HTTP/1.1 without pipelining: the next request is parsed after the last response.

    Framing is done by `framing.py`; connections, responses and shutdown are uvicorn's.
    """

    head_bytes: int
    on_malformed: Callable[[], None]
    open_connections: Connections
    refusals = 0
    """Refusals on all connections since the last log line."""
    logged = float("-inf")
    _buffer = b""
    """An incomplete head, or data that follows the request being answered."""
    _seen = 0
    """Bytes of the buffer that have been searched for the end of the head."""
    _body: RequestBody | None = None
    """The body being received."""
    _drained = 0
    """Bytes of the body received after the response."""
    _closes = False
    """Whether the connection closes after this request."""
    _deaf = False
    """Whether further data is ignored."""
    _timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None
    _unread = 0
    """Size of the write buffer when the timer was started."""
    _writer: _Writer
    """Writes responses."""
    _peer: Certificate | None = None
    """A trusted client certificate."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register the connection and start the timeout of the first request."""
        super().connection_made(transport)
        # Any unread byte starts the timer: below the usual mark, a connection would stay forever.
        transport.set_write_buffer_limits(high=1, low=0)
        self._writer = _Writer(transport)
        self._peer = read_certificate(transport.get_extra_info("peercert"))
        self._timer = self.loop.call_later(REQUEST_SECONDS, self._timed_out)
        self.open_connections.add(self, self.client[0] if self.client else "")

    def connection_lost(self, exc: Exception | None) -> None:
        """Clean up after the connection was closed."""
        self.open_connections.remove(self, self.client[0] if self.client else "")
        self._deaf = True
        self._stop_timer()
        self._stop_unread_timer()
        super().connection_lost(exc)

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def abort(self) -> None:
        """Close the connection immediately."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse received data."""
        if self._deaf:
            return
        self._unset_keepalive_if_required()
        try:
            self._read(data)
        except RefusedError as error:
            self._refuse(error)

    def _read(self, data: bytes) -> None:
        seen, self._seen = self._seen, 0
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        while data and not self._deaf:
            if self._body is not None:
                data = self._read_body(self._body, data)
            elif self.cycle is not None and not self.cycle.response_complete:
                self._buffer = data
                if len(data) > self.head_bytes:
                    self.flow.pause_reading()
                self._stop_timer()
                return
            else:
                head = read_head(data, self.head_bytes, seen)
                if head is None:
                    self._buffer = data
                    self._seen = len(data)
                    break
                seen = 0
                self._begin(head)
                data = data[head.size :]
        # The timeout applies within a request, not between requests.
        if self._body is None and not self._buffer:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(REQUEST_SECONDS, self._timed_out)

    def _begin(self, head: RequestHead) -> None:
        """Start the application on a request whose head is complete."""
        path = head.path.decode("ascii")
        self.scope = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": head.version,
            "method": head.method,
            "scheme": self.scheme or "http",
            "server": self.server,
            "client": self.client,
            "root_path": "",
            "path": unquote(path) if "%" in path else path,
            "raw_path": head.path,
            "query_string": head.query,
            "headers": head.headers,
        }
        if self._peer is not None:
            self.scope[PEER] = self._peer  # type: ignore[literal-required]  # our own key
        ordinary = head.version == "1.1" and not head.expects
        self.cycle = cycle = (_Cycle if ordinary else _CarefulCycle)(
            scope=self.scope,
            transport=self._writer,  # type: ignore[arg-type]  # the part of a transport it uses
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=head.expects,
            keep_alive=not head.last,
            on_response=self.on_response_complete,
        )
        self._body = head.body
        self._closes = head.last
        self._drained = 0
        if head.body is None:
            cycle.more_body = False
            cycle.message_event.set()
            self._deaf = head.last
        task = self.loop.create_task(cycle.run_asgi(self.app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def _read_body(self, body: RequestBody, data: bytes) -> bytes:
        """Pass body data to the application; return the data after the body."""
        cycle = self.cycle
        content, rest = body.take(data)
        if cycle.response_complete:
            self._drained += len(data)
            if self._drained > DRAIN_BYTES:
                raise refused("the rest of the body is too long to be discarded")
        if body.complete:
            self._body = None
            self._deaf = self._closes
        if cycle.response_complete:
            return rest
        cycle.body += content
        cycle.more_body = not body.complete
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()
        return rest

    def on_response_complete(self) -> None:
        """Parse buffered data after a response."""
        self._writer.flush()  # a response to HEAD has no body
        super().on_response_complete()
        if self._buffer and not self.transport.is_closing():
            self.data_received(b"")

    def _refuse(self, refusal: RefusedError) -> None:
        """Answer a malformed request, unless a response has started, and close the connection."""
        cycle = self.cycle
        status, body = refusal.answer()
        answer = _REFUSAL % (status, _PHRASES[status], len(body))
        if self._body is None:
            self.transport.write(answer + body)
        elif not cycle.response_complete:
            if not cycle.response_started:
                head_only = self.scope["method"] == "HEAD"
                self.transport.write(answer if head_only else answer + body)
            # The application sees a disconnected client and cannot send anything more.
            cycle.disconnected = True
            cycle.waiting_for_100_continue = False
            cycle.message_event.set()
        self._log(refusal)
        self._end()

    def _end(self) -> None:
        """Close the connection after the client had time to read the response.

        Closing with unread received data resets the connection, and the client's system would
        discard the response.
        """
        self._deaf = True
        self._body = None
        self._buffer = b""
        self._stop_timer()
        if not self.transport.can_write_eof():  # TLS
            self.transport.close()
            return
        self.transport.write_eof()
        self.flow.resume_reading()
        self._timer = self.loop.call_later(LINGER_SECONDS, self._timed_out)

    def _log(self, refusal: RefusedError) -> None:
        kind = type(self)
        kind.on_malformed()
        kind.refusals += 1
        if self.loop.time() < kind.logged + LOG_SECONDS:
            return
        log.warning(
            "malformed requests refused",
            last=str(refusal),
            client=self.client[0] if self.client else None,
            count=kind.refusals,
        )
        kind.refusals = 0
        kind.logged = self.loop.time()

    def pause_writing(self) -> None:
        """Start a timeout when the client reads more slowly than the service writes."""
        super().pause_writing()
        self._start_unread_timer()

    def resume_writing(self) -> None:
        """Stop the timeout when the client has caught up."""
        self._stop_unread_timer()
        super().resume_writing()

    def _start_unread_timer(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        self._unread_timer = self.loop.call_later(UNREAD_SECONDS, self._check_unread)

    def _check_unread(self) -> None:
        """Abort the connection of a client that has not read MIN_READ bytes in time."""
        if self.transport.get_write_buffer_size() > self._unread - MIN_READ:
            self.transport.abort()
        else:
            self._start_unread_timer()

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _timed_out(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Writer:
    """Writes to a transport, and can join two writes: each is a system call and a packet."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._holds_next = False
        self._held = b""
        self.is_closing = transport.is_closing

    def hold_next(self) -> None:
        """Hold back the next write, and join it with the one after it."""
        self._holds_next = True

    def write(self, data: bytes) -> None:
        """Write data, after data that was held back."""
        if self._holds_next:
            self._holds_next, self._held = False, data
            return
        if self._held:
            data, self._held = self._held + data, b""
        self._transport.write(data)

    def flush(self) -> None:
        """Write data that was held back."""
        if self._held:
            self.write(b"")

    def close(self) -> None:
        """Close the transport after everything was written."""
        self.flush()
        self._transport.close()


class _Cycle(RequestResponseCycle):
    """A response. A head with a Content-Length is written together with the body."""

    async def send(self, message: Any) -> None:
        """Send a part of the response."""
        if message["type"] == "http.response.start" and _has_length(message["headers"]):
            self.transport.hold_next()  # type: ignore[attr-defined]  # it is a _Writer
        await super().send(message)


class _CarefulCycle(_Cycle):
    """The response to an HTTP/1.0 client, or to a request with Expect: 100-continue."""

    async def send(self, message: Any) -> None:
        """Send a part of the response."""
        if message["type"] == "http.response.start":
            if self.waiting_for_100_continue and self.more_body:
                # The client may or may not send the body now, so the next bytes are ambiguous.
                self.keep_alive = False
            if self.scope["http_version"] == "1.0" and not _has_length(message["headers"]):
                # HTTP/1.0 has no chunks: closing the connection ends the response.
                self.chunked_encoding = False
                self.expected_content_length = sys.maxsize
        elif self.expected_content_length > _UNKNOWN_LENGTH and not message.get("more_body"):
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


def _has_length(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(name.lower() == b"content-length" for name, _ in headers)


def guarded(
    head_bytes: int, on_malformed: Callable[[], None], connections: Connections
) -> type[Any]:
    """The protocol class with these limits; ``on_malformed`` is called for malformed requests."""
    attributes = {
        "head_bytes": head_bytes,
        "on_malformed": staticmethod(on_malformed),
        "open_connections": connections,
    }
    return type("GuardedProtocol", (GuardedProtocol,), attributes)
