"""A reference parser: the requests that the service must find in the same bytes.

It favors clarity: it has all bytes at once and parses them line by line.
"""

from __future__ import annotations

import string
from dataclasses import dataclass, field

HEAD_BYTES = 1 << 14
HEADERS = 128
CHUNK_LINE = 256

_TOKEN = frozenset((string.ascii_letters + string.digits + "!#$%&'*+-.^_`|~").encode())
_ONCE = {
    *("authorization", "content-encoding", "content-length", "content-type", "expect", "host"),
    *("idempotency-key", "last-event-id", "transfer-encoding"),
}
_ID = frozenset((string.ascii_letters + string.digits + "._-").encode())


class RefusedError(Exception):
    """Raised for bytes that are not a request."""


class OpenError(Exception):
    """Raised for an incomplete request."""


@dataclass
class Asked:
    """One request."""

    method: str
    target: bytes
    id: str | None
    """Its id; None if it has no id that the service accepts."""
    last: bool
    waits: bool
    """Whether it expects 100-continue, so a response before the body ends the connection."""
    body: bytes = b""


@dataclass
class Reading:
    """The requests of a connection."""

    asked: list[Asked] = field(default_factory=list)
    """Complete requests, in order."""
    begun: Asked | None = None
    """The last request, with a complete head and an incomplete or invalid body."""
    end: str = "clean"
    """Why there are no more: clean, last, open (incomplete) or refused."""


def read(data: bytes) -> Reading:
    """Parse all requests of a connection."""
    reading = Reading()
    at = 0
    try:
        while at < len(data):
            at, asked, length = _head(data, at)
            reading.begun = asked
            at, asked.body = _chunks(data, at) if length is None else _sized(data, at, length)
            reading.begun = None
            reading.asked.append(asked)
            if asked.last:
                reading.end = "last"
                break
    except RefusedError:
        reading.end = "refused"
    except OpenError:
        reading.end = "open"
    return reading


def _refuse_unless(true: bool) -> None:
    if not true:
        raise RefusedError


def _head(data: bytes, at: int) -> tuple[int, Asked, int | None]:
    """Return the offset of the body, the request, and the length of the body; None for chunks."""
    begin = at
    if data[at : at + 2] == b"\r\n":
        at += 2
    lines, end = _lines(data, at)
    _refuse_unless(end - begin <= HEAD_BYTES and len(lines) - 1 <= HEADERS)
    words = lines[0].split(b" ")
    _refuse_unless(len(words) == 3 and words[2] in (b"HTTP/1.0", b"HTTP/1.1"))
    method, target, version = words
    letters = method.replace(b"-", b"")
    _refuse_unless(letters.isalpha() and letters.isupper() and method[:1] != b"-")
    _refuse_unless(len(method) <= 32 and method != b"CONNECT")
    _refuse_unless(all(0x21 <= c <= 0x7E for c in target) and b"#" not in target)
    headers: dict[str, list[bytes]] = {}
    for line in lines[1:]:
        name, value = _field(line)
        headers.setdefault(name, []).append(value)
    _refuse_unless(not any(len(headers.get(name, ())) > 1 for name in _ONCE))
    _check_host(headers.get("host", []), target, method, version)
    length: int | None = 0
    if "transfer-encoding" in headers:
        _refuse_unless(headers["transfer-encoding"][0].lower() == b"chunked")
        _refuse_unless("content-length" not in headers and version == b"HTTP/1.1")
        length = None
    elif "content-length" in headers:
        told = headers["content-length"][0]
        _refuse_unless(1 <= len(told) <= 15 and all(c in b"0123456789" for c in told))
        length = int(told)
    options = b",".join(headers.get("connection", [])).lower().split(b",")
    id = headers.get("x-request-id", [b""])[-1]
    known = 1 <= len(id) <= 64 and set(id) <= _ID
    last = version == b"HTTP/1.0" or b"close" in [option.strip(b" \t") for option in options]
    waits = headers.get("expect", [b""])[0].lower() == b"100-continue" and length != 0
    asked = Asked(method.decode(), target, id.decode() if known else None, last, waits)
    return end, asked, length


def _check_host(hosts: list[bytes], target: bytes, method: bytes, version: bytes) -> None:
    _refuse_unless(bool(hosts) or version == b"HTTP/1.0")
    for host in hosts:
        name, colon, port = host.rpartition(b":") if host[-1:] != b"]" else (host, b"", b"")
        if not colon:
            name, port = host, b""
        _refuse_unless(len(port) <= 5 and all(c in b"0123456789" for c in port))
        if name.startswith(b"["):
            inner = name[1:-1]
            _refuse_unless(name.endswith(b"]") and bool(inner))
            _refuse_unless(all(c in b"0123456789abcdefABCDEF:." for c in inner))
        else:
            allowed = (string.ascii_letters + string.digits + "._~%-").encode()
            _refuse_unless(bool(name) and all(c in allowed for c in name))
    if target[:1] == b"/" or (target == b"*" and method == b"OPTIONS"):
        return
    scheme, mark, rest = target.partition(b"://")
    _refuse_unless(mark != b"" and scheme.lower() in (b"http", b"https"))
    authority = rest.split(b"/")[0].split(b"?")[0]
    _refuse_unless(bool(hosts) and hosts[0].lower() == authority.lower())


def _lines(data: bytes, at: int) -> tuple[list[bytes], int]:
    """Return the lines up to an empty one, and the offset after it."""
    lines: list[bytes] = []
    while True:
        end = data.find(b"\r\n", at)
        if end < 0:
            raise OpenError
        line = data[at:end]
        _refuse_unless(not any((c < 0x20 and c != 0x09) or c == 0x7F for c in line))
        at = end + 2
        if not line and lines:
            return lines, at
        _refuse_unless(bool(line))
        lines.append(line)


def _field(line: bytes) -> tuple[str, bytes]:
    name, colon, value = line.partition(b":")
    _refuse_unless(bool(name) and bool(colon) and set(name) <= _TOKEN)
    return name.decode().lower(), value.strip(b" \t")


def _sized(data: bytes, at: int, length: int) -> tuple[int, bytes]:
    if len(data) - at < length:
        raise OpenError
    return at + length, data[at : at + length]


def _chunks(data: bytes, at: int) -> tuple[int, bytes]:
    body = b""
    aside = HEAD_BYTES
    while True:
        end = data.find(b"\r\n", at)
        if end < 0:
            raise OpenError
        _refuse_unless(end + 2 - at <= CHUNK_LINE)
        size, _, extension = data[at:end].partition(b";")
        _refuse_unless(1 <= len(size) <= 12 and all(c in string.hexdigits.encode() for c in size))
        _refuse_unless(not any((c < 0x20 and c != 0x09) or c == 0x7F for c in extension))
        count = int(size, 16)
        aside = min(HEAD_BYTES, aside - (end + 2 - at - count))
        _refuse_unless(aside >= 0)
        at = end + 2
        if not count:
            break
        if len(data) - at < count + 2:
            raise OpenError
        body += data[at : at + count]
        at += count
        _refuse_unless(data[at : at + 2] == b"\r\n")
        at += 2
    begin = at
    if data[at : at + 2] == b"\r\n":
        at += 2
    else:
        lines, at = _lines(data, at)
        for line in lines:
            _field(line)
    _refuse_unless(at - begin <= aside)
    return at, body
