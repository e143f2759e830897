"""Disciplines of waiting: tenants on a cluster, slot by slot, with the queues to compare.

`InRoom` waits in one line of all tenants, `InLines` in the fair lines of the service.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np

from slicewise.core.cluster import Instance
from slicewise.core.errors import UnknownNameError
from slicewise.core.idset import NONE
from slicewise.core.request import Rejection, Request
from slicewise.core.states import GpuState
from slicewise.engine.dispatcher import Dispatcher
from slicewise.engine.queue import Line, Queue, Ticket
from slicewise.engine.reservation_rules import ReservationRules
from slicewise.engine.reservations import LineKey, Reservations, Window
from slicewise.engine.scheduler import Scheduler
from slicewise.engine.shares import Entitlement, Shares
from slicewise.lab.tenants import Asked, Scenario
from slicewise.lab.waiting_room import UNLIMITED, Attempts, Discipline, WaitingRoom


class Leases(Enum):
    """What the scheduler knows about the end of an instance."""

    NONE = "none"
    EARLY = "early"
    """A lease that is too long: the instance ends before it."""
    EXACT = "exact"


@dataclass(frozen=True)
class Way:
    """A way to wait that an experiment compares."""

    name: str
    summary: str
    room: Discipline | None = None
    """How one line of all tenants is served; None for fair lines with reservations."""
    leases: Leases = Leases.NONE
    reclaim: bool = False
    """Whether tenants have guarantees, for which instances of others end."""


WAYS = {
    way.name: way
    for way in (
        Way("fifo", "one line, strictly in order", Discipline()),
        Way("bounded", "one line, 32 may be passed, each 100 times", Discipline(32, 100)),
        Way("unlimited", "one line, any may be passed", Discipline(UNLIMITED, UNLIMITED)),
        Way("fair", "fair lines with reservations; no leases are known"),
        Way("fair-early", "fair, with leases up to three times too long", leases=Leases.EARLY),
        Way("fair-exact", "fair, with exact leases", leases=Leases.EXACT),
        Way("fair-reclaim", "fair, with guarantees that are reclaimed; no leases", reclaim=True),
    )
}
"""By name, in the order of the tables."""


def way(name: str) -> Way:
    """Return a discipline by name; the error for an unknown one names close names."""
    if name not in WAYS:
        raise UnknownNameError("discipline", name, WAYS)
    return WAYS[name]


class Watcher(Protocol):
    """Is told what becomes of requests."""

    def placed(self, asked: Asked, wait: int) -> None:
        """A request was placed after so many slots."""

    def gave_up(self, asked: Asked, wait: int) -> None:
        """A request gave up."""


class InUse(ABC):
    """A cluster in use by tenants: what runs, until when, and what waits."""

    def __init__(
        self, scheduler: Scheduler, scenario: Scenario, patience: int | None, watcher: Watcher
    ) -> None:
        self.scheduler = scheduler
        self.scenario = scenario
        self.watcher = watcher
        self.now = 0
        self.waiting: dict[int, Asked] = {}
        """By number."""
        self.waiting_kinds: Counter[int] = Counter()
        """How many wait for each profile."""
        self.slices = [0] * len(scenario.tenants)
        """Memory slices in use by tenant."""
        self.attempts = 0
        """How often the policy was asked for a place for a waiting request."""
        self.passes = 0
        """How often there were waiting requests when room had appeared."""
        self.lost = 0
        """Slices times slots of instances that were ended before their time."""
        self._patience = patience
        self._requests = scenario.requests
        self._owner: dict[int, int] = {}
        """By instance: the index of its tenant."""
        self._ending: defaultdict[int, list[Instance]] = defaultdict(list)
        self._due: defaultdict[int, list[int]] = defaultdict(list)
        """By slot: the requests whose patience is over."""
        self._fits = [
            np.array([_fits(state, request) for state in scheduler.cluster.states])
            for request in self._requests
        ]
        """By kind and state: whether such a GPU has a window."""
        self._fitting = [np.flatnonzero(fits) for fits in self._fits]

    def slot(self, now: int, arrivals: Iterable[Asked]) -> None:
        """Instances end, requests arrive, and those whose patience is over give up."""
        self.now = now
        ended = self._ending.pop(now, ())
        for instance in ended:
            self.scheduler.release(instance)
            self._ended(instance)
            self.slices[self._owner.pop(instance.id)] -= instance.size
        if ended:
            self._room_appeared()
            self._pass()
        for asked in arrivals:
            self.waiting[asked.number] = asked
            self.waiting_kinds[asked.kind] += 1
            if self._patience is not None:
                self._due[now + self._patience].append(asked.number)
            self._arrived(self._ticket(asked))
        gone = [number for number in self._due.pop(now, ()) if number in self.waiting]
        for number in gone:
            asked = self._left(number)
            self._withdraw(number)
            self.watcher.gave_up(asked, now - asked.slot)
        if gone:
            self._serve()

    @property
    def work(self) -> tuple[int, int, int]:
        """The passes, attempts and lost slices so far."""
        return self.passes, self.attempts, self.lost

    def open_windows(self) -> int:
        """How many requests wait although a window is open that no reservation keeps from them."""
        return sum(
            count for kind, count in self.waiting_kinds.items() if count and self._open(kind)
        )

    @abstractmethod
    def _ended(self, instance: Instance) -> None:
        """Note that an instance ended."""

    @abstractmethod
    def _room_appeared(self) -> None:
        """Forget refusals."""

    @abstractmethod
    def _arrived(self, ticket: Ticket) -> None:
        """Place a new request, or let it wait."""

    @abstractmethod
    def _withdraw(self, number: int) -> None:
        """Take out a waiting request that gave up."""

    @abstractmethod
    def _serve(self) -> None:
        """Place waiting requests for which there is room."""

    @abstractmethod
    def _asked(self) -> int:
        """How often the policy was asked for a place so far."""

    def _pass(self) -> None:
        if self.waiting:
            before = self._asked()
            self._serve()
            self.passes += 1
            self.attempts += self._asked() - before

    def _lease(self, asked: Asked) -> float | None:
        return None

    def _open(self, kind: int) -> bool:
        """Whether a GPU has a window for this kind of request, reserved ones left aside."""
        return bool((self.scheduler.cluster.first[self._fitting[kind]] < NONE).any())

    def _ticket(self, asked: Asked) -> Ticket:
        return Ticket(
            asked.number,
            self._requests[asked.kind],
            tenant=self.scenario.tenants[asked.tenant].name,
            entered=self.now,
            lease=self._lease(asked),
        )

    def _started(self, number: int, instance: Instance) -> None:
        """Note that a request was placed; its lifetime begins."""
        asked = self._left(number)
        self._ending[self.now + asked.lifetime].append(instance)
        self._owner[instance.id] = asked.tenant
        self.slices[asked.tenant] += instance.size
        if asked.number >= 0:  # or it was placed before, and had to make way
            self.watcher.placed(asked, self.now - asked.slot)

    def _left(self, number: int) -> Asked:
        asked = self.waiting.pop(number)
        self.waiting_kinds[asked.kind] -= 1
        return asked


def _fits(state: GpuState, request: Request) -> bool:
    return any(state.feasible_starts(p) for _, p in request.candidates(state.geometry))


class InRoom(InUse):
    """One line of all tenants, with or without backfill; the requests of a tenant stay in order."""

    def __init__(
        self,
        discipline: Discipline,
        scheduler: Scheduler,
        scenario: Scenario,
        patience: int | None,
        watcher: Watcher,
    ) -> None:
        super().__init__(scheduler, scenario, patience, watcher)
        self.room = WaitingRoom(discipline)
        self._attempts: Attempts[Instance] = Attempts(self._submit)
        self._submitted = 0

    def _ended(self, instance: Instance) -> None:
        pass

    def _room_appeared(self) -> None:
        self._attempts.room_appeared()

    def _arrived(self, ticket: Ticket) -> None:
        self.room.enter(ticket)
        if not self._attempts.refuses(ticket.request):  # or a pass would place nothing
            self._serve()

    def _withdraw(self, number: int) -> None:
        self.room.withdraw(number)

    def _serve(self) -> None:
        for ticket, instance in self.room.serve(lambda ticket: self._attempts(ticket.request)):
            self._started(ticket.number, instance)

    def _asked(self) -> int:
        return self._submitted

    def _submit(self, request: Request, count: int) -> Instance | Rejection:
        self._submitted += 1
        return self.scheduler.submit(request)


class InLines(InUse):
    """Fair lines with reservations: the tenancy of a dispatcher, as the service is."""

    def __init__(
        self,
        leases: Leases,
        rules: ReservationRules,
        scheduler: Scheduler,
        scenario: Scenario,
        patience: int | None,
        watcher: Watcher,
    ) -> None:
        super().__init__(scheduler, scenario, patience, watcher)
        self.leases = leases
        self.shares = Shares()
        for tenant in scenario.tenants:
            self.shares.entitle(tenant.name, Entitlement(tenant.weight))
        for node in scheduler.cluster.nodes:
            self.shares.add_gpus(node.geometry, len(node.gpus))
        self.queue = Queue(self.shares)
        self.reservations = Reservations(scheduler.cluster)
        self.dispatcher = Dispatcher(scheduler, self.queue, self.reservations, self, rules)
        self._known_end: dict[int, float] = {}
        """By instance, if its lease is known."""

    def slot(self, now: int, arrivals: Iterable[Asked]) -> None:
        """A slot as in any discipline; then windows are reserved for those that waited long."""
        super().slot(now, arrivals)
        while self.dispatcher.grant(now):
            pass

    def open_windows(self) -> int:
        """How many wait although a window is open that is their own or does not bind them."""
        falsely = super().open_windows()
        if len(self.reservations):
            falsely += sum(self._kept_for(line) for line in self.queue.lines())
        return falsely

    def _kept_for(self, line: Line) -> int:
        """How many of a line could use a reserved window now, and no other."""
        kind = self._requests.index(line.key.request)
        if self._open(kind):
            return 0  # they are counted already
        cluster, fits = self.scheduler.cluster, self._fits[kind]
        opens = [
            window.opens
            for _, pool in self.reservations
            for window in pool
            if window.opens is not None and fits[cluster.actual_state(window.gpu)]
        ]
        last = max(opens, default=-math.inf)
        own = any(fits[cluster.actual_state(w.gpu)] for w in self.reservations.of(line.key))
        shortest = line.shortest_lease
        if not own and (shortest is None or self.now + shortest[0] > last):
            return 0
        leases = (self.queue.ticket(number).lease for number in line)
        return sum(
            (own and position == 0) or (lease is not None and self.now + lease <= last)
            for position, lease in enumerate(leases)
        )

    # Callbacks of the dispatcher

    def over_quota(self, ticket: Ticket) -> Rejection | None:
        """Return None: there are no quotas."""

    def accept(self, ticket: Ticket, instances: tuple[Instance, ...]) -> Rejection | None:
        """Start an instance that waited."""
        self._run(ticket, instances)
        return None

    def reserve(self, line: LineKey, windows: tuple[Window, ...]) -> None:
        """Set the windows of a line."""
        self.reservations.set(line, windows)

    def ends(self, instance: Instance) -> float | None:
        """When the lease of an instance ends, if it has one."""
        return self._known_end.get(instance.id)

    # What happens

    def _lease(self, asked: Asked) -> float | None:
        match self.leases:
            case Leases.NONE:
                return None
            case Leases.EARLY:
                return asked.lifetime * asked.stretch
            case Leases.EXACT:
                return float(asked.lifetime)

    def _ended(self, instance: Instance) -> None:
        self._known_end.pop(instance.id, None)
        self._charge(self.scenario.tenants[self._owner[instance.id]].name, instance, -1)
        self.dispatcher.freed(instance.gpu)

    def _room_appeared(self) -> None:
        self.dispatcher.room_appeared()

    def _arrived(self, ticket: Ticket) -> None:
        outcome = self.dispatcher.place(ticket, self.now)
        if isinstance(outcome, Rejection):
            self.queue.enter(ticket)
        else:
            self._run(ticket, outcome)

    def _withdraw(self, number: int) -> None:
        position = self.queue.position(number)
        self.dispatcher.ticket_left(self.queue.withdraw(number), position)

    def _serve(self) -> None:
        self.dispatcher.serve(self.now)

    def _asked(self) -> int:
        return self.dispatcher.attempts

    def _run(self, ticket: Ticket, instances: tuple[Instance, ...]) -> None:
        (instance,) = instances
        self._started(ticket.number, instance)
        if ticket.lease is not None:
            self._known_end[instance.id] = self.now + ticket.lease
        self._charge(ticket.tenant, instance, 1)
        self.queue.placed(self.scenario.geometry, ticket.entered)

    def _charge(self, tenant: str, instance: Instance, sign: int) -> None:
        geometry = self.scenario.geometry
        profile = geometry.profile(instance.profile)
        self.shares.charge(tenant, geometry, sign * profile.size, sign * profile.compute)
