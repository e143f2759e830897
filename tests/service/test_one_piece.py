"""Answers in one piece: what is held back, for how long, and what is not."""

from __future__ import annotations

import asyncio

import pytest

from slicewise.service.one_piece import OnePiece

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 4\r\n\r\n"
STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Wire(asyncio.Transport):
    """Remembers what was written, write by write, and its end."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def close(self) -> None:
        self.written.append(b"<end>")


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def piece(wire: Wire) -> OnePiece:
    return OnePiece(wire)


def test_a_head_waits_for_its_body(wire: Wire, piece: OnePiece) -> None:
    piece.write(HEAD)
    assert wire.written == []
    piece.write(b"body")
    piece.flush()
    piece.write(HEAD)
    piece.write(b"more")
    assert wire.written == [HEAD + b"body", HEAD + b"more"]


def test_a_head_without_a_body_waits_for_the_end_of_the_answer(wire: Wire, piece: OnePiece) -> None:
    piece.write(HEAD)
    piece.flush()
    piece.flush()
    assert wire.written == [HEAD]


def test_a_connection_that_ends_has_said_everything(wire: Wire, piece: OnePiece) -> None:
    piece.write(HEAD)
    piece.close()
    assert wire.written == [HEAD, b"<end>"]


@pytest.mark.parametrize(
    "data",
    [
        STREAM,
        b"HTTP/1.1 100 Continue\r\n\r\n",
        HEAD + b"body",
        b"4\r\nbody\r\n",
        b"",
    ],
)
def test_what_does_not_wait(wire: Wire, piece: OnePiece, data: bytes) -> None:
    piece.write(data)
    assert wire.written == [data]


def test_a_large_body_is_not_copied(wire: Wire, piece: OnePiece) -> None:
    body = b"x" * 100_000
    piece.write(HEAD)
    piece.write(body)
    assert wire.written == [HEAD, body]
