"""Answers leave in one piece: the head of an answer waits for its body.

The server writes the two one after the other. Each write is a call of the system that wakes the
client, and for a small answer that costs as much as a third of everything else.
"""

from __future__ import annotations

import asyncio

_TOGETHER = 1 << 16
"""A body that is larger is not copied behind its head."""


class OnePiece:
    """A transport that holds back the head of an answer until its body is there.

    Only where the head says how long the body is: a stream may have nothing to say for a while.
    """

    __slots__ = (
        "_held",
        "_transport",
        "abort",
        "can_write_eof",
        "get_extra_info",
        "get_write_buffer_size",
        "is_closing",
        "set_protocol",
        "write_eof",
    )

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held = b""
        self.abort = transport.abort
        self.can_write_eof = transport.can_write_eof
        self.get_extra_info = transport.get_extra_info
        self.get_write_buffer_size = transport.get_write_buffer_size
        self.is_closing = transport.is_closing
        self.set_protocol = transport.set_protocol
        self.write_eof = transport.write_eof

    def write(self, data: bytes) -> None:
        """Write, or hold back a head."""
        held = self._held
        if held:
            self._held = b""
            if len(data) <= _TOGETHER:
                data = held + data
            else:
                self._transport.write(held)
        elif _is_head(data):
            self._held = data
            return
        self._transport.write(data)

    def flush(self) -> None:
        """Write what was held back: there is no body."""
        held, self._held = self._held, b""
        if held:
            self._transport.write(held)

    def close(self) -> None:
        """End, once everything has been written."""
        self.flush()
        self._transport.close()


def _is_head(data: bytes) -> bool:
    """Whether this is a head that announces a body; one that only looks like it is not late."""
    return (
        data.startswith(b"HTTP/1.1 ")
        and data.endswith(b"\r\n\r\n")
        and b"\r\ncontent-length: " in data
    )
