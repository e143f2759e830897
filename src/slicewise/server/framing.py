"""HTTP/1.1 framing (RFC 9112): where a request begins and ends in the bytes of a connection.

A proxy sends the requests of many clients over one connection. If the proxy and the service
disagree about the end of a request, a client receives the response of another one. A head is
therefore parsed only when it is complete, and everything that another parser might read
differently is refused. Connections never switch protocols: Upgrade headers are ignored.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn, Protocol

from slicewise.control.answers import RefusedError

MAX_HEADERS = 128
MAX_DIGITS = 15
"""Digits of a Content-Length."""
MAX_CHUNK_LINE = 256
"""Length of the line before a chunk, including extensions."""

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"
_TEXT = rb"[\t -~\x80-\xff]*+"
_START = rb"([A-Z][A-Z-]{0,31}+) ([!-\"$-~]++) HTTP/1\.([01])\r\n"
_FIELD = rb"%b:%b\r\n" % (_TOKEN, _TEXT)
_SIZE = rb"([0-9A-Fa-f]{1,12}+)(?:;%b)?" % _TEXT

_END = b"\r\n\r\n"
_HEAD = re.compile(rb"%b((?:%b)*+)\r\n" % (_START, _FIELD))
_START_LINE = re.compile(_START)
_FIELD_LINE = re.compile(_FIELD)
_NEVER = re.compile(rb"[^\t\r\n -~\x80-\xff]|(?<!\r)\n|\r[^\n]")
"""Bytes that no head contains."""
_HOST = re.compile(rb"(?:[0-9A-Za-z._~%-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{0,5})?")
_ABSOLUTE = re.compile(rb"https?://([^/?]+)(.*)", re.IGNORECASE)
_CHUNK = re.compile(rb"%b\r\n" % _SIZE)
_CHUNK_CUT = re.compile(rb"%b\r?" % _SIZE)
_TRAILERS = re.compile(rb"(?:%b)*+\r\n" % _FIELD)
_TRAILERS_CUT = re.compile(rb"(?:%b)*+(?:\r|%b(?::%b\r?)?)?" % (_FIELD, _TOKEN, _TEXT))

_ONCE = frozenset(
    (
        b"authorization",
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"expect",
        b"host",
        b"idempotency-key",
        b"last-event-id",
        b"transfer-encoding",
    )
)
"""Headers that must not be repeated: parsers differ in which value they use."""


class RequestBody(Protocol):
    """The body of a request, as it arrives."""

    complete: bool

    def take(self, data: bytes) -> tuple[bytes, bytes]:
        """Split data into content and the data after the request."""


class SizedBody:
    """A body with a Content-Length."""

    __slots__ = ("_left", "complete")

    def __init__(self, length: int) -> None:
        self._left = length
        self.complete = False

    def take(self, data: bytes) -> tuple[bytes, bytes]:
        """Take at most the declared length."""
        left = self._left
        self._left -= len(data)
        self.complete = self._left <= 0
        return (data, b"") if self._left >= 0 else (data[:left], data[left:])


class ChunkedBody:
    """A chunked body. Chunk extensions and trailers are discarded.

    Everything that is not content may exceed the content by ``limit`` bytes: a megabyte in chunks
    of one byte would be expensive to parse.
    """

    __slots__ = ("_ending", "_left", "_limit", "_overhead", "_rest", "_trailing", "complete")

    def __init__(self, limit: int) -> None:
        self._limit = self._overhead = limit
        """Bytes other than content that may still arrive."""
        self._rest = b""
        """An incomplete line."""
        self._left = 0
        """Remaining bytes of this chunk."""
        self._ending = False
        """Whether the line end after the content of a chunk is next."""
        self._trailing = False
        self.complete = False

    def take(self, data: bytes) -> tuple[bytes, bytes]:
        """Take the content of complete and incomplete chunks."""
        data = self._rest + data
        self._rest = b""
        content: list[bytes] = []
        at, end = 0, len(data)
        while at < end:
            if self._left:
                piece = data[at : at + self._left]
                content.append(piece)
                at += len(piece)
                self._left -= len(piece)
                self._ending = not self._left
                continue
            after = (
                self._trailers(data, at)
                if self._trailing
                else self._line_end(data, at)
                if self._ending
                else self._chunk(data, at)
            )
            if after is None:
                self._rest = data[at:]
                break
            at = after
            if self.complete:
                return b"".join(content), data[at:]
        return b"".join(content), b""

    # Each of these returns the position of the next part, or None if this one is incomplete.

    def _chunk(self, data: bytes, at: int) -> int | None:
        line = _CHUNK.match(data, at, at + MAX_CHUNK_LINE)
        if line is None:
            if len(data) - at < MAX_CHUNK_LINE and _CHUNK_CUT.fullmatch(data, at):
                return None
            raise refused("a chunk of the body must begin with a line that contains its size")
        self._left = int(line[1], 16)
        self._trailing = not self._left
        self._count_overhead(line.end() - at - self._left)
        return line.end()

    def _line_end(self, data: bytes, at: int) -> int | None:
        found = data[at : at + 2]
        if found == b"\r":
            return None
        if found != b"\r\n":
            raise refused("a chunk of the body is longer than its size")
        self._ending = False
        return at + 2

    def _trailers(self, data: bytes, at: int) -> int | None:
        trailers = _TRAILERS.match(data, at)
        if trailers is None:
            if len(data) - at <= self._overhead and _TRAILERS_CUT.fullmatch(data, at):
                return None
            raise refused("the trailers after the last chunk of the body are malformed or too long")
        self._count_overhead(trailers.end() - at)
        self.complete = True
        return trailers.end()

    def _count_overhead(self, count: int) -> None:
        self._overhead = min(self._limit, self._overhead - count)
        if self._overhead < 0:
            raise refused("the chunks of the body are too small, or their extensions too long")


@dataclass(slots=True)
class RequestHead:
    """The head of a request."""

    size: int
    method: str
    path: bytes
    query: bytes
    version: str
    headers: list[tuple[bytes, bytes]]
    body: RequestBody | None
    last: bool
    """Whether the connection closes after this request."""
    expects: bool
    """Whether the client waits for 100 Continue before it sends the body."""


def refused(detail: str, status: int = 400) -> RefusedError:
    """A refusal that ends the connection: the data after it cannot be parsed."""
    return RefusedError(status, detail)


def read_head(data: bytes, limit: int, seen: int = 0) -> RequestHead | None:
    """Parse the head at the beginning of the data; return None if it is incomplete.

    The first ``seen`` bytes are known not to contain the end of the head.
    """
    if seen and data.find(_END, max(0, seen - 3)) < 0:
        _check_cut(data, limit, seen)
        return None
    match = _HEAD.match(data, _begin(data))
    if match is None:
        _explain(data, limit)
        return None
    method, target, minor, lines = match.groups()
    if match.end() > limit or lines.count(b"\r\n") > MAX_HEADERS:
        raise _too_long(limit)
    headers = []
    for line in lines.split(b"\r\n")[:-1]:
        name, _, value = line.partition(b":")
        headers.append((name.lower(), value.strip()))
    fields = dict(headers)
    if len(fields) != len(headers):
        _check_repeated(headers, fields)
    host = fields.get(b"host")
    if host is None:
        if minor == b"1":
            raise refused("the request has no Host header, which HTTP/1.1 requires")
    elif not _HOST.fullmatch(host):
        raise refused("the Host header must be the name or address of one host")
    if not target.startswith(b"/"):
        target = _path_in(target, method, host)
    elif method == b"CONNECT":
        raise refused("CONNECT is for proxies, and this service is none")
    path, _, query = target.partition(b"?")
    connection, expect = fields.get(b"connection"), fields.get(b"expect")
    return RequestHead(
        match.end(),
        method.decode("ascii"),
        path,
        query,
        "1.1" if minor == b"1" else "1.0",
        headers,
        _body(fields, minor, limit),
        minor == b"0" or (connection is not None and _closes(connection.lower())),
        minor == b"1" and expect is not None and expect.lower() == b"100-continue",
    )


def _body(fields: dict[bytes, bytes], minor: bytes, limit: int) -> RequestBody | None:
    coding = fields.get(b"transfer-encoding")
    length = fields.get(b"content-length")
    if coding is not None:
        if length is not None:
            raise refused("the request has both Content-Length and Transfer-Encoding")
        if coding.lower() != b"chunked" or minor == b"0":
            raise refused("the only supported Transfer-Encoding is chunked, with HTTP/1.1")
        return ChunkedBody(limit)
    if length is None:
        return None
    if not length.isdigit() or len(length) > MAX_DIGITS:
        raise refused(f"Content-Length must be a whole number of at most {MAX_DIGITS} digits")
    size = int(length)
    return SizedBody(size) if size else None


def _path_in(target: bytes, method: bytes, host: bytes | None) -> bytes:
    """The path of a request target in absolute form, or ``*`` for OPTIONS."""
    if target == b"*" and method == b"OPTIONS":
        return target
    url = _ABSOLUTE.fullmatch(target)
    if url is None or method == b"CONNECT":
        raise refused("the request target must be a path or a URL of this service")
    authority, path = url.groups()
    if host is None or authority.lower() != host.lower():
        raise refused("the request target and the Host header name different hosts")
    return path if path.startswith(b"/") else b"/" + path


def _check_repeated(headers: list[tuple[bytes, bytes]], fields: dict[bytes, bytes]) -> None:
    """Refuse repeated headers that must be unique; join the values of Connection."""
    seen: set[bytes] = set()
    for name, _ in headers:
        if name in seen and name in _ONCE:
            raise refused(f"the request has more than one {name.decode('ascii').title()} header")
        seen.add(name)
    if b"connection" in seen:
        fields[b"connection"] = b",".join(v for n, v in headers if n == b"connection")


def _closes(connection: bytes) -> bool:
    return b"close" in connection and b"close" in [o.strip() for o in connection.split(b",")]


def _begin(data: bytes) -> int:
    """The start of the head. One empty line before it is allowed (RFC 9112, section 2.2)."""
    return 2 if data.startswith(b"\r\n") else 0


def _check_cut(data: bytes, limit: int, seen: int = 0) -> None:
    """Refuse an incomplete head that cannot become valid."""
    if len(data) > limit:
        raise _too_long(limit)
    begin = _begin(data)
    first = data[begin : begin + 1]
    if (
        _NEVER.search(data, max(0, seen - 1))
        or not (first.isupper() or b"\r\n".startswith(data))
        or (data.find(b"\r\n", begin) >= 0 and not _START_LINE.match(data, begin))
    ):
        _explain_all(data)


def _explain(data: bytes, limit: int) -> None:
    """Refuse an invalid head with the reason; return if it is only incomplete."""
    end = data.find(_END, _begin(data))
    if end < 0:
        _check_cut(data, limit)
    elif end > limit:
        raise _too_long(limit)
    else:
        _explain_all(data)


def _explain_all(data: bytes) -> NoReturn:
    start = _START_LINE.match(data, _begin(data))
    if start is None:
        raise refused("the first line of a request must be METHOD TARGET HTTP/1.1")
    at, number = start.end(), 1
    while (line := _FIELD_LINE.match(data, at)) is not None:
        at, number = line.end(), number + 1
    raise refused(
        f"header line {number} is malformed: a header is one line that ends with CR LF and "
        "consists of a name, a colon directly after it, and printable text"
    )


def _too_long(limit: int) -> RefusedError:
    return refused(
        f"the URL and headers of the request exceed {limit:,} bytes or {MAX_HEADERS} headers",
        431,
    )
