"""Event streams: parse server-sent events, and follow them across broken connections."""

from __future__ import annotations

import re

import httpx
import msgspec

from slicewise.api.allocations import AllocationView
from slicewise.api.events import EventView
from slicewise.api.health import Readiness
from slicewise.client.calls import Call
from slicewise.client.transport import CONNECT_SECONDS, Endpoints, RetriedCall, Retry, backoff
from slicewise.core.errors import SlicewiseError
from slicewise.journal.agent_entries import PartTurned, Phase
from slicewise.journal.entries import Ended, Served

QUIET_SECONDS = 60.0
"""A stream that is silent for this long is dead: the service sends a heartbeat every 15 s."""
RESUME_SECONDS = 120.0
"""How long to try to resume a broken stream."""
STREAM_TIMEOUT = httpx.Timeout(QUIET_SECONDS, connect=CONNECT_SECONDS)
_COMING = (Phase.PLACED, Phase.CREATING)
_EVENTS = Call("GET", "/v1/events", type(None))

# A trailing carriage return may be the first half of "\r\n". Only these end a line: str.splitlines
# also breaks at characters that may occur in text.
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")
_ID = re.compile(rb"([0-9a-f]+-)?[0-9]+")


class EventParser:
    """Parses server-sent events from chunks of bytes, and tracks where to resume."""

    def __init__(self, after: str | None = None) -> None:
        self.after = after
        """Id of the last complete event, or where the stream starts; None starts now."""
        self.reset()

    def reset(self) -> None:
        """Drop the incomplete event of a previous connection."""
        self._rest = b""
        self._data: list[bytes] = []
        self._id = self.after

    def feed(self, chunk: bytes) -> list[EventView]:
        """Return the events that this chunk completes."""
        *lines, self._rest = _LINE_END.split(self._rest + chunk)
        return [event for line in lines if (event := self._parse(line)) is not None]

    def _parse(self, line: bytes) -> EventView | None:
        if line:
            name, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if name == b"data":
                self._data.append(value)
            elif name == b"id" and _ID.fullmatch(value):
                self._id = value.decode()
            return None
        data, self._data = b"\n".join(self._data), []
        event = _decode(data) if data else None
        self.after = self._id  # only now: a truncated event has not been seen
        return event


def _decode(data: bytes) -> EventView:
    try:
        return msgspec.json.decode(data, type=EventView)
    except msgspec.MsgspecError as error:
        raise SlicewiseError(f"this client cannot read an event: {error}") from None


class EventFollower:
    """Keeps the position in the journal, and resumes there when a stream breaks."""

    def __init__(self, endpoints: Endpoints, after: str | None) -> None:
        self._endpoints = endpoints
        self._parser = EventParser(after)
        self._request = RetriedCall(endpoints, _EVENTS)
        self._streaming = False
        self._backoff = backoff()

    @property
    def url(self) -> httpx.URL:
        """The URL of the next stream."""
        return self._request.url

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the next request."""
        return self._request.headers

    @property
    def query(self) -> dict[str, str]:
        """The position to resume from."""
        return {} if self._parser.after is None else {"after": self._parser.after}

    def accept(self, response: httpx.Response) -> bool:
        """Return whether this response is a stream; read any other one and call `refused`."""
        self._streaming = response.status_code == 200
        if self._streaming:
            self._request.answered()
            self._parser.reset()
        return self._streaming

    def feed(self, chunk: bytes) -> list[EventView]:
        """Return the events that this chunk completes."""
        events = self._parser.feed(chunk)
        if events:
            self._backoff = backoff()
        return events

    def refused(self, response: httpx.Response) -> float:
        """Return the delay before the next request, or raise if a retry cannot help."""
        retry = self._request.read(response)
        assert isinstance(retry, Retry)  # the only successful answer is a stream
        return retry.delay

    def broken(self, error: httpx.RequestError | None = None) -> float:
        """Return the delay before the stream is resumed, or raise if no server answers."""
        if not self._streaming:
            assert error is not None  # a stream that never began cannot end
            return self._request.failed(error).delay
        self._streaming = False
        self._request = RetriedCall(self._endpoints, _EVENTS, patience=RESUME_SECONDS)
        return next(self._backoff)


def position_of(readiness: Readiness) -> str | None:
    """The history and sequence number of the last journal entry; None while a server starts."""
    if readiness.role == "starting":
        return None
    return f"{readiness.history}-{readiness.seq}".removeprefix("-")


def is_usable(allocation: AllocationView) -> bool:
    """Whether an allocation can be used, or has ended."""
    if allocation.state in ("queued", "creating"):
        return False
    return allocation.state != "placed" or all(part.phase is None for part in allocation.instances)


class CreationProgress:
    """Tracks which instances of an allocation have not been created yet."""

    def __init__(self, allocation: AllocationView) -> None:
        self._id = allocation.id
        self._missing = {
            index for index, part in enumerate(allocation.instances) if part.phase in _COMING
        }
        self._placed = bool(allocation.instances)

    def update(self, event: EventView) -> bool:
        """Apply an event; return whether the allocation may have become usable."""
        entry = event.entry
        if event.subject != self._id:
            return False
        if isinstance(entry, Served):
            self._placed = True
            self._missing = {
                index for index, part in enumerate(entry.parts) if part.phase is not None
            }
        elif isinstance(entry, PartTurned):
            if entry.phase in _COMING:
                self._missing.add(entry.index)
            else:
                self._missing.discard(entry.index)
        elif isinstance(entry, Ended):
            return True
        return self._placed and not self._missing
