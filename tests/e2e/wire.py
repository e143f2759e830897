"""The connections of one client, as plain HTTP/1.1 without retries or a pool.

A library that retries on its own would hide what these tests check.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from tests.e2e.server import Address


class LostError(Exception):
    """Raised when a connection breaks or times out: the outcome of the call is unknown."""


class Reply(NamedTuple):
    """An HTTP response."""

    status: int
    headers: dict[str, str]
    body: bytes


_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Wire:
    """Keeps a connection to every server it has used, and reconnects after a loss."""

    def __init__(self, secret: str, patience: float) -> None:
        self._secret = secret
        self._patience = patience
        self._streams: dict[Address, _Stream] = {}

    async def ask(
        self, server: Address, method: str, path: str, body: bytes = b"", key: str | None = None
    ) -> Reply:
        """Send a request and wait for the response."""
        lines = [
            f"{method} {path} HTTP/1.1",
            "host: {}:{}".format(*server),
            f"authorization: Bearer {self._secret}",
            f"content-length: {len(body)}",
        ]
        if body:
            lines.append("content-type: application/json")
        if key is not None:
            lines.append(f"idempotency-key: {key}")
        try:
            async with asyncio.timeout(self._patience):
                reader, writer = await self._stream(server)
                writer.write("\r\n".join([*lines, "", ""]).encode() + body)
                reply = await _read(reader)
        except (TimeoutError, OSError, EOFError, asyncio.LimitOverrunError, ValueError) as error:
            self._drop(server)
            raise LostError(type(error).__name__) from error
        except BaseException:
            self._drop(server)  # a late response must not answer the next request
            raise
        if reply.headers.get("connection") == "close":
            self._drop(server)
        return reply

    async def _stream(self, server: Address) -> _Stream:
        stream = self._streams.get(server)
        if stream is None:
            stream = self._streams[server] = await asyncio.open_connection(*server)
        return stream

    def _drop(self, server: Address) -> None:
        stream = self._streams.pop(server, None)
        if stream is not None:
            stream[1].transport.abort()

    def close(self) -> None:
        """Close every connection."""
        for server in list(self._streams):
            self._drop(server)


async def _read(reader: asyncio.StreamReader) -> Reply:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {}
    for line in head[1:]:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    body = await reader.readexactly(int(headers["content-length"]))
    return Reply(int(head[0].split(" ")[1]), headers, body)
