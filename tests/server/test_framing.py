"""Framing without a socket: the result does not depend on how the bytes are divided."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.control.answers import RefusedError
from slicewise.server.framing import ChunkedBody, RequestHead, SizedBody, read_head

LIMIT = 1 << 14
HEAD = b"POST /v1/x?a=b HTTP/1.1\r\nHost: x\r\nX-A: \t b c \t\r\nContent-Length: 5\r\n\r\n"
CHUNKS = b"5;a=b\r\n01234\r\n3\r\n567\r\n0\r\nX-B: c\r\nX-D:\r\n\r\n"


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted({cut % len(data) for cut in cuts}), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(places)]


def head_of(data: bytes, cuts: list[int]) -> RequestHead | None:
    """The head as a connection reads it, piece by piece."""
    come, seen = b"", 0
    for piece in pieces(data, cuts):
        come += piece
        head = read_head(come, LIMIT, seen)
        if head is not None:
            return head
        seen = len(come)
    return None


cuts = st.lists(st.integers(0, 1 << 16), max_size=20)


@given(cuts)
def test_a_head_in_pieces(cuts: list[int]) -> None:
    head = head_of(HEAD + b"GET", cuts)
    assert head is not None
    assert (head.size, head.method, head.path, head.query) == (len(HEAD), "POST", b"/v1/x", b"a=b")
    assert head.headers == [(b"host", b"x"), (b"x-a", b"b c"), (b"content-length", b"5")]
    assert isinstance(head.body, SizedBody)
    assert not head.last


@given(st.integers(0, len(HEAD) - 5), st.sampled_from([b"\0", b"\n", b"\r", b"\x7f"]), cuts)
def test_a_bad_head_in_pieces(place: int, bit: bytes, cuts: list[int]) -> None:
    bad = HEAD[:place] + bit + HEAD[place:]
    with pytest.raises(RefusedError):
        assert head_of(bad, cuts) is None


@given(cuts)
def test_chunks_in_pieces(cuts: list[int]) -> None:
    body = ChunkedBody(LIMIT)
    content = behind = b""
    for piece in pieces(CHUNKS + b"GET /", cuts):
        if body.complete:
            behind += piece
            continue
        taken, rest = body.take(piece)
        content += taken
        behind += rest
    assert body.complete
    assert (content, behind) == (b"01234567", b"GET /")


@given(st.integers(1, 100), st.integers(0, 200), cuts)
def test_a_length_in_pieces(length: int, more: int, cuts: list[int]) -> None:
    data = bytes(number % 256 for number in range(length + more))
    body = SizedBody(length)
    content = behind = b""
    for piece in pieces(data, cuts):
        if body.complete:
            behind += piece
            continue
        taken, rest = body.take(piece)
        content += taken
        behind += rest
    assert (content, behind) == (data[:length], data[length:])


def test_an_incomplete_invalid_request_is_refused_early() -> None:
    for start in (b"\x16", b"x", b" ", b"\n", b"\r\n\r\n", b"GET /\r\n", b"GET / HTTP/1.1\nH"):
        with pytest.raises(RefusedError):
            read_head(start, LIMIT)
    for start in (
        b"\r",
        b"\r\n",
        b"\r\nG",
        b"GET",
        b"GET / HTTP/1.1\r",
        b"GET / HTTP/1.1\r\nH: x\r",
    ):
        assert read_head(start, LIMIT) is None


def test_an_endless_head_is_refused() -> None:
    for endless in (b"GET /" + b"x" * LIMIT, HEAD[:-2] + b"x: y\r\n" * 4000):
        with pytest.raises(RefusedError) as refusal:
            read_head(endless, LIMIT)
        assert refusal.value.status == 431
