"""The server's side of a connection, with limits for those who never come to the point."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from slicewise.service.auth import PEER
from slicewise.service.one_piece import OnePiece

REQUEST_SECONDS = 30.0
"""How long a client may take to say all of its request."""
UNREAD_SECONDS = 30.0
"""How long a client may leave what was sent to it unread, while there is more."""
LEAST_READ = 1 << 14
"""Bytes a client must have read in that time to be only slow."""

_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n"
    b"content-type: application/problem+json\r\ncontent-length: %d\r\n\r\n%b"
)
_PROBLEM = (
    b'{"type":"urn:slicewise:problem:too-large","title":"Too large","status":431,'
    b'"detail":"the URL and headers of this request are too long"}'
)


class GuardedProtocol(HttpToolsProtocol):
    """HTTP/1.1 with a limit on the head of a request and on the time it takes to arrive.

    A request that arrives in one piece, as nearly all do, costs a few comparisons more.
    """

    head_bytes = 1 << 14
    _head = 0
    """Bytes that came since a request began, at most so many of them its head."""
    _in_head = True
    _aside = 0
    """Bytes behind the head that came since the last of the body: trailers, words of a chunk."""
    _too_large = False
    _complete = False
    _timer: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _left = 0
    """Bytes that were still to be read when it was looked last."""
    _peer: str | None = None
    """The name in the client's certificate, where it showed one that is trusted."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin; whoever says nothing at all is not waited for either."""
        super().connection_made(transport)
        self._answers = OnePiece(transport)
        self.transport = cast("asyncio.Transport", self._answers)  # all of it that is used
        self._peer = common_name(transport.get_extra_info("peercert"))
        self._timer = self.loop.call_later(REQUEST_SECONDS, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._stop_timer()
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take in what came, and watch requests that are not complete by then."""
        if self._in_head:
            self._head += len(data)
        else:
            self._aside += len(data)
        self._complete = False
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_head and self._head > self.head_bytes:
            self._too_large = True
            self.send_400_response("")
        elif self._aside > self.head_bytes:
            self.transport.close()
        elif not self._complete and self._timer is None:
            self._timer = self.loop.call_later(REQUEST_SECONDS, self._too_slow)

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        if self._peer is not None:
            self.scope[PEER] = self._peer  # type: ignore[literal-required]  # ASGI lets us

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; one behind the body is a trailer, which says nothing here."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete: from here on the application counts."""
        if self._head > self.head_bytes:  # or a body came in the same piece
            head = sum(len(name) + len(value) + 4 for name, value in self.headers)
            if head + len(self.url) > self.head_bytes:
                self._too_large = True
                raise ValueError("the head of a request is too long")
        self._in_head = False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Some of the body is there."""
        self._aside = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """All of it is there."""
        self._in_head = self._complete = True
        self._head = self._aside = 0
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """All of the answer has been said, and an answer without a body is its head."""
        self._answers.flush()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what cannot be read, or what is too long to be read."""
        if not self._too_large:
            super().send_400_response(msg)
            return
        self.transport.write(_TOO_LARGE % (len(_PROBLEM), _PROBLEM))
        self.transport.close()

    def pause_writing(self) -> None:
        """The client does not read as fast as there is something to say."""
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
        """Whoever is only slow may go on; who does not read at all is cut off."""
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


def common_name(certificate: Mapping[str, Any] | None) -> str | None:
    """The common name in a certificate, as Python's ssl module tells it."""
    for part in (certificate or {}).get("subject", ()):
        for key, value in part:
            if key == "commonName":
                return str(value)
    return None


def guarded(head_bytes: int) -> type[Any]:
    """The protocol with this limit."""
    return type("GuardedProtocol", (GuardedProtocol,), {"head_bytes": head_bytes})
