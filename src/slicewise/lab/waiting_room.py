"""A queue in one line, as the service once had it: the laboratory compares with it.

Tickets are ordered by priority, the highest first, and then by number. A ticket is served when its
turn has come and there is room for it. With *backfill*, tickets further back may be served while
the head is blocked. No ticket is overtaken more often than the discipline allows, and the tickets
of one tenant never overtake each other. There is no clock: callers pass the time as a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Generic, TypeVar

from slicewise.core.errors import SlicewiseError
from slicewise.core.request import Reason, Rejection, Request
from slicewise.engine.queue import Ticket
from slicewise.engine.sortedkeys import Key, SortedKeys

T = TypeVar("T")

UNLIMITED = 1_000_000
"""The largest value of each setting of a discipline, far above any useful one."""

_REMEMBERED_REQUESTS = 1024
"""The limit on remembered refusals: clients choose the requests, so memory must be bounded."""


@dataclass(frozen=True, slots=True)
class Discipline:
    """How a queue is served: strictly in order, as in the paper, or with backfill."""

    backfill: int = 0
    """How many tickets behind a blocked head may be tried; 0 is first in, first out."""
    overtakes: int = 16
    """How often a ticket may be overtaken; after that, no ticket may pass it."""

    def __post_init__(self) -> None:
        for name, value in (("backfill", self.backfill), ("overtakes", self.overtakes)):
            if not 0 <= value <= UNLIMITED:
                raise SlicewiseError(f"{name} must be 0 to {UNLIMITED}, not {value}")


@dataclass(slots=True)
class _Waiting:
    ticket: Ticket
    key: Key
    overtaken: int


class WaitingRoom:
    """The waiting tickets in order; decides which of them are served when room appears."""

    def __init__(self, discipline: Discipline | None = None) -> None:
        self.discipline = discipline or Discipline()
        self._waiting: dict[int, _Waiting] = {}
        self._order = SortedKeys()
        self._lines: dict[str, SortedKeys] = {}
        """The tickets of each tenant; only the first can be served next."""
        self._heads = SortedKeys()
        """The first ticket of each line."""
        self._deadlines = SortedKeys()
        self._freshly_overtaken: dict[int, int] = {}
        """By ticket number; only waiting tickets, so that it stays small if it is never read."""

    def enter(self, ticket: Ticket, overtaken: int = 0) -> None:
        """Add a ticket; ``overtaken`` carries over the count of one that waited in another room."""
        if ticket.number in self._waiting:
            raise SlicewiseError(f"ticket {ticket.number} is waiting already")
        waiting = _Waiting(ticket, (-ticket.priority, ticket.number), overtaken)
        self._waiting[ticket.number] = waiting
        self._order.add(waiting.key)
        if ticket.deadline is not None:
            self._deadlines.add((ticket.deadline, ticket.number))
        line = self._lines.get(ticket.tenant)
        if line is None:
            line = self._lines[ticket.tenant] = SortedKeys()
        head = line.first
        line.add(waiting.key)
        if head is None or waiting.key < head:
            if head is not None:
                self._heads.remove(head)
            self._heads.add(waiting.key)

    def withdraw(self, number: int) -> Ticket:
        """Remove a ticket and return it."""
        waiting = self._find(number)
        self._remove(waiting)
        return waiting.ticket

    def expired(self, now: float) -> list[Ticket]:
        """Remove the tickets whose deadline has passed and return them in order."""
        gone = []
        while (soonest := self._deadlines.first) is not None and soonest[0] <= now:
            waiting = self._waiting[soonest[1]]
            self._remove(waiting)
            gone.append(waiting)
        return [waiting.ticket for waiting in sorted(gone, key=lambda waiting: waiting.key)]

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline of a waiting ticket, if any has one."""
        soonest = self._deadlines.first
        return None if soonest is None else soonest[0]

    def serve(self, place: Callable[[Ticket], T | Rejection]) -> list[tuple[Ticket, T]]:
        """Try the tickets in order, and remove and return those that ``place`` can place.

        After a refusal, the following tickets are tried too, until more than ``backfill`` tickets
        have been passed, or one of these has reached its limit of overtakes. A ticket is passed
        without a try if an earlier ticket of its tenant was refused.

        A refusal for ``Reason.QUOTA`` concerns only the tenant: its tickets are skipped, and
        passing them does not count as overtaking.

        One pass serves every ticket that may be served: a second pass right after it serves none.
        If ``place`` raises, the tickets placed so far are removed and the others keep waiting.
        """
        served: list[tuple[Ticket, T]] = []
        passed: list[_Waiting] = []
        most = 0  # the largest overtaken count of the passed tickets
        behind: list[Key] = []  # a heap: the next ticket of every line whose first was refused
        head = self._heads.first
        while not passed or (
            len(passed) <= self.discipline.backfill and most < self.discipline.overtakes
        ):
            if behind and (head is None or behind[0] < head):
                waiting = self._waiting[heappop(behind)[1]]
            elif head is not None:
                waiting = self._waiting[head[1]]
                outcome = place(waiting.ticket)
                if not isinstance(outcome, Rejection):
                    served.append((waiting.ticket, outcome))
                    self._remove(waiting)
                    for other in passed:
                        other.overtaken += 1
                        self._freshly_overtaken[other.ticket.number] = other.overtaken
                        most = max(most, other.overtaken)
                head = self._heads.after(waiting.key)
                if not isinstance(outcome, Rejection) or outcome.reason is Reason.QUOTA:
                    continue
            else:
                break
            most = max(most, waiting.overtaken)
            passed.append(waiting)
            following = self._lines[waiting.ticket.tenant].after(waiting.key)
            if following is not None:
                heappush(behind, following)
        return served

    def ticket(self, number: int) -> Ticket:
        """The waiting ticket with this number."""
        return self._find(number).ticket

    def position(self, number: int) -> int:
        """The number of tickets ahead of this one; 0 at the head."""
        return self._order.rank(self._find(number).key)

    def overtaken(self, number: int) -> int:
        """How often a waiting ticket has been overtaken."""
        return self._find(number).overtaken

    def set_overtaken(self, number: int, times: int) -> None:
        """Set how often a waiting ticket has been overtaken, from a count kept elsewhere."""
        self._find(number).overtaken = times

    def take_overtaken(self) -> dict[int, int]:
        """The total counts of waiting tickets overtaken since the last call, by number."""
        fresh, self._freshly_overtaken = self._freshly_overtaken, {}
        return fresh

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Ticket]:
        return (self._waiting[number].ticket for _, number in self._order)

    def __contains__(self, number: int) -> bool:
        return number in self._waiting

    def _find(self, number: int) -> _Waiting:
        try:
            return self._waiting[number]
        except KeyError:
            raise SlicewiseError(
                f"no ticket {number} is waiting: it was served, gave up, or never was"
            ) from None

    def _remove(self, waiting: _Waiting) -> None:
        ticket = waiting.ticket
        del self._waiting[ticket.number]
        self._freshly_overtaken.pop(ticket.number, None)
        self._order.remove(waiting.key)
        if ticket.deadline is not None:
            self._deadlines.remove((ticket.deadline, ticket.number))
        line = self._lines[ticket.tenant]
        if line.first == waiting.key:
            self._heads.remove(waiting.key)
            following = line.after(waiting.key)
            if following is None:
                del self._lines[ticket.tenant]
                return
            self._heads.add(following)
        line.remove(waiting.key)


class Attempts(Generic[T]):
    """Tries to place requests, and remembers refusals until room appears.

    Placing never creates room. So a refused request would be refused again until something is
    released, and the same request for as many instances or more is not tried. This also holds for
    a strict policy, although it might pick another GPU the next time.
    """

    def __init__(self, place: Callable[[Request, int], T | Rejection]) -> None:
        self._place = place
        self._refused: dict[Request, tuple[int, Rejection]] = {}
        """By request: the smallest number of instances that was refused, and the refusal."""

    def __call__(self, request: Request, count: int = 1) -> T | Rejection:
        """Place ``count`` instances, or return the rejection."""
        if self.refuses(request, count):
            return self._refused[request][1]
        outcome = self._place(request, count)
        if isinstance(outcome, Rejection):
            if len(self._refused) == _REMEMBERED_REQUESTS:
                self._refused.clear()
            self._refused[request] = count, outcome
        return outcome

    def refuses(self, request: Request, count: int = 1) -> bool:
        """Whether it is known that the request finds no room."""
        known = self._refused.get(request)
        return known is not None and count >= known[0]

    def room_appeared(self) -> None:
        """Forget all refusals, after instances were released or moved, or GPUs added."""
        self._refused.clear()
