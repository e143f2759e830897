"""Allocations and the queue: who gets a place, who waits, who is told why not."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

import msgspec

from slicewise.control.answers import Answer, RefusedError, said
from slicewise.control.commands import Create, CreateAll, CreateOn, Release, Terms
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
from slicewise.control.offers import as_capacity, refuse_unknown
from slicewise.control.quota import excess, has_limits, least_excess, too_many_wait
from slicewise.control.reach import within_reach
from slicewise.control.state import NodeStanding, TenantStanding, request_of
from slicewise.control.views import allocation_view
from slicewise.control.wire import BatchView
from slicewise.core.cluster import Instance
from slicewise.core.request import Reason, Rejection, Request
from slicewise.engine.on_node import NodeOffers
from slicewise.engine.queue import Ticket

_Outcome = tuple[Instance, ...] | Rejection
_Attempt = Callable[[list[Part]], _Outcome]
"""Tries to place, given what the tenant gets beside it in the same pass."""

OnPolicyError = Callable[[Exception], None]
"""Told what a policy raised."""


class _PolicyFailed(Rejection):
    """The policy raised on this request, and whatever it had placed was taken back.

    It is a request's own affair, like a quota: nobody waits for its sake.
    """


class Placing:
    """Creates and ends allocations."""

    def __init__(
        self, ledger: Ledger, queued_per_tenant: int, on_policy_error: OnPolicyError
    ) -> None:
        self._ledger = ledger
        self._state = ledger.state
        self._queued_per_tenant = queued_per_tenant
        self._on_policy_error = on_policy_error

    def create(self, command: Create) -> Answer:
        """One allocation: placed, waiting, or refused."""
        state, terms = self._state, command.terms
        tenant = self._ledger.tenant(command.tenant)
        request = self._check_terms(terms, tenant)
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
            return said(201, allocation_view(state, self._allocate(tenant, terms, outcome)))
        if terms.wait > 0 and not isinstance(outcome, _PolicyFailed):
            too_many = too_many_wait(tenant, self._queued_per_tenant)
            if too_many is None:
                return said(202, allocation_view(state, self._wait(tenant, terms, outcome)))
            outcome = Rejection(request, Reason.QUOTA, too_many)
        raise self._rejection(tenant, terms, outcome)

    def create_all(self, command: CreateAll) -> Answer:
        """Several allocations, all or none; they cannot wait."""
        state = self._state
        tenant = self._ledger.tenant(command.tenant)
        for index, terms in enumerate(command.all):
            self._check_terms(terms, tenant, index)
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
            raise self._rejection(tenant, command.all[index], outcome, index)
        records = [
            self._allocate(tenant, terms, instances)
            for terms, instances in zip(command.all, placed, strict=True)
        ]
        views = tuple(allocation_view(state, record) for record in records)
        return said(201, BatchView(allocations=views))

    def create_on(self, command: CreateOn) -> Answer:
        """Several allocations on one node, all or none; asked again, those that are there."""
        state = self._state
        tenant = self._ledger.tenant(command.tenant)
        node = self._ledger.node(command.node)
        first = command.all[0]
        mark, own = command.mark, first.labels[command.mark]
        here = [state.allocations[identity] for identity in tenant.allocations]
        records = [record for record in here if record.labels.get(mark) == own]
        if records:
            wants = Counter((record.want, record.count) for record in records)
            alike = wants == Counter((terms.want, terms.count) for terms in command.all)
            if not alike or {p.node for r in records for p in r.parts} != {node.name}:
                sentence = f"{mark} {own} has other allocations: release them first"
                raise RefusedError(409, sentence, reason="elsewhere")
            views = tuple(allocation_view(state, record) for record in records)
            return said(200, BatchView(allocations=views))
        requests: list[Request] = []
        for index, terms in enumerate(command.all):
            request = state.canonical(self._check_terms(terms, tenant, index))
            requests += [request] * terms.count

        def attempt(held: list[Part]) -> _Outcome:
            offers = NodeOffers(state.scheduler)
            turn, there = state.scheduler.turn, self._instances_on(node)
            try:
                outcome = offers.place_on(node.name, requests)
            except Exception as error:
                self._undo(tuple(self._instances_on(node) - there))
                return self._policy_failed(requests[0], turn, error)
            if isinstance(outcome, Rejection):
                return as_capacity(outcome)
            too_much = excess(tenant, [*held, *state.parts(outcome)])
            if too_much is None:
                return outcome
            offers.take_back(outcome, requests)
            self._note_turn()
            return Rejection(requests[0], Reason.QUOTA, too_much)

        highest = max(terms.priority for terms in command.all)
        ticket = Ticket(state.last_ticket + 1, requests[0], first.count, "", highest)
        outcome = self._in_turn(ticket, tenant, attempt)
        if isinstance(outcome, Rejection):
            raise self._rejection(tenant, first, outcome)
        for terms in command.all:
            mine, outcome = outcome[: terms.count], outcome[terms.count :]
            records.append(self._allocate(tenant, terms, mine))
        views = tuple(allocation_view(state, record) for record in records)
        return said(201, BatchView(allocations=views))

    def release(self, command: Release) -> Answer:
        """End an allocation that lives, or say how it ended before."""
        allocation = self._state.allocations.get(command.allocation)
        if allocation is None or command.tenant not in (None, allocation.tenant):
            if command.ended is not None:
                return command.ended
            raise RefusedError(404, f"no allocation {command.allocation!r}")
        ended = self._state.ended(self.end(allocation, Cause.RELEASED))
        return said(200, allocation_view(self._state, ended))

    def _check_terms(
        self, terms: Terms, tenant: TenantStanding, index: int | None = None
    ) -> Request:
        """What is asked for, unless the tenant may not, or nobody has such a thing."""
        highest = tenant.quota.max_priority
        if highest is not None and terms.priority > highest:
            raise RefusedError(
                409,
                f"tenant {tenant.name!r} may use priorities up to {highest}, not {terms.priority}",
                reason=Reason.QUOTA,
                index=index,
            )
        request = request_of(terms.want)
        refuse_unknown(request, self._state.geometries.values(), index)
        return request

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
            scheduler = self._state.scheduler
            turn = scheduler.turn
            try:
                outcome = scheduler.submit_all(alike, count, waits=True)
            except Exception as error:
                return self._policy_failed(request, turn, error)
            if isinstance(outcome, Rejection):
                self._note_turn()
                return as_capacity(outcome)
            if limited:
                too_much = excess(tenant, [*held, *self._state.parts(outcome)])
            if too_much is None:
                return outcome
            self._undo(outcome)
            self._note_turn()
        return Rejection(request, Reason.QUOTA, too_much)

    def _policy_failed(self, request: Request, turn: int, error: Exception) -> _PolicyFailed:
        """What becomes of a request on which the policy raised: the state is as it was before."""
        scheduler = self._state.scheduler
        scheduler.turn = turn
        self._on_policy_error(error)
        name = scheduler.policy.name
        sentence = (
            f"policy {name!r} failed while it decided this; nothing was changed, "
            "and the log tells more"
        )
        return _PolicyFailed(request, Reason.QUOTA, sentence)

    def _instances_on(self, node: NodeStanding) -> set[Instance]:
        cluster = self._state.cluster
        return {instance for gpu in node.gpus for instance in cluster.instances_on(gpu)}

    def _undo(self, instances: tuple[Instance, ...]) -> None:
        for instance in reversed(instances):
            self._state.cluster.undo_place(instance)

    def _note_turn(self) -> None:
        """A policy that goes round has gone on, though nothing was placed: that is state, too."""
        if self._state.scheduler.turn != self._state.turn:
            self._ledger.enter(TurnTaken(self._state.scheduler.turn))

    def _allocate(
        self, tenant: TenantStanding, terms: Terms, instances: tuple[Instance, ...]
    ) -> AllocationRecord:
        now = self._ledger.now
        record = AllocationRecord(
            id=self._ledger.new_id("a"),
            tenant=tenant.name,
            want=terms.want,
            count=terms.count,
            priority=terms.priority,
            labels=terms.labels,
            lease=terms.lease,
            requested=now,
            placed=now,
            parts=self._state.parts(instances),
        )
        self._ledger.enter(Allocated(record), instances)
        return record

    def _rejection(
        self,
        tenant: TenantStanding,
        terms: Terms,
        rejection: Rejection,
        index: int | None = None,
    ) -> RefusedError:
        reason, detail = rejection.reason, rejection.detail
        if isinstance(rejection, _PolicyFailed):
            return RefusedError(500, detail, index=index)
        self._ledger.enter(Rejected(tenant.name, terms.want, terms.count, reason, detail))
        return RefusedError(409, detail, reason=reason, index=index)

    def end(self, allocation: AllocationRecord, cause: Cause, detail: str = "") -> AllocationRecord:
        """End an allocation, whatever the cause; ``detail`` says more where it failed."""
        ended = msgspec.structs.replace(allocation, ended=self._ledger.now, cause=cause)
        if detail:
            ended = msgspec.structs.replace(ended, detail=detail)
        self._ledger.enter(Ended(ended))
        self._ledger.room_appeared = True
        for part in ended.parts:  # the same node may have several; draining ends but once
            self._ledger.finish_draining(part.node)
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
        room_appeared = self._ledger.room_appeared
        state.waiting.enter(ticket)
        outcome = self.serve((ticket.number, tenant, attempt))
        if ticket.number in state.waiting:
            state.waiting.withdraw(ticket.number)
            # Those behind it may have been passed by for its sake: they have their turn yet.
            self._ledger.room_appeared = room_appeared
        return _others_wait(ticket.request, waiting) if outcome is None else outcome

    def _wait(self, tenant: TenantStanding, terms: Terms, why: Rejection) -> AllocationRecord:
        now = self._ledger.now
        record = AllocationRecord(
            id=self._ledger.new_id("a"),
            tenant=tenant.name,
            want=terms.want,
            count=terms.count,
            priority=terms.priority,
            labels=terms.labels,
            lease=terms.lease,
            requested=now,
            deadline=now + terms.wait,
            reason=why.reason,
            detail=why.detail,
        )
        self._ledger.enter(Queued(record, self._state.last_ticket + 1))
        return record

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
