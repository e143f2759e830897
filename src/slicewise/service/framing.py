"""Where a request begins and ends in the bytes of a connection: HTTP/1.1 as RFC 9112 has it.

A proxy sends the requests of many clients over one connection. Where the proxy and the service
disagree about the end of a request, one client gets the answer of another. So a head is read only
when all of it is there, however it was cut on its way, and what another reader might understand
differently is refused. A connection never changes its protocol: a request that offers an upgrade
is an ordinary request.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn, Protocol

from slicewise.control.answers import RefusedError

MAX_HEADERS = 128
MAX_DIGITS = 15
"""Of the length of a body."""
MAX_CHUNK_LINE = 256
"""The longest line in front of a chunk, with its extensions."""

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
"""What no head holds."""
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
"""Headers that must not be repeated: another reader might take the other one."""


class Body(Protocol):
    """The part of a request behind its head."""

    complete: bool

    def take(self, data: bytes) -> tuple[bytes, bytes]:
        """Split into content and what is behind the end of the request."""


class SizedBody:
    """A body whose length is in the head."""

    __slots__ = ("_left", "complete")

    def __init__(self, length: int) -> None:
        self._left = length
        self.complete = False

    def take(self, data: bytes) -> tuple[bytes, bytes]:
        """Take no more than the announced length."""
        left = self._left
        self._left -= len(data)
        self.complete = self._left <= 0
        return (data, b"") if self._left >= 0 else (data[:left], data[left:])


class ChunkedBody:
    """A body in chunks. Extensions and trailers are skipped.

    What is not content may be ``limit`` bytes longer than what is: to read a megabyte in chunks of
    a byte is a lot of work.
    """

    __slots__ = ("_aside", "_ending", "_left", "_limit", "_rest", "_trailing", "complete")

    def __init__(self, limit: int) -> None:
        self._limit = self._aside = limit
        """Bytes that are not content and may still come."""
        self._rest = b""
        """A line that is not complete."""
        self._left = 0
        """Bytes that are still to come of this chunk."""
        self._ending = False
        """Whether the end of a line is next, behind the content of a chunk."""
        self._trailing = False
        self.complete = False

    def take(self, data: bytes) -> tuple[bytes, bytes]:
        """Take the content of every chunk, or of a part of one."""
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

    # Each of these returns where the next part begins, or None when this one is not complete.

    def _chunk(self, data: bytes, at: int) -> int | None:
        line = _CHUNK.match(data, at, at + MAX_CHUNK_LINE)
        if line is None:
            if len(data) - at < MAX_CHUNK_LINE and _CHUNK_CUT.fullmatch(data, at):
                return None
            raise refused("a chunk of the body does not begin with its size in a line of its own")
        self._left = int(line[1], 16)
        self._trailing = not self._left
        self._skip(line.end() - at - self._left)
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
            if len(data) - at <= self._aside and _TRAILERS_CUT.fullmatch(data, at):
                return None
            raise refused("the lines behind the last chunk of the body are malformed or too long")
        self._skip(trailers.end() - at)
        self.complete = True
        return trailers.end()

    def _skip(self, count: int) -> None:
        self._aside = min(self._limit, self._aside - count)
        if self._aside < 0:
            raise refused("the chunks of the body are too small, or what is between them too long")


@dataclass(slots=True)
class Head:
    """The head of a request."""

    size: int
    method: str
    path: bytes
    query: bytes
    version: str
    headers: list[tuple[bytes, bytes]]
    body: Body | None
    last: bool
    """Whether the connection ends with this request."""
    expects: bool
    """Whether the client waits for a word before it sends the body."""


def refused(detail: str, status: int = 400) -> RefusedError:
    """A refusal after which nothing on this connection can be understood."""
    return RefusedError(status, detail)


def read_head(data: bytes, limit: int, seen: int = 0) -> Head | None:
    """The head at the beginning of this, or None when it is not complete.

    The first ``seen`` bytes were looked at before, and the head was not complete then.
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
            raise refused("the request has no Host header, which HTTP/1.1 asks for")
    elif not _HOST.fullmatch(host):
        raise refused("the Host header is not the name or address of one host")
    if not target.startswith(b"/"):
        target = _path_in(target, method, host)
    elif method == b"CONNECT":
        raise refused("CONNECT is for proxies, and this is none")
    path, _, query = target.partition(b"?")
    connection, expect = fields.get(b"connection"), fields.get(b"expect")
    return Head(
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


def _body(fields: dict[bytes, bytes], minor: bytes, limit: int) -> Body | None:
    coding = fields.get(b"transfer-encoding")
    length = fields.get(b"content-length")
    if coding is not None:
        if length is not None:
            raise refused("the request has both Content-Length and Transfer-Encoding")
        if coding.lower() != b"chunked" or minor == b"0":
            raise refused("the only Transfer-Encoding understood is chunked, with HTTP/1.1")
        return ChunkedBody(limit)
    if length is None:
        return None
    if not length.isdigit() or len(length) > MAX_DIGITS:
        raise refused(f"Content-Length is not a whole number of at most {MAX_DIGITS} digits")
    size = int(length)
    return SizedBody(size) if size else None


def _path_in(target: bytes, method: bytes, host: bytes | None) -> bytes:
    """The path of a target that is a whole URL, or of the server as a whole."""
    if target == b"*" and method == b"OPTIONS":
        return target
    url = _ABSOLUTE.fullmatch(target)
    if url is None or method == b"CONNECT":
        raise refused("the target of the request is neither a path nor a URL of this service")
    authority, path = url.groups()
    if host is None or authority.lower() != host.lower():
        raise refused("the target of the request and its Host header name different hosts")
    return path if path.startswith(b"/") else b"/" + path


def _check_repeated(headers: list[tuple[bytes, bytes]], fields: dict[bytes, bytes]) -> None:
    """Refuse the repetition of what must be said once; join what Connection says."""
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
    """Where a head begins: behind an empty line, which sloppy clients send, but only one."""
    return 2 if data.startswith(b"\r\n") else 0


def _check_cut(data: bytes, limit: int, seen: int = 0) -> None:
    """Refuse what cannot become a head, whatever comes."""
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
    """Say what is wrong with a head, unless it is only incomplete."""
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
        raise refused("this does not begin like a request: METHOD TARGET HTTP/1.1")
    at, number = start.end(), 1
    while (line := _FIELD_LINE.match(data, at)) is not None:
        at, number = line.end(), number + 1
    raise refused(
        f"header line {number} is malformed: a header is one line that ends with CR LF and has a "
        "name, a colon right behind it, and printable text"
    )


def _too_long(limit: int) -> RefusedError:
    return refused(
        f"the URL and headers of this request are longer than {limit:,} bytes, or the headers are "
        f"more than {MAX_HEADERS}",
        431,
    )
