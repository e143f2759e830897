"""Generated connections: valid, invalid and almost valid requests, split at random.

Each connection depends only on the seed and its number, so a single one can be reproduced.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.e2e.hostile.raw import cut
from tests.e2e.hostile.sender import OFFERS, WISH, Sender

PATHS = ("/v1/whoami", "/healthz", "/readyz", "/v1/nodes", "/v1/nowhere", "/v1/allocations/dry-run")
BITS = (
    *(b"\r", b"\n", b"\r\n", b"\0", b" ", b"\t", b":", b",", b";", b"\x0b", b"\x7f", b"\xff"),
    *(b"\r\n ", b"\r\n\t", b"\r\r\n", b"\n\r\n", b"\r\n\r\n", b"0\r\n\r\n", b"#", b"%", b"/"),
)
LINES = (
    *OFFERS.values(),
    b"Content-Length: 0\r\n",
    b"Content-Length: 5\r\n",
    b"Content-Length: +5\r\n",
    b"Content-Length: 5, 5\r\n",
    b"Content-Length : 5\r\n",
    b"Content-Length: 99\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: CHUNKED \r\n",
    b"Transfer-Encoding: gzip, chunked\r\n",
    b"Transfer-Encoding: identity\r\n",
    b"Transfer-Encoding : chunked\r\n",
    b"Transfer-Encoding:\x0bchunked\r\n",
    b"Transfer_Encoding: chunked\r\n",
    b"X: y\r\n Transfer-Encoding: chunked\r\n",
    b"X: y\nTransfer-Encoding: chunked\r\n",
    b"Host: y\r\n",
    b"Host: x\r\n",
    b"Connection: close\r\n",
    b"Connection: keep-alive, Transfer-Encoding\r\n",
    b"Connection: content-length\r\n",
    b"Expect: 100-continue\r\n",
    b"Expect: x\r\n",
    b"Trailer: Host\r\n",
    b"TE: trailers\r\n",
    b"Authorization: Bearer x\r\n",
    b"X-Empty:\r\n",
    b"X-Long: " + b"x" * 3000 + b"\r\n",
    b"Content-Encoding: gzip\r\n",
)
VERSIONS = (b"HTTP/1.0", b"HTTP/1.2", b"HTTP/2.0", b"HTTP/0.9", b"http/1.1", b"HTTP/1.1 ", b"")
METHODS = (b"HEAD", b"OPTIONS", b"CONNECT", b"TRACE", b"PRI", b"get", b"M-SEARCH", b"DELETE")
TARGETS = (
    b"*",
    b"http://x/healthz",
    b"http://y/healthz",
    b"/%00",
    b"//x",
    b"/a b",
    b"x:80",
    b"/?a#b",
)


@dataclass
class Conversation:
    """The bytes that one client sends on one connection."""

    number: int
    data: bytes
    pieces: list[bytes]
    pause: float
    messages: int


class Fuzzer:
    """Generates conversations."""

    def __init__(self, sender: Sender, seed: int) -> None:
        self._sender = sender
        self._seed = seed

    def conversation(self, number: int) -> Conversation:
        """Return the conversation with this number; its last request closes the connection."""
        chance = random.Random(f"{self._seed}/{number}")
        made = [self._message(chance, f"{number}.{place}") for place in range(chance.randint(1, 5))]
        made.append(self._sender.get(f"{number}.end", "/healthz", b"Connection: close\r\n"))
        data = b"".join(made)
        pieces = self._cut(chance, data, [len(b"".join(made[:n])) for n in range(1, len(made))])
        pause = chance.choice((0.0, 0.0, 0.0, 0.0005)) if len(pieces) < 20 else 0.0
        return Conversation(number, data, pieces, pause, len(made))

    def _cut(self, chance: random.Random, data: bytes, ends: list[int]) -> list[bytes]:
        how = chance.random()
        if how < 0.3:
            return [data]
        if how < 0.4:
            return cut(data, ends)
        if how < 0.45 and len(data) < 2000:
            return cut(data, range(1, len(data)))
        heads = [n + 4 for n in range(len(data)) if data.startswith(b"\r\n\r\n", n)]
        places = [chance.randrange(1, len(data)) for _ in range(chance.randint(1, 10))]
        places += [max(1, head - chance.randint(0, 4)) for head in heads if chance.random() < 0.5]
        return cut(data, (place for place in places if place < len(data)))

    def _message(self, chance: random.Random, id: str) -> bytes:
        message = self._request(chance, id)
        changes = chance.choice((0, 0, 0, 0, 1, 1, 1, 2, 3))
        for _ in range(changes):
            message = chance.choice(_CHANGES)(chance, message)
        return message

    def _request(self, chance: random.Random, id: str) -> bytes:
        sender = self._sender
        more = chance.choice(LINES[: len(OFFERS)]) if chance.random() < 0.3 else b""
        if chance.random() < 0.4:
            return sender.get(id, chance.choice(PATHS), more)
        hidden = sender.get(f"hidden-{id}", "/healthz")
        body = chance.choice(
            (b"", WISH, hidden, b"\r\n" + hidden, chance.randbytes(chance.randint(1, 300)))
        )
        path = chance.choice(PATHS)
        if chance.random() < 0.5:
            return sender.post(id, body, more, path=path)
        more += b"Transfer-Encoding: chunked\r\n"
        return sender.post(id, _chunked(chance, body), more, path=path, length=None)


def _chunked(chance: random.Random, body: bytes) -> bytes:
    chunks = b""
    places = [chance.randint(1, len(body) or 1) for _ in range(chance.randint(0, 3))]
    for piece in cut(body, (place for place in places if place < len(body))):
        extension = chance.choice((b"", b"", b";a", b';a="b"', b";" + b"x" * 100))
        zeros = b"0" * chance.choice((0, 0, 0, 2, 8))
        chunks += zeros + b"%x" % len(piece) + extension + b"\r\n" + piece + b"\r\n"
    trailers = chance.choice((b"", b"", b"X-A: b\r\n", b"Content-Length: 5\r\nHost: y\r\n"))
    return chunks + b"0\r\n" + trailers + b"\r\n"


def _place(chance: random.Random, message: bytes) -> int:
    """Return a position in a message, preferably in its head."""
    head = message.find(b"\r\n\r\n") + 4
    return chance.randrange(head if chance.random() < 0.7 and head > 4 else len(message) or 1)


def _insert(chance: random.Random, message: bytes) -> bytes:
    at = _place(chance, message)
    return message[:at] + chance.choice(BITS) + message[at:]


def _remove(chance: random.Random, message: bytes) -> bytes:
    at = _place(chance, message)
    return message[:at] + message[at + chance.choice((1, 1, 2, 5)) :]


def _replace(chance: random.Random, message: bytes) -> bytes:
    at = _place(chance, message)
    return message[:at] + chance.choice((*BITS, chance.randbytes(1))) + message[at + 1 :]


def _end(chance: random.Random, message: bytes) -> bytes:
    """Change the end of a line."""
    ends = [n for n in range(len(message)) if message.startswith(b"\r\n", n)]
    if not ends:
        return message
    at = chance.choice(ends)
    return (
        message[:at] + chance.choice((b"\n", b"\r", b"\r\r\n", b" \r\n", b"")) + message[at + 2 :]
    )


def _line(chance: random.Random, message: bytes) -> bytes:
    """Add a line."""
    lines = message.split(b"\r\n")
    lines.insert(chance.randrange(1, max(2, len(lines))), chance.choice(LINES)[:-2])
    return b"\r\n".join(lines)


def _twice(chance: random.Random, message: bytes) -> bytes:
    """Repeat a line."""
    lines = message.split(b"\r\n")
    at = chance.randrange(len(lines))
    return b"\r\n".join([*lines[: at + 1], *lines[at:]])


def _less(chance: random.Random, message: bytes) -> bytes:
    """Remove a line."""
    lines = message.split(b"\r\n")
    at = chance.randrange(len(lines))
    return b"\r\n".join([*lines[:at], *lines[at + 1 :]])


def _start(chance: random.Random, message: bytes) -> bytes:
    """Replace a word of the request line."""
    line, mark, rest = message.partition(b"\r\n")
    words = line.split(b" ")
    at = chance.randrange(min(3, len(words)))
    words[at] = chance.choice((METHODS, TARGETS, VERSIONS)[at])
    return b" ".join(words) + mark + rest


def _letters(chance: random.Random, message: bytes) -> bytes:
    """Change the case of header names, which has no meaning."""
    lines = message.split(b"\r\n")
    at = chance.randrange(len(lines))
    name, mark, value = lines[at].partition(b":")
    if at and mark:
        lines[at] = chance.choice((name.upper(), name.lower())) + mark + value
    return b"\r\n".join(lines)


def _front(chance: random.Random, message: bytes) -> bytes:
    """Add something in front."""
    return chance.choice((b"\r\n", b"\r\n\r\n", b"\n", b"0\r\n\r\n", b" ")) + message


_CHANGES: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    *(_insert, _remove, _replace, _end, _line, _line, _twice, _less, _start, _letters, _front),
)
