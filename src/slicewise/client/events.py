"""Reading a stream of server-sent events, in whatever pieces it comes."""

from __future__ import annotations

import re

import msgspec

from slicewise.control.reports import EventView
from slicewise.core.errors import SlicewiseError

# A carriage return that is the last byte so far may be the first half of an end. Only these are
# ends: text may hold other characters at which Python would break a line.
_END = re.compile(rb"\r\n|\n|\r(?!\Z)")

_ID = re.compile(rb"([0-9a-f]+-)?[0-9]+")


class EventReader:
    """Takes bytes and gives events; remembers where to go on after a break."""

    def __init__(self, after: str | None = None) -> None:
        self.after = after
        """The id of the last event seen, or where the stream is to begin; None is from now on."""
        self.begin()

    def begin(self) -> None:
        """A new connection: what the last one left unfinished is void."""
        self._rest = b""
        self._data: list[bytes] = []
        self._id = self.after

    def feed(self, piece: bytes) -> list[EventView]:
        """The events that are complete with this piece."""
        *lines, self._rest = _END.split(self._rest + piece)
        return [event for line in lines if (event := self._take(line)) is not None]

    def _take(self, line: bytes) -> EventView | None:
        if line:
            name, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if name == b"data":
                self._data.append(value)
            elif name == b"id" and _ID.fullmatch(value):
                self._id = value.decode()
            return None
        data, self._data = b"\n".join(self._data), []
        event = self._event(data) if data else None
        self.after = self._id  # only now: an event that breaks off has not been seen
        return event

    def _event(self, data: bytes) -> EventView:
        try:
            return msgspec.json.decode(data, type=EventView)
        except msgspec.MsgspecError as error:
            raise SlicewiseError(f"an event this client does not understand: {error}") from None
