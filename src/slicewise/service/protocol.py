"""The server's side of a connection: one request at a time, with limits on what a client may do."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast
from urllib.parse import unquote

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from slicewise.control.answers import RefusedError
from slicewise.service.auth import PEER
from slicewise.service.connections import Connections
from slicewise.service.framing import Body, Head, read_head, refused
from slicewise.service.logs import logger
from slicewise.service.one_piece import OnePiece

log = logger("slicewise.http")

REQUEST_SECONDS = 30.0
"""How long a client may take to send all of its request."""
UNREAD_SECONDS = 30.0
"""How long a client may leave what was sent to it unread, while there is more."""
LEAST_READ = 1 << 14
"""Bytes a client must have read in that time to be only slow."""
LINGER_SECONDS = 1.0
"""How long a client may take to read a refusal and close, before the connection is closed."""
DRAIN_BYTES = 1 << 20
"""How much of a body is read over once its request has been answered."""
LOG_SECONDS = 1.0
"""Refusals are logged no more often than this."""

_MOST_BYTES = 1 << 60
"""More than any answer that says how long it is."""

_REFUSAL = (
    b"HTTP/1.1 %d %b\r\nconnection: close\r\ncontent-type: application/problem+json\r\n"
    b"content-length: %d\r\n\r\n"
)
_PHRASES = {400: b"Bad Request", 431: b"Request Header Fields Too Large"}


class GuardedProtocol(HttpToolsProtocol):
    """HTTP/1.1 that reads the next request when the last one is answered.

    The framing of requests is ours; connections, answers and the end of the server are uvicorn's.
    A request that arrives in one piece, as nearly all do, is read without a copy of its head.
    """

    head_bytes: int
    on_malformed: Callable[[], None]
    crowd: Connections
    """All connections."""
    refusals = 0
    """Refusals since the last one that was logged, by all connections."""
    logged = float("-inf")
    _rest = b""
    """The beginning of a head, or requests behind the one that is being answered."""
    _seen = 0
    """Bytes of that which were read as a head, and are not all of it."""
    _body: Body | None = None
    """What is still to come of a request."""
    _drained = 0
    """Bytes of it that came after the request was answered."""
    _closes = False
    """Whether the connection ends with this request."""
    _deaf = False
    """Whether nothing further on this connection is read."""
    _timer: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _left = 0
    """Bytes that were unread at the last look."""
    _peer: str | None = None
    """The name in the client's certificate, where it showed one that is trusted."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin; a client that sends nothing at all is not waited for either."""
        super().connection_made(transport)
        self._answers = OnePiece(transport)
        self.transport = cast("asyncio.Transport", self._answers)  # all of it that is used
        self._peer = common_name(transport.get_extra_info("peercert"))
        self._timer = self.loop.call_later(REQUEST_SECONDS, self._too_slow)
        self.crowd.enter(self, self.client[0] if self.client else "")

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self.crowd.leave(self, self.client[0] if self.client else "")
        self._deaf = True
        self._stop_timer()
        self._stop_waiting()
        super().connection_lost(exc)

    @property
    def idle(self) -> bool:
        """Whether no request is being answered; one that has only begun to arrive is not."""
        return self.cycle is None or self.cycle.response_complete

    def cut(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read what came, as far as it is the turn of that."""
        if self._deaf:
            return
        self._unset_keepalive_if_required()
        try:
            self._read(data)
        except RefusedError as error:
            self._refuse(error)

    def _read(self, data: bytes) -> None:
        seen, self._seen = self._seen, 0
        if self._rest:
            data = self._rest + data
            self._rest = b""
        while data and not self._deaf:
            if self._body is not None:
                data = self._read_body(self._body, data)
            elif self.cycle is not None and not self.cycle.response_complete:
                self._rest = data
                if len(data) > self.head_bytes:
                    self.flow.pause_reading()
                self._stop_timer()
                return
            else:
                head = read_head(data, self.head_bytes, seen)
                if head is None:
                    self._rest = data
                    self._seen = len(data)
                    break
                seen = 0
                self._begin(head)
                data = data[head.size :]
        # A client may take its time between requests, but not within one.
        if self._body is None and not self._rest:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(REQUEST_SECONDS, self._too_slow)

    def _begin(self, head: Head) -> None:
        """A head is complete: the application may begin."""
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
            self.scope[PEER] = self._peer  # type: ignore[literal-required]  # ASGI lets us
        ordinary = head.version == "1.1" and not head.expects
        self.cycle = cycle = (RequestResponseCycle if ordinary else _CarefulCycle)(
            scope=self.scope,
            transport=self.transport,
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

    def _read_body(self, body: Body, data: bytes) -> bytes:
        """Take some of the body, and return what is behind it."""
        cycle = self.cycle
        content, behind = body.take(data)
        if cycle.response_complete:
            self._drained += len(data)
            if self._drained > DRAIN_BYTES:
                raise refused("the rest of the body is too long to be skipped")
        if body.complete:
            self._body = None
            self._deaf = self._closes
        if cycle.response_complete:
            return behind
        cycle.body += content
        cycle.more_body = not body.complete
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()
        return behind

    def on_response_complete(self) -> None:
        """All of the answer has been sent; an answer without a body is its head."""
        self._answers.flush()
        super().on_response_complete()
        if self._rest and not self.transport.is_closing():
            self.data_received(b"")

    def _refuse(self, refusal: RefusedError) -> None:
        """Answer what cannot be read, unless it has been answered, and end the connection."""
        cycle = self.cycle
        status, body = refusal.answer()
        answer = _REFUSAL % (status, _PHRASES[status], len(body))
        if self._body is None:
            self.transport.write(answer + body)
        elif not cycle.response_complete:
            if not cycle.response_started:
                head_only = self.scope["method"] == "HEAD"
                self.transport.write(answer if head_only else answer + body)
            # The application is told that the client has left, and can send nothing more.
            cycle.disconnected = True
            cycle.waiting_for_100_continue = False
            cycle.message_event.set()
        self._log(refusal)
        self._end()

    def _end(self) -> None:
        """End the connection, and let the client read what was sent: it may still be sending.

        To close at once with bytes of the client unread would reset the connection, and its system
        would throw away the answer.
        """
        self._deaf = True
        self._body = None
        self._rest = b""
        self._stop_timer()
        if not self._answers.can_write_eof():  # TLS
            self.transport.close()
            return
        self._answers.flush()
        self._answers.write_eof()
        self.flow.resume_reading()
        self._timer = self.loop.call_later(LINGER_SECONDS, self._too_slow)

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
        """The client does not read as fast as there is something to send."""
        super().pause_writing()
        self._wait_for_reading()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._stop_waiting()
        super().resume_writing()

    def _wait_for_reading(self) -> None:
        self._left = self._answers.get_write_buffer_size()
        self._unread = self.loop.call_later(UNREAD_SECONDS, self._is_read)

    def _is_read(self) -> None:
        """A client that is only slow may go on; one that does not read at all is cut off."""
        if self._answers.get_write_buffer_size() > self._left - LEAST_READ:
            self.transport.abort()
        else:
            self._wait_for_reading()

    def _stop_waiting(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _too_slow(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _CarefulCycle(RequestResponseCycle):
    """The answer to a client of HTTP/1.0, or to one that waits before it sends the body."""

    async def send(self, message: Any) -> None:
        """Send a part of the answer."""
        if message["type"] == "http.response.start":
            if self.waiting_for_100_continue and self.more_body:
                # Whether the client sends the body after this is up to it: what comes next on the
                # connection could be either.
                self.keep_alive = False
            if self.scope["http_version"] == "1.0" and not _has_length(message["headers"]):
                # HTTP/1.0 knows no chunks: the end of the connection is that of the answer.
                self.chunked_encoding = False
                self.expected_content_length = sys.maxsize
        elif self.expected_content_length > _MOST_BYTES and not message.get("more_body"):
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


def _has_length(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(name.lower() == b"content-length" for name, _ in headers)


def common_name(certificate: Mapping[str, Any] | None) -> str | None:
    """The common name in a certificate, as Python's ssl module tells it."""
    for part in (certificate or {}).get("subject", ()):
        for key, value in part:
            if key == "commonName":
                return str(value)
    return None


def guarded(head_bytes: int, on_malformed: Callable[[], None], crowd: Connections) -> type[Any]:
    """The protocol with these limits, which tells when it refuses what it cannot read."""
    own = {"head_bytes": head_bytes, "on_malformed": staticmethod(on_malformed), "crowd": crowd}
    return type("GuardedProtocol", (GuardedProtocol,), own)
