"""The dispatcher: the one place where it is decided whether a request gets room or waits.

It joins the scheduler, the queue and the reservations. New requests, waiting requests and dry runs
take the same path, so all of them get the same answer. A `Tenancy` checks quotas and records the
decisions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Protocol

from slicewise.core.cluster import Cluster, Instance
from slicewise.core.request import Reason, Rejection, Request
from slicewise.engine.queue import Attempt, Line, Queue, Ticket
from slicewise.engine.reservation_rules import Caps, ReservationRules
from slicewise.engine.reservations import LineKey, Reservations, Window

_REMEMBERED_REQUESTS = 1024
"""The limit on remembered refusals: clients choose the requests, so memory must be bounded."""

Outcome = tuple[Instance, ...] | Rejection
Submit = Callable[[Request, int, float, float], Outcome]


class Placer(Protocol):
    """What the dispatcher needs of a scheduler."""

    cluster: Cluster
    scans: bool
    """Whether the policy scans GPU by GPU; then nothing is reserved."""

    def has_room(self, request: Request) -> bool:
        """Whether there might be a place outside reserved windows."""

    def fits_on(self, gpu: int, request: Request) -> bool:
        """Whether a request could be placed on a GPU now, without regard to reservations."""

    def submit_all(
        self,
        want: Request,
        count: int,
        *,
        waits: bool = False,
        now: float = 0.0,
        ends: float = math.inf,
    ) -> Outcome:
        """Place ``count`` instances of a request, or none and return the rejection.

        They will leave at ``ends``, if that is known.
        """


class Tenancy(Protocol):
    """The dispatcher's callbacks: quota checks, and records of placements and reservations."""

    def over_quota(self, ticket: Ticket) -> Rejection | None:
        """Why a tenant may not have what a ticket asks for, wherever it is placed."""

    def accept(self, ticket: Ticket, instances: tuple[Instance, ...]) -> Rejection | None:
        """Record a placement of a waiting ticket; or refuse it, and it is undone."""

    def reserve(self, line: LineKey, windows: tuple[Window, ...]) -> None:
        """Record the windows of a line, and set them in the reservations."""

    def ends(self, instance: Instance) -> float | None:
        """When an instance ends, if that is known."""


class Dispatcher:
    """Decides about new and waiting requests."""

    def __init__(
        self,
        scheduler: Placer,
        queue: Queue,
        reservations: Reservations,
        tenancy: Tenancy,
        rules: ReservationRules | None = None,
        submit: Submit | None = None,
    ) -> None:
        self.queue = queue
        self.reservations = reservations
        self.rules = rules or ReservationRules()
        self.attempts = 0
        """How often the policy was asked for a place."""
        self._scheduler = scheduler
        self._tenancy = tenancy
        self._submit_all = submit or (
            lambda request, count, now, ends: scheduler.submit_all(
                request, count, waits=True, now=now, ends=ends
            )
        )
        self._refused: dict[Request, tuple[int, Rejection]] = {}
        """By request: the smallest number of instances that was refused, and the refusal."""
        self._closed: set[Request] = set()
        """Requests for which no GPU has a window outside reservations."""
        self._room_appeared = False
        self._next_due = -math.inf
        """When to look for requests that are due; at once, until that was done."""
        self._unfindable: set[LineKey] = set()
        """Lines for which no windows were found, although more could be reserved."""
        self._freed: dict[int, None] = {}

    # Placing

    def place(self, ticket: Ticket, now: float) -> Outcome:
        """Place a new request, or return why it cannot be placed.

        The queue must be settled: no waiting request can use a window that is open. Then a new
        request may have it.
        """
        over = self._tenancy.over_quota(ticket)
        if over is not None:
            return over
        outcome = self._remember(ticket, self._submit(ticket, now))
        if isinstance(outcome, Rejection) and outcome.reason is not Reason.QUOTA:
            by_lease = self._place_by_lease(ticket, now)
            if by_lease is not None:
                return by_lease
            return self._or_reserved(outcome, ticket)
        return outcome

    def why(self, ticket: Ticket, now: float) -> Rejection | None:
        """Why a waiting ticket waits now; None if nothing keeps it from being placed next."""
        over = self._tenancy.over_quota(ticket)
        if over is not None:
            return over
        own = self.windows_for(ticket)
        if own:
            return Rejection(
                ticket.request,
                Reason.OWN_RESERVATION,
                "a window is reserved for it" if len(own) == 1 else "windows are reserved for it",
            )
        outcome = self.place(ticket, now)
        if isinstance(outcome, Rejection):
            return outcome
        self._undo(outcome)
        return None

    def windows_for(self, ticket: Ticket) -> tuple[Window, ...]:
        """The windows reserved for a waiting ticket: by its place in the line."""
        if ticket.held_until is not None:
            return ()
        begin = self.queue.position(ticket.number) * ticket.count
        return self.reservations.of(ticket.line)[begin : begin + ticket.count]

    def others_ahead(self, ticket: Ticket) -> bool:
        """Whether a request of another tenant comes first to a GPU model that this one can use."""
        models = set(self.queue.shares.models(ticket.request))
        order = self.queue.order(ticket)
        return any(
            line.key.tenant != ticket.tenant
            and not models.isdisjoint(self.queue.shares.models(line.key.request))
            and self.queue.order_of(line) < order
            for line in self.queue.each_line()
        )

    def serve(self, now: float) -> None:
        """Place the waiting requests for which there is room, and settle the queue."""
        if not len(self.queue):  # the usual case costs nothing; without lines, nothing is reserved
            self._freed.clear()
            return
        self._drop_unusable()
        self._room_appeared = True
        while self._room_appeared:  # reservations that end while requests are placed make room
            self._room_appeared = False
            # A window that opens now binds everyone: first tell which do.
            for gpu in self._freed:
                if self.reservations.on(gpu) is not None:
                    self._improve(gpu, now)
            self._serve(now)
            freed, self._freed = self._freed, {}
            for gpu in freed:
                if self._improve(gpu, now):
                    self.room_appeared()
            self._drop_unusable()

    def room_appeared(self) -> None:
        """Forget all refusals, after instances were released or moved, or GPUs added."""
        self._refused.clear()
        self._closed.clear()
        self._unfindable.clear()
        self._room_appeared = True

    def refuses(self, request: Request, count: int) -> bool:
        """Whether a request is known to find no room outside reserved windows.

        Placing never creates room, so a refusal holds until something is released, also for more
        instances of the same kind. It holds for a strict policy, too, although that might pick
        another GPU the next time.
        """
        known = self._refused.get(request)
        return known is not None and count >= known[0]

    def refusal(self, request: Request) -> Rejection | None:
        """Why a request finds no room outside reserved windows, if it was tried."""
        known = self._refused.get(request)
        return None if known is None else known[1]

    def _serve(self, now: float) -> None:
        """Try the waiting requests that might be placed now."""
        last = max((w.opens for w in self._windows() if w.opens is not None), default=-math.inf)

        def may_fit(line: Line) -> bool:
            key = line.key
            if not self.refuses(key.request, key.instances) and self._has_room(key.request):
                return True
            if any(self._fits(window, key.request) for window in self.reservations.of(key)):
                return True
            lease = line.shortest_lease
            return lease is not None and now + lease[0] <= last

        # A lease may end before a window opens: then every line is looked at.
        every = filter(may_fit, self.queue.each_line())
        lines = every if last >= now else self._with_room()
        self.queue.serve(lambda attempt: self._attempt(attempt, now), may_fit, lines, now)

    def _with_room(self) -> Iterable[Line]:
        """The lines for whose requests there is room, and those with windows of their own."""
        with_room: set[Request] = set()
        for request, lines in self.queue.by_request():
            if self._has_room(request):
                with_room.add(request)
                yield from lines
        for key, _ in self.reservations:
            if key.request not in with_room:
                line = self.queue.line(key)
                assert line is not None  # or it had no windows
                yield line

    def _has_room(self, request: Request) -> bool:
        """Whether a GPU has a window for a request outside reservations."""
        if request in self._closed:
            return False
        if self._scheduler.has_room(request):
            return True
        self._closed.add(request)
        return False

    def _attempt(self, attempt: Attempt, now: float) -> Rejection | None:
        ticket = attempt.ticket
        line = ticket.line
        outcome: Outcome | None = self._tenancy.over_quota(ticket)
        if outcome is None and attempt.by_lease:
            outcome = self._place_by_lease(ticket, now)
            if outcome is None:
                return Rejection(ticket.request, Reason.RESERVED, "no window opens late enough")
        elif outcome is None:
            outcome = self._place(ticket, line, now)
        assert outcome is not None
        if not isinstance(outcome, Rejection):
            position = self.queue.position(ticket.number)
            holds = self._holds_window(ticket, position)
            refusal = self._tenancy.accept(ticket, outcome)
            if refusal is None:
                if ticket.number in self.queue:
                    self.queue.withdraw(ticket.number)
                if holds:
                    self._served(line, outcome, attempt.by_lease)
                return None
            self._undo(outcome)
            outcome = refusal
        if outcome.reason is Reason.QUOTA and self.reservations.of(line):
            self._tenancy.reserve(line, ())  # it could not use a window
            self.room_appeared()
        return outcome

    def _place(self, ticket: Ticket, line: LineKey | None, now: float) -> Outcome:
        """Place a ticket; a line may use its own reserved windows."""
        own = self.reservations.of(line) if line is not None else ()
        shares = self.queue.shares
        if not shares.within_guarantee(ticket.tenant, ticket.request, ticket.count):
            own = tuple(window for window in own if not window.claimed)
        if own and any(self._fits(window, ticket.request) for window in own):
            with self.reservations.lifted(own):
                return self._submit(ticket, now)
        known = self._refused.get(ticket.request)
        if known is not None and ticket.count >= known[0]:
            return known[1]
        return self._remember(ticket, self._submit(ticket, now))

    def _remember(self, ticket: Ticket, outcome: Outcome) -> Outcome:
        """Remember a refusal for lack of room."""
        if isinstance(outcome, Rejection) and outcome.reason is not Reason.QUOTA:
            if len(self._refused) == _REMEMBERED_REQUESTS:
                self._refused.clear()
            self._refused[ticket.request] = ticket.count, outcome
        return outcome

    def _place_by_lease(self, ticket: Ticket, now: float) -> Outcome | None:
        """Place a ticket that ends before reserved windows open; None if none of them helps."""
        if ticket.lease is None:
            return None
        closing = self.reservations.closing_after(ticket.over_by(now))
        windows = [window for window in closing if self._fits(window, ticket.request)]
        if not windows:
            return None
        with self.reservations.lifted(windows):
            return self._submit(ticket, now)

    def _submit(self, ticket: Ticket, now: float) -> Outcome:
        self.attempts += 1
        return self._submit_all(ticket.request, ticket.count, now, ticket.ends_by(now))

    def _fits(self, window: Window, request: Request) -> bool:
        return self._scheduler.fits_on(window.gpu, request)

    def _undo(self, instances: tuple[Instance, ...]) -> None:
        for instance in reversed(instances):
            self._scheduler.cluster.undo_place(instance)

    def _or_reserved(self, refusal: Rejection, ticket: Ticket) -> Rejection:
        """The refusal, or that the room is reserved if that is the cause."""
        windows = [w for w in self._windows() if self._fits(w, ticket.request)]
        if not windows or ticket.count > 1:
            return refusal
        return Rejection(
            ticket.request,
            Reason.RESERVED,
            f"a window for {ticket.request} is open, but reserved for a request that has waited "
            "longer",
        )

    def _windows(self) -> list[Window]:
        return [window for _, pool in self.reservations for window in pool]

    # Reservations

    def ticket_left(self, ticket: Ticket, position: int) -> None:
        """A ticket gave up that had so many of its line ahead of it."""
        line = ticket.line
        if self._holds_window(ticket, position):
            self._tenancy.reserve(line, self.reservations.without_holder(line))
            self.room_appeared()

    def _holds_window(self, ticket: Ticket, position: int) -> bool:
        """Whether a window is reserved for the ticket with so many ahead of it in its line."""
        pool = self.reservations.of(ticket.line)
        return ticket.held_until is None and position * ticket.count < len(pool)

    def _served(self, line: LineKey, placed: tuple[Instance, ...], by_lease: bool) -> None:
        """A holder of a reservation was placed. By its lease, it leaves the windows as they are."""
        left = (
            self.reservations.without_holder(line)
            if by_lease
            else self.reservations.after_serving(line, placed)
        )
        self._tenancy.reserve(line, left)
        self.room_appeared()

    def freed(self, gpu: int) -> None:
        """Note that an instance on a GPU ended or moved away, or will end earlier."""
        if len(self.reservations):
            self._freed[gpu] = None

    def removed(self, gpus: Collection[int]) -> None:
        """End the reservations on GPUs that are about to leave the cluster."""
        self.reservations.drop(gpus)
        for gpu in gpus:
            self._freed.pop(gpu, None)
        self.room_appeared()

    def _drop_unusable(self) -> None:
        """End the reservations on GPUs that take no instances, and of tenants at their quota."""
        for line, pool in self.reservations:
            usable = self.reservations.usable(line)
            waiting = self.queue.line(line)
            assert waiting is not None  # or it had no windows
            assert waiting.head is not None
            if self._tenancy.over_quota(self.queue.ticket(waiting.head)) is not None:
                usable = ()
            if len(usable) < len(pool):
                self._tenancy.reserve(line, usable)
                self.room_appeared()

    def _improve(self, gpu: int, now: float) -> bool:
        """Let a line gain by an instance that ended early; returns whether one did."""
        gain = self.reservations.earlier(gpu, self._tenancy.ends, now)
        if gain is not None:
            self._tenancy.reserve(*gain)
        return gain is not None

    def grant(self, now: float) -> bool:
        """Reserve windows for the next request that has waited long enough, if any may.

        Returns whether it did. Requests are looked at in fair order.
        """
        self._next_due = math.inf
        if self._scheduler.scans or not self._any_due(now):
            return False
        caps = Caps(self.rules, self.reservations, self._scheduler.cluster, self.queue.shares)
        for line in self.queue.in_order(self._granted_to(caps, now)):
            ticket = self._next_without_window(line)
            assert ticket is not None  # it is due
            if self._tenancy.over_quota(ticket) is not None:
                continue
            below, ends = caps.left(line.key), self._tenancy.ends
            found = self.reservations.find(ticket.request, ticket.count, below, ends, now)
            if found is not None:
                self._tenancy.reserve(line.key, (*self.reservations.of(line.key), *found))
                return True
            self._unfindable.add(line.key)
        return False

    def _granted_to(self, caps: Caps, now: float) -> Iterator[Line]:
        """The lines that may have another window, in no particular order."""
        if caps.reached:
            return
        for line in self.queue.each_line():
            if line.key in self._unfindable or not caps.allow(line.key):
                continue
            ticket = self._next_without_window(line)
            if ticket is None or not self._is_due(ticket, now):
                continue
            if self.queue.was_overtaken(ticket):
                yield line

    @property
    def next_due(self) -> float | None:
        """When a request will have waited long enough for a reservation, if one waits for that."""
        return None if self._next_due == math.inf or not len(self.queue) else self._next_due

    def _any_due(self, now: float) -> bool:
        """Whether the request that has waited longest has waited long enough, held back or not.

        It is the quick check before all others.
        """
        oldest = self.queue.oldest
        return oldest is not None and self._is_due(oldest, now)

    def _is_due(self, ticket: Ticket, now: float) -> bool:
        due = ticket.entered + self.rules.after
        if due > now:
            self._next_due = min(self._next_due, due)
        return due <= now

    def _next_without_window(self, line: Line) -> Ticket | None:
        """The first request of a line for which no window is reserved."""
        held = len(self.reservations.of(line.key)) // line.key.instances
        number = line.at(held)
        return None if number is None else self.queue.ticket(number)
