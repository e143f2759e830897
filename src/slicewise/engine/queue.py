"""The queue of requests that could not be placed and wait until room appears.

Waiting requests form lines: one for each tenant and shape, where a shape is a kind of request and
a number of instances. A line is first in, first out, within the tenant's priorities. When room
appears, the heads of the lines are tried in fair order (`shares`). A refusal for lack of room
concerns the shape and thus all lines of it, so the cost of a pass depends on the number of shapes
and not on how many requests wait. A request waits only if no window is open to it.

There is no clock: callers pass the time as a number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush, merge
from itertools import islice, takewhile

from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Geometry
from slicewise.core.request import Reason, Rejection, Request
from slicewise.engine.reservations import LineKey
from slicewise.engine.shares import Order, Shares
from slicewise.engine.sortedkeys import Key, SortedKeys


@dataclass(frozen=True, slots=True)
class Ticket:
    """A waiting request, with the attributes that determine its position in the queue."""

    number: int
    """Assigned by the caller in ascending order; at equal priority the lower is served first."""
    request: Request
    count: int = 1
    """The number of instances, placed all or none."""
    tenant: str = ""
    priority: int = 0
    """Higher is served first among the requests of the tenant."""
    entered: float = 0.0
    deadline: float | None = None
    """When the ticket expires; None to wait indefinitely."""
    lease: float | None = None
    """How long its instances exist once placed; None if that is not known."""
    expected: float | None = None
    """How long they are expected to exist: a hint, which promises nothing."""
    held_until: float | None = None
    """Before this time it is not tried."""
    until: float | None = None
    """When its instances have ended, whenever they are placed; None if that is not known."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise SlicewiseError(
                f"ticket {self.number} asks for {self.count} instances; the least is 1"
            )
        if self.deadline is not None and not math.isfinite(self.deadline):
            raise SlicewiseError(
                f"ticket {self.number} has a deadline of {self.deadline}; "
                "leave it out to wait for ever"
            )

    def over_by(self, now: float) -> float:
        """When its instances have ended if they are placed now; infinity if that is not certain."""
        over = math.inf if self.lease is None else now + self.lease
        return over if self.until is None else min(over, self.until)

    def ends_by(self, now: float) -> float:
        """When its instances end if they are placed now, as far as is known or expected."""
        over = self.over_by(now)
        return over if self.expected is None else min(over, now + self.expected)

    @property
    def line(self) -> LineKey:
        """The line that it waits in."""
        return LineKey(self.tenant, self.request, self.count)

    @property
    def key(self) -> Key:
        """Its position in its line."""
        return -self.priority, self.number


class Line:
    """The waiting requests of one tenant for one shape, the next one first."""

    def __init__(self, key: LineKey) -> None:
        self.key = key
        self._order = SortedKeys()
        self._leases = SortedKeys()
        """Those with a lease, the shortest first."""
        self._held = SortedKeys()
        """Those that are held back."""

    def add(self, ticket: Ticket) -> None:
        """Put a ticket in its place."""
        self._order.add(ticket.key)
        if ticket.lease is not None:
            self._leases.add((ticket.lease, ticket.number))
        if ticket.held_until is not None:
            self._held.add(ticket.key)

    def remove(self, ticket: Ticket) -> None:
        """Take a ticket out."""
        self._order.remove(ticket.key)
        if ticket.lease is not None:
            self._leases.remove((ticket.lease, ticket.number))
        if ticket.held_until is not None:
            self._held.remove(ticket.key)

    @property
    def head(self) -> int | None:
        """The number of the next ticket."""
        first = self._order.first
        return None if first is None else first[1]

    @property
    def shortest_lease(self) -> tuple[float, int] | None:
        """The shortest lease in the line and the number of its ticket, if any has one."""
        return self._leases.first

    def position(self, ticket: Ticket) -> int:
        """How many tickets are ahead, apart from those that are held back."""
        return self._order.rank(ticket.key) - self._held.rank(ticket.key)

    def at(self, position: int) -> int | None:
        """The number of the ticket with so many ahead of it, apart from those held back."""
        return next(islice(self.ready, position, None), None)

    @property
    def ready(self) -> Iterator[int]:
        """The tickets that are not held back: windows are reserved for the first of them."""
        held = set(self._held)
        return (key[1] for key in self._order if key not in held)

    @property
    def held(self) -> int:
        """How many tickets are held back."""
        return len(self._held)

    def __iter__(self) -> Iterator[int]:
        return (number for _, number in self._order)

    def __len__(self) -> int:
        return len(self._order)


@dataclass(frozen=True, slots=True)
class Attempt:
    """How a ticket is tried in a pass."""

    ticket: Ticket
    by_lease: bool
    """Whether it may only go where its lease ends before a reserved window opens."""


class Queue:
    """The waiting tickets; decides in which order they are tried when room appears."""

    def __init__(self, shares: Shares) -> None:
        self.shares = shares
        self._tickets: dict[int, Ticket] = {}
        self._lines: dict[LineKey, Line] = {}
        self._by_request: dict[Request, dict[LineKey, Line]] = {}
        self._lines_of: Counter[str] = Counter()
        """By tenant: how many lines it has."""
        self._deadlines = SortedKeys()
        self._ages = SortedKeys()
        """All tickets, those that entered first at the front."""
        self._numbers: dict[str, SortedKeys] = {}
        """By tenant: the numbers of its tickets."""
        self._latest: dict[Geometry, float] = {}
        """By GPU model: the time of the latest request that was placed."""

    def enter(self, ticket: Ticket) -> None:
        """Add a ticket."""
        if ticket.number in self._tickets:
            raise SlicewiseError(f"ticket {ticket.number} is waiting already")
        self._tickets[ticket.number] = ticket
        self._ages.add((ticket.entered, ticket.number))
        self._numbers.setdefault(ticket.tenant, SortedKeys()).add((0, ticket.number))
        if ticket.deadline is not None:
            self._deadlines.add((ticket.deadline, ticket.number))
        key = ticket.line
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = Line(key)
            self._lines_of[ticket.tenant] += 1
            self._by_request.setdefault(ticket.request, {})[key] = line
        line.add(ticket)

    def withdraw(self, number: int) -> Ticket:
        """Remove a ticket and return it."""
        ticket = self.ticket(number)
        del self._tickets[number]
        self._ages.remove((ticket.entered, number))
        numbers = self._numbers[ticket.tenant]
        numbers.remove((0, number))
        if numbers.first is None:
            del self._numbers[ticket.tenant]
        if ticket.deadline is not None:
            self._deadlines.remove((ticket.deadline, number))
        key = ticket.line
        line = self._lines[key]
        line.remove(ticket)
        if line.head is None:
            del self._lines[key]
            self._lines_of[ticket.tenant] -= 1
            if not self._lines_of[ticket.tenant]:
                del self._lines_of[ticket.tenant]
            lines = self._by_request[ticket.request]
            del lines[key]
            if not lines:
                del self._by_request[ticket.request]
        return ticket

    def hold(self, number: int, until: float | None) -> None:
        """Do not try a ticket before this time; None to try it again."""
        before = self.ticket(number)
        after = self._tickets[number] = replace(before, held_until=until)
        line = self._lines[before.line]
        line.remove(before)
        line.add(after)

    def due(self, now: float) -> list[Ticket]:
        """The tickets whose deadline has passed, in order; the caller withdraws them."""
        gone = takewhile(lambda key: key[0] <= now, self._deadlines)
        return sorted((self._tickets[number] for _, number in gone), key=lambda t: t.key)

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline of a waiting ticket, if any has one."""
        soonest = self._deadlines.first
        return None if soonest is None else soonest[0]

    def rename(self, canonical: Callable[[Ticket], Request]) -> None:
        """Replace the requests by equivalent ones, after GPU models were added or removed.

        Requests of one line may come to different lines.
        """
        tickets = sorted(self._tickets)
        for ticket in [self.withdraw(number) for number in tickets]:
            self.enter(replace(ticket, request=canonical(ticket)))

    def serve(
        self,
        attempt: Callable[[Attempt], Rejection | None],
        may_fit: Callable[[Line], bool],
        lines: Iterable[Line],
        now: float = 0.0,
    ) -> None:
        """Try the heads of some lines in fair order until none can be placed.

        ``attempt`` places a ticket and withdraws it, or returns why it cannot be placed.
        ``may_fit`` tells whether it makes sense to try a line: it is asked again before each
        attempt, so that all lines of a shape are passed once one of them was refused for lack of
        room. A refusal for quota concerns the line only.

        After a refusal for room, the ticket of the line with the shortest lease is tried: it may
        fit where a reservation keeps the others out.

        A pass places everything that can be placed: a second one right after it places nothing.
        """
        heap = [(self.order_of(line), line.key) for line in lines]
        heapify(heap)
        while heap:
            order, key = heappop(heap)
            line = self._lines.get(key)
            if line is None or not may_fit(line):
                continue
            current = self.order_of(line)
            if current != order:  # the tenant's share has grown, or the head has changed
                heappush(heap, (current, key))
            elif self._serve_one(line, attempt, now) and key in self._lines:
                heappush(heap, (self.order_of(line), key))

    def _serve_one(
        self, line: Line, attempt: Callable[[Attempt], Rejection | None], now: float
    ) -> bool:
        """Place one ticket of a line; returns whether that was possible."""
        ticket = self._next(line, now)
        if ticket is not None:
            refusal = attempt(Attempt(ticket, by_lease=False))
            if refusal is None:
                return True
            if refusal.reason is Reason.QUOTA:
                return False
        lease = line.shortest_lease
        if lease is None:
            return False
        shortest = self._tickets[lease[1]]
        if shortest.held_until is not None and shortest.held_until > now:
            return False
        return attempt(Attempt(shortest, by_lease=True)) is None

    def _next(self, line: Line, now: float) -> Ticket | None:
        """The first ticket of a line that is not held back."""
        for number in line:
            ticket = self._tickets[number]
            if ticket.held_until is None or ticket.held_until <= now:
                return ticket
        return None

    def order_of(self, line: Line) -> Order:
        """The place of a line in the fair order: that of its first ticket."""
        head = line.head
        assert head is not None  # a line without tickets is dropped
        return self.order(self._tickets[head])

    # Overtaking

    def placed(self, geometry: Geometry, requested: float) -> None:
        """Note that a request made at this time was placed on a GPU of this model."""
        if requested > self._latest.get(geometry, -math.inf):
            self._latest[geometry] = requested

    def forget(self, geometry: Geometry) -> None:
        """Forget a GPU model that no node has."""
        self._latest.pop(geometry, None)

    def was_overtaken(self, ticket: Ticket) -> bool:
        """Whether a later request got room on a GPU model that this one could use."""
        latest = (self._latest.get(g, -math.inf) for g in self.shares.models(ticket.request))
        return max(latest, default=-math.inf) > ticket.entered

    @property
    def latest(self) -> dict[Geometry, float]:
        """By GPU model: the time of the latest request that was placed."""
        return dict(self._latest)

    # Reading

    def ticket(self, number: int) -> Ticket:
        """The waiting ticket with this number."""
        try:
            return self._tickets[number]
        except KeyError:
            raise SlicewiseError(
                f"no ticket {number} is waiting: it was served, gave up, or never was"
            ) from None

    def numbers(self, tenant: str | None = None, after: int | None = None) -> Iterator[int]:
        """The numbers of the tickets of a tenant, or of all, in ascending order, after one."""
        mark = (-math.inf, 0) if after is None else (0, after)
        if tenant is None:
            found = list(self._numbers.values())
        else:
            found = [self._numbers[tenant]] if tenant in self._numbers else []
        return (number for _, number in merge(*(keys.above(mark) for keys in found)))

    def order(self, ticket: Ticket) -> Order:
        """The place of a ticket in the fair order, at the present usage of its tenant."""
        first = self._numbers[ticket.tenant].first
        assert first is not None  # the ticket itself waits
        return self.shares.order(
            ticket.tenant, ticket.request, ticket.count, ticket.priority, ticket.number, first[1]
        )

    def position(self, number: int) -> int:
        """How many tickets of its line are ahead of a ticket, apart from those held back."""
        ticket = self.ticket(number)
        return self._lines[ticket.line].position(ticket)

    def lines(self) -> list[Line]:
        """The lines in fair order."""
        return sorted(self._lines.values(), key=self.order_of)

    def in_order(self, lines: Iterable[Line]) -> Iterator[Line]:
        """Some lines in fair order; the first ones cost less than to sort all of them."""
        heap = [(self.order_of(line), line.key) for line in lines]
        heapify(heap)
        while heap:
            yield self._lines[heappop(heap)[1]]

    def each_line(self) -> Iterable[Line]:
        """The lines in no particular order."""
        return self._lines.values()

    def by_request(self) -> Iterable[tuple[Request, Iterable[Line]]]:
        """The lines for each request, in no particular order."""
        return ((request, lines.values()) for request, lines in self._by_request.items())

    @property
    def oldest(self) -> Ticket | None:
        """The ticket that entered first."""
        first = self._ages.first
        return None if first is None else self._tickets[first[1]]

    def line(self, key: LineKey) -> Line | None:
        """The line of a tenant and shape, if any of its requests waits."""
        return self._lines.get(key)

    def lines_of(self, tenant: str) -> int:
        """The number of lines of a tenant."""
        return self._lines_of[tenant]

    @property
    def line_count(self) -> int:
        """The number of lines."""
        return len(self._lines)

    @property
    def shapes(self) -> int:
        """The number of different shapes that are waited for."""
        return len({(key.request, key.instances) for key in self._lines})

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        return (self._tickets[number] for line in self.lines() for number in line)

    def __contains__(self, number: int) -> bool:
        return number in self._tickets
