"""Allocations and the queue: who gets a place, who waits, who is told why not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from functools import cache

import msgspec

from slicewise.catalog import Catalog, Entry
from slicewise.control.answers import Answer, RefusedError, said
from slicewise.control.commands import Create, CreateAll, Release, Terms
from slicewise.control.entries import (
    Allocated,
    AllocationRecord,
    Cause,
    Ended,
    Overtaken,
    Part,
    Queued,
    Rejected,
    Served,
    TurnTaken,
)
from slicewise.control.ledger import Ledger
from slicewise.control.quota import excess, has_limits, least_excess
from slicewise.control.reach import within_reach
from slicewise.control.state import TenantStanding, request_of
from slicewise.control.views import allocation_view
from slicewise.control.wire import BatchView
from slicewise.core.cluster import Instance
from slicewise.core.errors import UnknownNameError
from slicewise.core.geometry import Geometry
from slicewise.core.request import Reason, Rejection, Request
from slicewise.engine.queue import Ticket

_Outcome = tuple[Instance, ...] | Rejection
_Attempt = Callable[[list[Part]], _Outcome]
"""Tries to place, given what the tenant gets beside it in the same pass."""


class Placing:
    """Creates and ends allocations."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._state = ledger.state

    def create(self, command: Create) -> Answer:
        """One allocation: placed, waiting, or refused."""
        state, terms = self._state, command.terms
        tenant = self._ledger.tenant(command.tenant)
        self._check_terms(terms, tenant)
        record = self._record(command.tenant, terms)
        request = request_of(terms.want)
        outcome: _Outcome
        if len(state.waiting):
            line = tenant.name if terms.wait > 0 else ""
            ticket = Ticket(state.last_ticket + 1, request, terms.count, line, terms.priority)
            outcome = self._in_turn(
                ticket, tenant, lambda held: self._try(tenant, request, terms.count, held)
            )
        else:
            outcome = self._try(tenant, request, terms.count)
        if not isinstance(outcome, Rejection):
            self._allocate(record, outcome)
            return said(201, allocation_view(state, state.allocations[record.id]))
        if terms.wait > 0:
            self._wait(record, outcome)
            return said(202, allocation_view(state, state.allocations[record.id]))
        raise self._rejection(record, outcome)

    def create_all(self, command: CreateAll) -> Answer:
        """Several allocations, all or none; they cannot wait."""
        state = self._state
        tenant = self._ledger.tenant(command.tenant)
        for index, terms in enumerate(command.all):
            self._check_terms(terms, tenant, index)
        records = [self._record(command.tenant, terms) for terms in command.all]
        placed: list[tuple[Instance, ...]] = []

        def attempt(held: list[Part]) -> _Outcome:
            mine = list(held)
            for terms in command.all:
                outcome = self._try(tenant, request_of(terms.want), terms.count, mine)
                if isinstance(outcome, Rejection):
                    for instances in reversed(placed):
                        self._undo(instances)
                    self._note_turn()
                    return outcome
                placed.append(outcome)
                mine += state.parts(outcome)
            return tuple(instance for instances in placed for instance in instances)

        first = command.all[0]
        highest = max(terms.priority for terms in command.all)
        request = request_of(first.want)
        ticket = Ticket(state.last_ticket + 1, request, first.count, "", highest)
        outcome = self._in_turn(ticket, tenant, attempt)
        if isinstance(outcome, Rejection):
            index = len(placed)  # as far as it went
            raise self._rejection(records[index], outcome, index)
        for record, instances in zip(records, placed, strict=True):
            self._allocate(record, instances)
        views = tuple(allocation_view(state, state.allocations[record.id]) for record in records)
        return said(201, BatchView(allocations=views))

    def release(self, command: Release) -> Answer:
        """End an allocation that lives."""
        allocation = self._state.allocations.get(command.allocation)
        if allocation is None or command.tenant not in (None, allocation.tenant):
            raise RefusedError(404, f"no allocation {command.allocation!r} is living")
        ended = self._state.ended(self.end(allocation, Cause.RELEASED))
        return said(200, allocation_view(self._state, ended))

    def _check_terms(self, terms: Terms, tenant: TenantStanding, index: int | None = None) -> None:
        highest = tenant.quota.max_priority
        if highest is not None and terms.priority > highest:
            raise RefusedError(
                409,
                f"tenant {tenant.name!r} may use priorities up to {highest}, not {terms.priority}",
                reason=Reason.QUOTA,
                index=index,
            )
        request = request_of(terms.want)
        if not any(request.candidates(model) for model in self._state.geometries.values()):
            unknown = _unknown(request, self._state.geometries.values())
            if unknown is not None:
                raise RefusedError(400, unknown, index=index, field="profile")

    def _record(self, tenant: str, terms: Terms) -> AllocationRecord:
        return AllocationRecord(
            id=self._ledger.new_id("a"),
            tenant=tenant,
            want=terms.want,
            count=terms.count,
            priority=terms.priority,
            labels=terms.labels,
            lease=terms.lease,
            requested=self._ledger.now,
            deadline=self._ledger.now + terms.wait if terms.wait > 0 else None,
        )

    def _try(
        self, tenant: TenantStanding, request: Request, count: int, held: list[Part] | None = None
    ) -> _Outcome:
        """Place a request within the tenant's quota, or nothing of it."""
        held = held or []
        limited = has_limits(tenant)
        too_much = None
        if limited:
            too_much = least_excess(tenant, request, count, held, self._state.geometries.values())
        if too_much is None:
            alike = self._state.canonical(request)
            outcome = self._state.scheduler.submit_all(alike, count, waits=True)
            if isinstance(outcome, Rejection):
                self._note_turn()
                return _as_capacity(outcome)
            if limited:
                too_much = excess(tenant, [*held, *self._state.parts(outcome)])
            if too_much is None:
                return outcome
            self._undo(outcome)
            self._note_turn()
        return Rejection(request, Reason.QUOTA, too_much)

    def _undo(self, instances: tuple[Instance, ...]) -> None:
        for instance in reversed(instances):
            self._state.cluster.undo_place(instance)

    def _note_turn(self) -> None:
        """A policy that goes round has gone on, though nothing was placed: that is state, too."""
        if self._state.scheduler.turn != self._state.turn:
            self._ledger.enter(TurnTaken(self._state.scheduler.turn))

    def _allocate(self, record: AllocationRecord, instances: tuple[Instance, ...]) -> None:
        placed = msgspec.structs.replace(
            record, placed=self._ledger.now, deadline=None, parts=self._state.parts(instances)
        )
        self._ledger.enter(Allocated(placed), instances)

    def _rejection(
        self, record: AllocationRecord, rejection: Rejection, index: int | None = None
    ) -> RefusedError:
        reason, detail = rejection.reason, rejection.detail
        self._ledger.enter(Rejected(record.tenant, record.want, record.count, reason, detail))
        return RefusedError(409, detail, reason=reason, index=index)

    def end(self, allocation: AllocationRecord, cause: Cause, detail: str = "") -> AllocationRecord:
        """End an allocation, whatever the cause; ``detail`` says more where it failed."""
        ended = msgspec.structs.replace(allocation, ended=self._ledger.now, cause=cause)
        if detail:
            ended = msgspec.structs.replace(ended, detail=detail)
        self._ledger.enter(Ended(ended))
        self._ledger.room_appeared = True
        for node in dict.fromkeys(part.node for part in ended.parts):
            self._ledger.finish_draining(node)
        return ended

    # The queue

    def _in_turn(self, ticket: Ticket, tenant: TenantStanding, attempt: _Attempt) -> _Outcome:
        """Try at once, or, where others wait, when the order of the queue comes to it.

        One that may wait stands in its tenant's line. One that may not is in nobody's line: it
        may pass those who wait as far as backfill allows.
        """
        state = self._state
        waiting = len(state.waiting)
        if not waiting:
            return attempt([])
        state.waiting.enter(ticket)
        outcome = self.serve((ticket.number, tenant, attempt))
        if ticket.number in state.waiting:
            state.waiting.withdraw(ticket.number)
        return _others_wait(ticket.request, waiting) if outcome is None else outcome

    def _wait(self, record: AllocationRecord, why: Rejection) -> None:
        waits = msgspec.structs.replace(record, reason=why.reason, detail=why.detail)
        self._ledger.enter(Queued(waits, self._state.last_ticket + 1))

    def serve(self, passing: tuple[int, TenantStanding, _Attempt] | None = None) -> _Outcome | None:
        """One pass through the queue; returns what the ticket that is only passing got.

        None when it was not even tried.
        """
        state = self._state
        self._ledger.room_appeared = False
        passer = passing[0] if passing is not None else 0
        got: _Outcome | None = None
        held: defaultdict[str, list[Part]] = defaultdict(list)  # placed, and not entered yet

        def place(ticket: Ticket) -> _Outcome:
            nonlocal got
            if passing is not None and ticket.number == passer:
                _, tenant, attempt = passing
                outcome = got = attempt(held[tenant.name])
            else:
                tenant = state.tenants[ticket.tenant]
                outcome = self._try(tenant, ticket.request, ticket.count, held[tenant.name])
            if not isinstance(outcome, Rejection):
                held[tenant.name] += state.parts(outcome)
            elif not within_reach(ticket.request, ticket.count, state.gpus):
                # Nothing that ends makes room for it, so nobody else is to wait for that.
                return Rejection(outcome.request, Reason.QUOTA, outcome.detail)
            return outcome

        for ticket, instances in state.waiting.serve(place):
            if ticket.number != passer:
                identity = state.waits_for[ticket.number]
                served = Served(identity, ticket.tenant, state.parts(instances))
                self._ledger.enter(served, instances)
        overtaken = state.waiting.take_overtaken()
        overtaken.pop(passer, None)
        if overtaken:
            self._ledger.enter(Overtaken(overtaken))
        return got


def _others_wait(request: Request, waiting: int) -> Rejection:
    who = "another request waits" if waiting == 1 else f"{waiting} other requests wait"
    return Rejection(request, Reason.CAPACITY, f"{who} for room, and {request} comes after")


def _as_capacity(rejection: Rejection) -> Rejection:
    """A profile that exists, but on no node here, is a matter of capacity."""
    if rejection.reason is not Reason.UNKNOWN_PROFILE:
        return rejection
    return Rejection(rejection.request, Reason.CAPACITY, rejection.detail)


def _unknown(request: Request, here: Collection[Geometry]) -> str | None:
    """Why no GPU model anywhere offers what is asked for, if so; near names are those used here."""
    anywhere = [entry.geometry for entry in _catalog() if entry.geometry is not None]
    if any(request.candidates(geometry) for geometry in anywhere):
        return None
    if isinstance(request.want, str):
        named = [geometry for geometry in (*here, *anywhere) if geometry.model in request.models]
        known = dict.fromkeys(p.name for g in named or here or anywhere for p in g.profiles)
        where = f"profile on {' or '.join(request.models)}" if request.models else "profile"
        return str(UnknownNameError(where, request.want, known))
    return f"no GPU model known here offers {request}"


@cache
def _catalog() -> tuple[Entry, ...]:
    return tuple(Catalog.builtin().entries())
