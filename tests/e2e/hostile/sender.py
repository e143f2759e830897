"""Builds requests for the service, byte by byte."""

from __future__ import annotations

from collections.abc import Callable

from tests.e2e.hostile.raw import Raw
from tests.e2e.server import Server

WISH = b'{"profile":"1g.10gb"}'
HIDDEN = b"GET /v1/whoami HTTP/1.1\r\nhost: x\r\nx-request-id: hidden\r\n\r\n"
"""A request to hide in the body of another one."""
CHUNKED = b"Transfer-Encoding: chunked\r\n"
OFFERS = {
    "websocket": b"Connection: Upgrade\r\nUpgrade: websocket\r\n",
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n",
    "first": b"UPGRADE: websocket\r\nCONNECTION: UPGRADE\r\n",
    "listed": b"Connection: keep-alive, Upgrade\r\nUpgrade: h2c, websocket\r\n",
    "repeated": b"Connection: keep-alive\r\nConnection: upgrade\r\nUpgrade: websocket\r\n",
    "spaced": b"Connection:  \t upgrade \t\r\nUpgrade:\twebsocket \r\n",
    "unknown": b"Connection: upgrade\r\nUpgrade: x\r\n",
}


class Sender:
    """Builds requests with a valid token."""

    def __init__(self, server: Server) -> None:
        self.bearer = f"Authorization: Bearer {server.admin_token}\r\n".encode()
        self._sent = 0

    def id(self) -> str:
        """Return a new request id."""
        self._sent += 1
        return f"r{self._sent}"

    def get(self, id: str, path: str = "/v1/whoami", more: bytes = b"") -> bytes:
        """Build a GET request."""
        start = f"GET {path} HTTP/1.1\r\nHost: x\r\nX-Request-Id: {id}\r\n".encode()
        return start + self.bearer + more + b"\r\n"

    def post(
        self,
        id: str,
        body: bytes = WISH,
        more: bytes = b"",
        *,
        path: str = "/v1/allocations/dry-run",
        length: bytes | None = b"%d",
    ) -> bytes:
        """Build a POST request, with its true length, another one, or none."""
        start = f"POST {path} HTTP/1.1\r\nHost: x\r\nX-Request-Id: {id}\r\n".encode()
        start += self.bearer + b"Content-Type: application/json\r\n" + more
        if length is not None:
            start += b"Content-Length: " + length.replace(b"%d", b"%d" % len(body)) + b"\r\n"
        return start + b"\r\n" + body


class Victim:
    """Another client, with a persistent connection."""

    def __init__(self, sender: Sender, connect: Callable[[], Raw]) -> None:
        self._sender = sender
        self._connect = connect
        self._raw: Raw | None = None

    def __enter__(self) -> Victim:
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._raw is not None:
            self._raw.close()
            self._raw = None

    def ask(self, id: str, path: str = "/v1/whoami") -> None:
        """Send a request and check that the response is its own."""
        raw = self._raw = self._raw or self._connect()
        get = path != "/v1/allocations/dry-run"
        raw.send(self._sender.get(id, path) if get else self._sender.post(id))
        answer = raw.answer()
        assert answer is not None
        assert (answer.status, answer.id) == (200, id), answer
        if answer.closes:  # a proxy limits the requests per connection
            self._leave()
