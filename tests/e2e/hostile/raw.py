"""Bytes on a socket: sent in pieces as the test wants them, and the answers told apart."""

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
"""Between two pieces, so that they arrive one by one."""


class AnswerError(Exception):
    """What came back is no answer, or only a part of one."""


class Answer(NamedTuple):
    """One answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def id(self) -> str:
        """The id of the request that this answers."""
        return self.headers.get("x-request-id", "")

    @property
    def closes(self) -> bool:
        """Whether it says that the connection ends."""
        return self.headers.get("connection") == "close"


class Raw:
    """One connection."""

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
        """Leave."""
        self._socket.close()

    def wait_no_longer_than(self, seconds: float) -> None:
        """Be content with what came by then; what waits for more raises TimeoutError."""
        self._socket.settimeout(seconds)

    def send(self, *pieces: bytes, pause: float = PAUSE_SECONDS) -> None:
        """Send piece by piece; a server that has closed by then hears no more."""
        with contextlib.suppress(ConnectionError, ssl.SSLEOFError, TimeoutError):
            for number, piece in enumerate(pieces):
                if number:
                    time.sleep(pause)
                self._socket.sendall(piece)

    def done(self) -> None:
        """Say that nothing more will be sent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def answer(self, method: str = "GET") -> Answer | None:
        """The next answer; None when the server closed instead."""
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
        """Every answer until the server closes."""
        return list(iter(self.answer, None))

    def closed(self) -> bool:
        """Wait for the server to close; whether it did so without another byte."""
        return not self._came and not self._more()

    def read_until(self, mark: bytes) -> bytes:
        """Read up to a mark, whatever comes before it."""
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
    """The data in pieces that begin at these places."""
    places = [0, *sorted(set(at)), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(places) if a < b]


def every(data: bytes, size: int) -> Sequence[bytes]:
    """The data in pieces of this size."""
    return cut(data, range(size, len(data), size))
