"""The queue, compared with its definition, and its guarantees for waiting tickets."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slicewise import (
    Cluster,
    Geometry,
    Instance,
    Reason,
    Rejection,
    Request,
    Scheduler,
    SlicewiseError,
    Ticket,
)
from slicewise.lab import waiting_room
from slicewise.lab.waiting_room import Attempts, Discipline, WaitingRoom

SIZES = {f"{size}": size for size in (1, 2, 4, 8)}
"""Tickets request units of a store of limited size."""


def refuse(ticket: Ticket, reason: Reason = Reason.CAPACITY) -> Rejection:
    return Rejection(ticket.request, reason, "no")


@dataclass
class Store:
    """A stand-in for a cluster: units, with a quota per tenant."""

    free: int
    quota: int = 1_000_000
    held: Counter[str] = field(default_factory=Counter)
    tried: list[int] = field(default_factory=list)

    def place(self, ticket: Ticket) -> int | Rejection:
        self.tried.append(ticket.number)
        units = SIZES[str(ticket.request)] * ticket.count
        if self.held[ticket.tenant] + units > self.quota:
            return refuse(ticket, Reason.QUOTA)
        if units > self.free:
            return refuse(ticket)
        self.free -= units
        self.held[ticket.tenant] += units
        return units


@dataclass
class ReferenceQueue:
    """The definition: a sorted list, walked from the head."""

    discipline: Discipline
    tickets: list[Ticket] = field(default_factory=list)
    overtaken: Counter[int] = field(default_factory=Counter)

    def enter(self, ticket: Ticket) -> None:
        self.tickets.append(ticket)
        self.tickets.sort(key=lambda each: (-each.priority, each.number))

    def withdraw(self, number: int) -> Ticket:
        (ticket,) = (each for each in self.tickets if each.number == number)
        self.tickets.remove(ticket)
        return ticket

    def expired(self, now: float) -> list[Ticket]:
        gone = [each for each in self.tickets if each.deadline is not None and each.deadline <= now]
        self.tickets = [each for each in self.tickets if each not in gone]
        return gone

    def serve(self, place: Callable[[Ticket], int | Rejection]) -> list[tuple[Ticket, int]]:
        served = []
        waiting_for_room: list[Ticket] = []
        at_quota: set[str] = set()
        for ticket in list(self.tickets):
            if len(waiting_for_room) > self.discipline.backfill or any(
                self.overtaken[each.number] >= self.discipline.overtakes
                for each in waiting_for_room
            ):
                break
            if ticket.tenant in at_quota:
                continue
            if ticket.tenant in {each.tenant for each in waiting_for_room}:
                waiting_for_room.append(ticket)
                continue
            outcome = place(ticket)
            if not isinstance(outcome, Rejection):
                served.append((ticket, outcome))
                self.tickets.remove(ticket)
                self.overtaken.update(each.number for each in waiting_for_room)
            elif outcome.reason is Reason.QUOTA:
                at_quota.add(ticket.tenant)
            else:
                waiting_for_room.append(ticket)
        return served


class QueueComparison(RuleBasedStateMachine):
    """Runs the same operations on the queue and its definition, and compares them."""

    def __init__(self) -> None:
        super().__init__()
        self.discipline = Discipline()
        self.room, self.slow = WaitingRoom(self.discipline), ReferenceQueue(self.discipline)
        self.store, self.shop = Store(0), Store(0)
        self.numbers = 0
        self.now = 0.0

    @precondition(lambda self: not self.numbers)
    @rule(
        backfill=st.sampled_from([0, 1, 3, 20]),
        overtakes=st.sampled_from([0, 1, 2, 16]),
        quota=st.sampled_from([8, 20, 1_000_000]),
    )
    def begin(self, backfill: int, overtakes: int, quota: int) -> None:
        self.discipline = Discipline(backfill, overtakes)
        self.room, self.slow = WaitingRoom(self.discipline), ReferenceQueue(self.discipline)
        self.store, self.shop = Store(0, quota), Store(0, quota)

    @rule(
        size=st.sampled_from(sorted(SIZES)),
        count=st.integers(1, 2),
        tenant=st.sampled_from("abcdef"),
        priority=st.integers(0, 2),
        patience=st.none() | st.integers(0, 5),
        gap=st.integers(1, 3),
    )
    def enter(
        self, size: str, count: int, tenant: str, priority: int, patience: int | None, gap: int
    ) -> None:
        self.numbers += gap
        deadline = None if patience is None else self.now + patience
        ticket = Ticket(self.numbers, Request(size), count, tenant, priority, self.now, deadline)
        self.room.enter(ticket)
        self.slow.enter(ticket)

    @rule(choice=st.integers(0, 1_000_000))
    def withdraw(self, choice: int) -> None:
        if self.slow.tickets:
            number = self.slow.tickets[choice % len(self.slow.tickets)].number
            assert self.room.withdraw(number) == self.slow.withdraw(number)

    @rule(hours=st.integers(0, 3))
    def advance_time(self, hours: int) -> None:
        self.now += hours
        assert self.room.expired(self.now) == self.slow.expired(self.now)

    @rule(units=st.integers(0, 12), tenant=st.sampled_from("abcdef"))
    def release_units(self, units: int, tenant: str) -> None:
        for store in (self.store, self.shop):
            store.free += units
            store.held[tenant] = max(0, store.held[tenant] - units)
        self.serve()

    @rule()
    def serve(self) -> None:
        before = list(self.room)
        limit = 1 + self.discipline.backfill
        self.store.tried, self.shop.tried = [], []
        served = self.room.serve(self.store.place)
        assert served == self.slow.serve(self.shop.place)
        assert self.store.tried == self.shop.tried
        tickets = [ticket for ticket, _ in served]
        blocked = [n for n in self.store.tried if n in self.room]
        assert len(blocked) <= limit + len(set("abcdef"))
        for ticket in tickets:
            ahead = before[: before.index(ticket)]
            assert all(each in tickets for each in ahead if each.tenant == ticket.tenant)
        if not self.discipline.backfill and self.store.quota == 1_000_000:
            assert tickets == before[: len(tickets)], "first in, first out"
        self.store.tried = []
        assert self.room.serve(self.store.place) == [], "all were served that may be"

    @invariant()
    def agree(self) -> None:
        assert list(self.room) == self.slow.tickets
        assert len(self.room) == len(self.slow.tickets)
        for position, ticket in enumerate(self.slow.tickets):
            assert self.room.position(ticket.number) == position
            assert self.room.ticket(ticket.number) == ticket
            overtaken = self.room.overtaken(ticket.number)
            assert overtaken == self.slow.overtaken[ticket.number] <= self.discipline.overtakes
        deadlines = [each.deadline for each in self.slow.tickets if each.deadline is not None]
        assert self.room.next_deadline == min(deadlines, default=None)


TestTwins = QueueComparison.TestCase
TestTwins.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def numbers(served: list[tuple[Ticket, int]]) -> list[int]:
    return [ticket.number for ticket, _ in served]


def room_of(*sizes: int, backfill: int = 0, overtakes: int = 16) -> WaitingRoom:
    """Return a queue with tickets 0, 1, ... of different tenants, for these numbers of units."""
    room = WaitingRoom(Discipline(backfill, overtakes))
    for number, size in enumerate(sizes):
        room.enter(Ticket(number, Request(str(size)), tenant=f"t{number}"))
    return room


def test_fifo_lets_no_ticket_pass_a_blocked_head() -> None:
    room = room_of(1, 8, 1)
    store = Store(4)
    assert numbers(room.serve(store.place)) == [0]
    assert store.tried == [0, 1]
    store.free = 9
    assert numbers(room.serve(store.place)) == [1, 2]
    assert len(room) == 0
    assert room.serve(store.place) == []
    assert WaitingRoom().discipline == Discipline(0, 16)


def test_backfill_tries_a_limited_number_of_tickets() -> None:
    store = Store(3)
    room = room_of(8, 4, 2, 4, 1, backfill=2)
    assert numbers(room.serve(store.place)) == [2], "0, 1 and 3 are blocked: 4 is out of sight"
    assert store.tried == [0, 1, 2, 3]
    room.withdraw(1)
    assert numbers(room.serve(store.place)) == [4]


def test_a_ticket_is_overtaken_a_limited_number_of_times() -> None:
    room = room_of(8, 1, 4, 1, 1, 1, backfill=10, overtakes=2)
    store = Store(3)
    assert numbers(room.serve(store.place)) == [1, 3]
    assert [room.overtaken(number) for number in (0, 2, 4)] == [2, 1, 0]
    assert store.tried == [0, 1, 2, 3], "4 and 5 would have fitted"
    store.free = 7
    assert room.serve(store.place) == []
    store.free = 12
    assert numbers(room.serve(store.place)) == [0, 2]


def test_overtaken_tickets_are_reported_once() -> None:
    room = room_of(8, 4, 1, 2, backfill=10)
    assert numbers(room.serve(Store(3).place)) == [2, 3]
    room.withdraw(1)
    assert room.take_overtaken() == {0: 2}, "who has left is not asked about"
    assert room.take_overtaken() == {}
    room.set_overtaken(0, 16)
    assert room.overtaken(0) == 16


def test_a_tenant_is_served_strictly_in_order() -> None:
    room = WaitingRoom(Discipline(backfill=2))
    for number, (tenant, size) in enumerate([("a", 8), ("a", 1), ("b", 1), ("a", 1), ("b", 1)]):
        room.enter(Ticket(number, Request(str(size)), tenant=tenant))
    store = Store(4)
    assert numbers(room.serve(store.place)) == [2], "three of a tenant's stay behind: no more"
    assert store.tried == [0, 2]
    assert [room.overtaken(number) for number in (0, 1, 3)] == [1, 1, 0]


def test_higher_priority_first_then_the_tenants_other_tickets() -> None:
    room = WaitingRoom(Discipline(backfill=5))
    room.enter(Ticket(1, Request("1"), tenant="a"))
    room.enter(Ticket(2, Request("8"), tenant="a", priority=1))
    room.enter(Ticket(3, Request("2"), tenant="b", priority=1))
    assert [ticket.number for ticket in room] == [2, 3, 1]
    assert [room.position(number) for number in (1, 2, 3)] == [2, 0, 1]
    assert numbers(room.serve(Store(3).place)) == [3]
    assert room.overtaken(1) == 0, "the lower priority was behind anyway"
    assert numbers(room.serve(Store(9).place)) == [2, 1]


def test_a_tenant_at_its_quota_blocks_no_other_tenant() -> None:
    room = WaitingRoom()  # first in, first out
    for number in range(1000):
        room.enter(Ticket(number, Request("2"), tenant="greedy"))
    room.enter(Ticket(1000, Request("2"), tenant="modest"))
    room.enter(Ticket(1001, Request("8"), tenant="other"))
    room.enter(Ticket(1002, Request("1"), tenant="last"))
    store = Store(8, quota=8)
    store.held["greedy"] = 7
    assert numbers(room.serve(store.place)) == [1000]
    assert store.tried == [0, 1000, 1001], "one look at the tenant, whatever it has waiting"
    assert room.overtaken(0) == 0


def test_an_exception_while_placing_keeps_the_remaining_tickets() -> None:
    room = room_of(1, 1, 1)

    def place(ticket: Ticket) -> int:
        if ticket.number == 1:
            raise SlicewiseError("out of order")
        return 1

    with pytest.raises(SlicewiseError, match="out of order"):
        room.serve(place)
    assert [ticket.number for ticket in room] == [1, 2]


def test_tickets_expire_at_their_deadline() -> None:
    room = WaitingRoom()
    assert room.next_deadline is None
    assert room.expired(math.inf) == []
    for number, deadline in enumerate([7.5, None, 3.0, 3.0]):
        room.enter(Ticket(number, Request("1"), priority=number, deadline=deadline))
    assert room.next_deadline == 3.0
    assert room.expired(2.9) == []
    assert [ticket.number for ticket in room.expired(3.0)] == [3, 2]
    assert room.next_deadline == 7.5
    room.withdraw(0)
    assert room.next_deadline is None
    assert 1 in room
    assert 0 not in room


def test_invalid_arguments_are_refused() -> None:
    room = WaitingRoom()
    room.enter(Ticket(4, Request("1")), overtaken=3)
    assert room.overtaken(4) == 3
    with pytest.raises(SlicewiseError, match="ticket 4 is waiting already"):
        room.enter(Ticket(4, Request("2")))
    for ask in (room.withdraw, room.ticket, room.position, room.overtaken):
        with pytest.raises(SlicewiseError, match="no ticket 5 is waiting"):
            ask(5)
    with pytest.raises(SlicewiseError, match="ticket 1 asks for 0 instances"):
        Ticket(1, Request("1"), 0)
    for never in (math.nan, math.inf):
        with pytest.raises(SlicewiseError, match="leave it out to wait for ever"):
            Ticket(1, Request("1"), deadline=never)
    with pytest.raises(SlicewiseError, match="backfill must be 0 to 1000000, not -1"):
        Discipline(-1)
    with pytest.raises(SlicewiseError, match="overtakes must be 0 to 1000000, not 1000001"):
        Discipline(1, 1_000_001)


def test_a_rejected_request_is_not_tried_again_until_slices_are_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []
    free = 2

    def place(request: Request, count: int) -> str | Rejection:
        tried.append((str(request), count))
        fits = SIZES[str(request)] * count <= free
        return "here" if fits else Rejection(request, Reason.CAPACITY, "no")

    attempts = Attempts(place)
    assert isinstance(attempts(Request("4")), Rejection)
    assert isinstance(attempts(Request("1"), 3), Rejection)
    assert isinstance(attempts(Request("1"), 4), Rejection)
    assert isinstance(attempts(Request("4")), Rejection)
    assert attempts(Request("1"), 2) == "here"
    assert tried == [("4", 1), ("1", 3), ("1", 2)]
    free = 4
    attempts.room_appeared()
    assert attempts(Request("4")) == "here"
    monkeypatch.setattr(waiting_room, "_REMEMBERED_REQUESTS", 1)
    free = 0
    tried.clear()
    for size in ("1", "2", "2", "1"):
        attempts(Request(size))
    assert tried == [("1", 1), ("2", 1), ("1", 1)], "it remembers only so many"


@pytest.mark.parametrize("policy", ["mfi", "least-lost", "best-fit", "round-robin"])
def test_the_memory_of_rejections_does_not_change_placements(policy: str, a100: Geometry) -> None:
    """Serving with and without the memory of rejections gives the same placements."""

    def served(remember: bool) -> list[tuple[int, tuple[Instance, ...]]]:
        scheduler = Scheduler(Cluster.of(a100, 2), policy)
        attempts = Attempts(lambda request, count: scheduler.submit_all(request, count, waits=True))
        room = WaitingRoom(Discipline(8))
        done: list[tuple[int, tuple[Instance, ...]]] = []
        held: list[Instance] = []
        profiles = [profile.name for profile in a100.plain_profiles]
        for number in range(200):
            want = Request(profiles[number * 7 % len(profiles)])
            room.enter(Ticket(number, want, 1 + number % 2, tenant=str(number)))
            if number % 3 and held:
                scheduler.release(held.pop(number * 5 % len(held)))
                attempts.room_appeared()
            if not remember:
                attempts.room_appeared()
            for ticket, instances in room.serve(
                lambda ticket: attempts(ticket.request, ticket.count)
            ):
                done.append((ticket.number, instances))
                held += instances
        return done

    assert served(True) == served(False)
    assert len(served(True)) > 20


def test_a_long_queue_is_not_walked_completely() -> None:
    """Work is counted, not timed: tries per pass, and keys moved per change."""
    room = WaitingRoom(Discipline(backfill=8))
    count = 16_000
    for number in range(count):
        tenant = f"t{number % 1000}"
        room.enter(Ticket(number, Request("8"), tenant=tenant, priority=number % 3))
    assert max(map(len, room._order._blocks)) <= 512
    assert room.position(count - 1) == count - 1, "the last of the lowest priority"
    assert room.position(2) == 0
    store = Store(0)
    assert room.serve(store.place) == []
    assert len(store.tried) == 9
    for number in range(0, count, 2):
        room.withdraw(number)
    assert len(room) == count // 2
    store.free = 8 * count
    assert len(room.serve(store.place)) == count // 2
    assert not room._lines
    assert room._heads.first is None
