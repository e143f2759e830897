"""The waiting room: requests that found no place wait there, in order, until room appears.

The order is by priority, the highest first, and then by number. A ticket is served when its turn
has come and there is room for it. Where *backfill* is allowed, tickets further back may be served
while the head is blocked, but none is overtaken more often than the discipline says, and the
tickets of one tenant never overtake each other. No clock: time is a number that is passed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Generic, TypeVar

from slicewise.core.errors import SlicewiseError
from slicewise.core.request import Reason, Rejection, Request
from slicewise.engine.sortedkeys import Key, SortedKeys

T = TypeVar("T")

_MOST = 1_000_000
"""Far beyond what makes sense, for both numbers of a discipline."""

_REMEMBERED_REQUESTS = 1024
"""Requests come from outside, so only this many refusals are remembered."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request that waits, and what its place in the order depends on."""

    number: int
    """Given by the caller, ever growing: of equal priority, the lower number is served first."""
    request: Request
    count: int = 1
    """So many instances of it, all or nothing."""
    tenant: str = ""
    """Tickets of one tenant are served strictly in order. The empty name is a tenant like any
    other: where everybody is on their own, as in the simulator, give each a name of its own."""
    priority: int = 0
    """Higher is served first."""
    entered: float = 0.0
    deadline: float | None = None
    """When it gives up; None waits for ever."""

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


@dataclass(frozen=True, slots=True)
class Discipline:
    """How a queue is served: strictly in order, as in the paper, unless backfill is allowed."""

    backfill: int = 0
    """How many tickets behind a blocked head may be looked at; 0 is first in, first out."""
    overtakes: int = 16
    """How often a ticket may be overtaken before nothing may pass it any more."""

    def __post_init__(self) -> None:
        for name, value in (("backfill", self.backfill), ("overtakes", self.overtakes)):
            if not 0 <= value <= _MOST:
                raise SlicewiseError(f"{name} must be 0 to {_MOST}, not {value}")


@dataclass(slots=True)
class _Waiting:
    """A ticket in the room."""

    ticket: Ticket
    key: Key
    overtaken: int


class WaitingRoom:
    """Tickets in order, and who of them is served when room appears."""

    def __init__(self, discipline: Discipline | None = None) -> None:
        self.discipline = discipline or Discipline()
        self._waiting: dict[int, _Waiting] = {}
        self._order = SortedKeys()
        self._lines: dict[str, SortedKeys] = {}
        """By tenant: its tickets, of which only the first can be served next."""
        self._heads = SortedKeys()
        """The first of every line."""
        self._deadlines = SortedKeys()
        self._freshly_overtaken: dict[int, int] = {}
        """By number, of those still waiting, so that it stays small when nobody asks."""

    def enter(self, ticket: Ticket, overtaken: int = 0) -> None:
        """Begin to wait; ``overtaken`` is for a ticket that waited before, in another room."""
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
        """Stop waiting."""
        waiting = self._find(number)
        self._remove(waiting)
        return waiting.ticket

    def expired(self, now: float) -> list[Ticket]:
        """Take out the tickets whose deadline has come, and return them in order."""
        gone = []
        while (soonest := self._deadlines.first) is not None and soonest[0] <= now:
            waiting = self._waiting[soonest[1]]
            self._remove(waiting)
            gone.append(waiting)
        return [waiting.ticket for waiting in sorted(gone, key=lambda waiting: waiting.key)]

    @property
    def next_deadline(self) -> float | None:
        """When the next ticket gives up, if any ever does."""
        soonest = self._deadlines.first
        return None if soonest is None else soonest[0]

    def serve(self, place: Callable[[Ticket], T | Rejection]) -> list[tuple[Ticket, T]]:
        """Go through the tickets in order and take out those that ``place`` finds a place for.

        Once one is refused, the next ones are looked at as well, until more than ``backfill``
        stay behind, or one of those has been overtaken as often as it may be. A ticket whose
        tenant has an earlier one that was refused is passed by untried; it counts as one that
        stays behind.

        A refusal for ``Reason.QUOTA`` is the tenant's own affair: its line is left out, and
        whoever passes it has not overtaken anybody.

        So a pass ends with all served that may be: another one right after it serves nobody.
        When ``place`` raises, those it has placed are out of the room and the others still in.
        """
        served: list[tuple[Ticket, T]] = []
        passed: list[_Waiting] = []
        most = 0  # how often the most overtaken of those has been
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
        """The waiting ticket of that number."""
        return self._find(number).ticket

    def position(self, number: int) -> int:
        """How many tickets are before this one; 0 at the head."""
        return self._order.rank(self._find(number).key)

    def overtaken(self, number: int) -> int:
        """How often a waiting ticket has been overtaken so far."""
        return self._find(number).overtaken

    def set_overtaken(self, number: int, times: int) -> None:
        """Take over how often a waiting ticket was overtaken elsewhere."""
        self._find(number).overtaken = times

    def take_overtaken(self) -> dict[int, int]:
        """Who of those waiting was overtaken since this was last asked, and how often by now."""
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
    """Tries to place, and remembers what was refused until room appears.

    Placing never opens room. So what was refused is refused again as long as nothing is released,
    and the same request, for as many instances or more, need not be tried. A strict policy, which
    might pick another GPU the next time, also has to wait for room.
    """

    def __init__(self, place: Callable[[Request, int], T | Rejection]) -> None:
        self._place = place
        self._refused: dict[Request, tuple[int, Rejection]] = {}
        """By request: the fewest instances that were refused, and the refusal."""

    def __call__(self, request: Request, count: int = 1) -> T | Rejection:
        """Place so many instances, or say why not."""
        known = self._refused.get(request)
        if known is not None and count >= known[0]:
            return known[1]
        outcome = self._place(request, count)
        if isinstance(outcome, Rejection):
            if len(self._refused) == _REMEMBERED_REQUESTS:
                self._refused.clear()
            self._refused[request] = count, outcome
        return outcome

    def room_appeared(self) -> None:
        """Something was released, moved or added: what was refused is worth a try again."""
        self._refused.clear()
