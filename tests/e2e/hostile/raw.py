"""Raw socket connections: bytes are sent in chosen pieces, and responses are parsed."""

from __future__ import annotations

import contextlib
import itertools
import socket
import ssl
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import NamedTuple

from tests.e2e.server import PATIENCE_SECONDS, Address

PAUSE_SECONDS = 0.002
"""Pause between two pieces, to make them arrive separately."""


class AnswerError(Exception):
    """Raised when the received bytes are not a complete response."""


class Answer(NamedTuple):
    """An HTTP response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def id(self) -> str:
        """The id of the answered request."""
        return self.headers.get("x-request-id", "")

    @property
    def closes(self) -> bool:
        """Whether it announces the end of the connection."""
        return self.headers.get("connection") == "close"


class Raw:
    """A connection."""

    def __init__(self, address: Address, context: ssl.SSLContext | None = None) -> None:
        self._socket = socket.create_connection(address, PATIENCE_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is not None:
            self._socket = context.wrap_socket(self._socket)
        self._came = b""

    def __enter__(self) -> Raw:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def wait_no_longer_than(self, seconds: float) -> None:
        """Set a timeout for reads, which then raise TimeoutError."""
        self._socket.settimeout(seconds)

    def send(self, *pieces: bytes, pause: float = PAUSE_SECONDS) -> None:
        """Send the pieces one by one; ignore that the server has closed the connection."""
        with contextlib.suppress(ConnectionError, ssl.SSLEOFError, TimeoutError):
            for number, piece in enumerate(pieces):
                if number:
                    time.sleep(pause)
                self._socket.sendall(piece)

    def done(self) -> None:
        """Shut down the sending side."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def answer(self, method: str = "GET") -> Answer | None:
        """Return the next response; None if the server closed the connection instead."""
        while True:
            head = self._until(b"\r\n\r\n")
            if head is None:
                return None
            lines = head.decode("latin-1").split("\r\n")
            words = lines[0].split(" ")
            if len(words) < 2 or words[0] != "HTTP/1.1" or not words[1].isdigit():
                raise AnswerError(f"no answer begins like this: {head[:200]!r}")
            if words[1] != "100":
                break
        headers: dict[str, str] = {}
        for line in lines[1:-2]:
            name, _, value = line.partition(":")
            if name in headers and name in ("content-length", "transfer-encoding", "x-request-id"):
                raise AnswerError(f"{name} twice in {head!r}")
            headers[name.lower()] = value.strip()
        status = int(words[1])
        if method == "HEAD" or status in (204, 304):
            return Answer(status, headers, b"")
        if headers.get("transfer-encoding") == "chunked":
            return Answer(status, headers, self._chunks())
        if "content-length" not in headers:
            raise AnswerError(f"nothing tells how long this is: {head!r}")
        return Answer(status, headers, self._exactly(int(headers["content-length"])))

    def answers(self) -> list[Answer]:
        """Return all responses until the server closes the connection."""
        return list(iter(self.answer, None))

    def closed(self) -> bool:
        """Wait until the server closes; return whether it sent no more bytes."""
        return not self._came and not self._more()

    def read_until(self, mark: bytes) -> bytes:
        """Read up to a delimiter."""
        found = self._until(mark)
        if found is None:
            raise AnswerError(f"the server closed before {mark!r}")
        return found

    def _chunks(self) -> bytes:
        body = b""
        while True:
            line = self._until(b"\r\n")
            if line is None:
                raise AnswerError("the server closed within an answer")
            piece = self._exactly(int(line, 16) + 2)[:-2]
            if not piece:
                return body
            body += piece

    def _until(self, mark: bytes) -> bytes | None:
        while mark not in self._came:
            if not self._more():
                if self._came:
                    raise AnswerError(f"the server closed within an answer: {self._came!r}")
                return None
        found, _, self._came = self._came.partition(mark)
        return found + mark

    def _exactly(self, count: int) -> bytes:
        while len(self._came) < count:
            if not self._more():
                raise AnswerError("the server closed within an answer")
        found, self._came = self._came[:count], self._came[count:]
        return found

    def _more(self) -> bool:
        try:
            more = self._socket.recv(1 << 16)
        except (ConnectionResetError, ssl.SSLEOFError):
            more = b""
        self._came += more
        return bool(more)


def cut(data: bytes, at: Iterable[int]) -> list[bytes]:
    """Split data at these positions."""
    places = [0, *sorted(set(at)), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(places) if a < b]


def every(data: bytes, size: int) -> Sequence[bytes]:
    """Split data into pieces of this size."""
    return cut(data, range(size, len(data), size))
