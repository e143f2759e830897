"""Following the events of a service: one stream after another, none of them missing anything."""

from __future__ import annotations

import httpx

from slicewise.client.calls import Call
from slicewise.client.events import EventReader
from slicewise.client.exchange import CONNECT_SECONDS, Again, Exchange, Trip, pauses
from slicewise.control.entries import Ended, Served
from slicewise.control.hardware import PartTurned, Phase
from slicewise.control.reports import EventView, Readiness
from slicewise.control.wire import AllocationView

QUIET_SECONDS = 60.0
"""A stream that says nothing for so long is dead: the service sends a sign of life every 15."""
RESUME_SECONDS = 120.0
"""How long to try to take up a stream that broke."""
STREAM_TIMEOUT = httpx.Timeout(QUIET_SECONDS, connect=CONNECT_SECONDS)
_COMING = (Phase.PLACED, Phase.CREATING)
_FOLLOW = Call("GET", "/v1/events", type(None))


class Following:
    """Where a follower is in the journal, and how it gets back there when a stream breaks."""

    def __init__(self, exchange: Exchange, after: str | None) -> None:
        self._exchange = exchange
        self._reader = EventReader(after)
        self._trip = Trip(exchange, _FOLLOW)
        self._streaming = False
        self._pauses = pauses()

    @property
    def url(self) -> httpx.URL:
        """Where the next stream comes from."""
        return self._trip.url

    @property
    def headers(self) -> dict[str, str]:
        """What to send along."""
        return self._trip.headers

    @property
    def query(self) -> dict[str, str]:
        """From where on."""
        return {} if self._reader.after is None else {"after": self._reader.after}

    def begins(self, response: httpx.Response) -> bool:
        """Whether this answer is a stream; if it is not, read it and hand it to `refused`."""
        self._streaming = response.status_code == 200
        if self._streaming:
            self._trip.arrived()
            self._reader.begin()
        return self._streaming

    def feed(self, piece: bytes) -> list[EventView]:
        """The events that are complete with this piece of the stream."""
        events = self._reader.feed(piece)
        if events:
            self._pauses = pauses()
        return events

    def refused(self, response: httpx.Response) -> float:
        """How long to pause before asking for a stream again; raised if that is of no use."""
        again = self._trip.read(response)
        assert isinstance(again, Again)  # there is no other answer but a stream
        return again.pause

    def broke(self, error: httpx.RequestError | None = None) -> float:
        """How long to pause before a stream that ended is taken up; raised if nobody answers."""
        if not self._streaming:
            assert error is not None  # a stream that never began did not end either
            return self._trip.failed(error).pause
        self._streaming = False
        self._trip = Trip(self._exchange, _FOLLOW, patience=RESUME_SECONDS)
        return next(self._pauses)


def place_of(said: Readiness) -> str | None:
    """The last entry of the journal and its history, as a server tells that knows them."""
    return None if said.role == "starting" else f"{said.history}-{said.seq}".removeprefix("-")


def is_usable(found: AllocationView) -> bool:
    """Whether nothing more is to come before an allocation can be used; or it has ended."""
    if found.state in ("queued", "creating"):
        return False
    return found.state != "placed" or all(part.phase is None for part in found.instances)


class Progress:
    """Follows how the instances of an allocation come into being."""

    def __init__(self, found: AllocationView) -> None:
        self._identity = found.id
        self._missing = {
            index for index, part in enumerate(found.instances) if part.phase in _COMING
        }
        self._placed = bool(found.instances)

    def note(self, event: EventView) -> bool:
        """Take in an event; says whether the allocation is worth another look."""
        entry = event.entry
        if event.subject != self._identity:
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
