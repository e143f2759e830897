"""Allocations: creates, queues, rejects, serves and ends them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import msgspec

from slicewise.api.allocations import BatchView
from slicewise.control.answers import Answer, RefusedError, json_answer
from slicewise.control.commands import Create, CreateAll, CreateOn, Release, Terms
from slicewise.control.feasibility import as_capacity, refuse_unknown
from slicewise.control.policy_choices import PolicyChoices
from slicewise.control.quota import (
    QueueLimits,
    QuotaCheck,
    excess,
    too_long,
    too_many_wait,
    with_lease,
)
from slicewise.control.state import NodeStatus, State, TenantStatus, request_of
from slicewise.control.unit_of_work import UnitOfWork
from slicewise.control.views import allocation_view
from slicewise.core.cluster import Instance
from slicewise.core.request import Reason, Rejection, Request
from slicewise.engine.dispatcher import Dispatcher, Outcome
from slicewise.engine.offers import Offers
from slicewise.engine.queue import Ticket
from slicewise.engine.reservation_rules import ReservationRules
from slicewise.engine.reservations import LineKey, Window
from slicewise.journal.entries import (
    Allocated,
    AllocationRecord,
    Cause,
    Ended,
    Part,
    Queued,
    Rejected,
    Reserved,
    Seconds,
    Served,
    TenantRef,
    TurnTaken,
)

OnPolicyError = Callable[[Exception], None]
"""Called with an exception that a policy raised."""


class _PolicyFailed(Rejection):
    """The policy raised an exception on this request, and its placements were undone.

    Like an exceeded quota, this does not concern other requests of the same shape.
    """


class Allocations(QuotaCheck):
    """Creates and ends allocations, and serves the queue."""

    def __init__(
        self,
        work: UnitOfWork,
        limits: QueueLimits,
        rules: ReservationRules,
        on_policy_error: OnPolicyError,
        policies: PolicyChoices,
    ) -> None:
        super().__init__(work.state)
        self._work = work
        self._limits = limits
        self._on_policy_error = on_policy_error
        self._policies = policies
        state = work.state
        self.dispatcher = Dispatcher(
            state.scheduler, state.waiting, state.reservations, self, rules, self._submit
        )

    # Commands

    def create(self, command: Create) -> Answer:
        """Create one allocation: placed, queued, or rejected."""
        state = self._state
        tenant = self._work.tenant(command.tenant)
        terms = with_lease(command.terms, tenant)
        request = self._check_terms(terms, tenant)
        self._settle()
        outcome = self._place(tenant, terms)
        if not isinstance(outcome, Rejection):
            return json_answer(201, allocation_view(state, self._allocate(tenant, terms, outcome)))
        if terms.wait > 0 and not isinstance(outcome, _PolicyFailed):
            ticket = as_ticket(state, tenant.ref, terms, self._work.now)
            too_many = too_many_wait(tenant, ticket, state.waiting, self._limits)
            if too_many is None:
                return json_answer(202, allocation_view(state, self._queue(tenant, terms, outcome)))
            outcome = Rejection(request, Reason.QUOTA, too_many)
        raise self._rejection(tenant, terms, outcome)

    def create_all(self, command: CreateAll) -> Answer:
        """Create several allocations, all or none; they cannot be queued."""
        tenant = self._work.tenant(command.tenant)
        every = [with_lease(terms, tenant) for terms in command.all]
        for index, terms in enumerate(every):
            self._check_terms(terms, tenant, index)
        self._settle()
        placed: list[tuple[Instance, ...]] = []
        with self._holding():
            for index, terms in enumerate(every):
                outcome = self._place(tenant, terms)
                if isinstance(outcome, Rejection):
                    for instances in reversed(placed):
                        self._undo(instances)
                    self._record_turn()
                    raise self._rejection(tenant, terms, outcome, index)
                placed.append(outcome)
                self.held += self._state.parts(outcome)
        records = [
            self._allocate(tenant, terms, instances)
            for terms, instances in zip(every, placed, strict=True)
        ]
        return self._batch(201, records)

    def create_on(self, command: CreateOn) -> Answer:
        """Create several allocations on one node, all or none.

        Allocations that an equal command created before are returned instead. They end with what
        they were created for, such as a pod, so they get no lease by default.
        """
        state = self._state
        tenant = self._work.tenant(command.tenant)
        node = self._work.node(command.node)
        mark, value = command.mark, command.all[0].labels[command.mark]
        own = [state.allocations[identity] for identity in tenant.allocations]
        existing = [record for record in own if record.labels.get(mark) == value]
        if existing:
            wants = Counter((record.want, record.count) for record in existing)
            alike = wants == Counter((terms.want, terms.count) for terms in command.all)
            if not alike or {p.node for r in existing for p in r.parts} != {node.name}:
                sentence = f"{mark} {value} has other allocations: release them first"
                raise RefusedError(409, sentence, reason="elsewhere")
            return self._batch(200, existing)
        requests: list[Request] = []
        for index, terms in enumerate(command.all):
            request = state.canonical(self._check_terms(terms, tenant, index))
            requests += [request] * terms.count
        self._settle()
        now = self._work.now
        tickets = [as_ticket(state, tenant.ref, terms, now) for terms in command.all]
        ends = max(ticket.ends_by(now) for ticket in tickets)
        outcome = self._try_on(node, tenant, requests, ends)
        if isinstance(outcome, Rejection):
            raise self._rejection(tenant, command.all[0], outcome)
        records = []
        for terms in command.all:
            instances, outcome = outcome[: terms.count], outcome[terms.count :]
            records.append(self._allocate(tenant, terms, instances))
        return self._batch(201, records)

    def release(self, command: Release) -> Answer:
        """End an allocation; if it has ended already, return how."""
        allocation = self._state.allocations.get(command.allocation)
        if allocation is None or command.tenant not in (None, allocation.tenant):
            if command.ended is not None:
                return command.ended
            raise RefusedError(404, f"no allocation {command.allocation!r}")
        ended = self._state.ended(self.end(allocation, Cause.RELEASED))
        return json_answer(200, allocation_view(self._state, ended))

    def end(self, allocation: AllocationRecord, cause: Cause, detail: str = "") -> AllocationRecord:
        """End an allocation; ``detail`` tells why it failed."""
        ended = msgspec.structs.replace(allocation, ended=self._work.now, cause=cause)
        if detail:
            ended = msgspec.structs.replace(ended, detail=detail)
        number = self._state.tickets.get(allocation.id)
        if number is None:
            self.note_freed(ended.parts)
            self._work.enter(Ended(ended))
        else:
            ticket = self._state.waiting.ticket(number)
            position = self._state.waiting.position(number)
            self._work.enter(Ended(ended))
            self.dispatcher.ticket_left(ticket, position)
        self._work.room_appeared = True
        for part in ended.parts:
            self._work.finish_draining(part.node)
        return ended

    def note_freed(self, parts: Iterable[Part]) -> None:
        """Note instances that end: a reserved window may open earlier than expected."""
        for part in parts:
            self.dispatcher.freed(self._state.nodes[part.node].gpus[part.gpu])

    # Placing

    def _check_terms(self, terms: Terms, tenant: TenantStatus, index: int | None = None) -> Request:
        """Return the request, unless its lease is too long or no GPU model offers it."""
        excessive = too_long(tenant, terms.lease)
        if excessive is not None:
            raise RefusedError(409, excessive, reason=Reason.QUOTA, index=index)
        request = request_of(terms.want)
        refuse_unknown(request, self._state.geometries.values(), index)
        return request

    def _place(self, tenant: TenantStatus, terms: Terms) -> Outcome:
        """Place a new request within the tenant's quota, or return the rejection."""
        ticket = as_ticket(self._state, tenant.ref, terms, self._work.now)
        outcome = self.dispatcher.place(ticket, self._work.now)
        if isinstance(outcome, Rejection):
            return outcome
        refusal = self.excess(ticket, outcome)
        if refusal is None:
            return outcome
        self._undo(outcome)
        self._record_turn()
        return refusal

    def _submit(self, request: Request, count: int, now: Seconds, ends: Seconds) -> Outcome:
        """Ask the policy for all instances of a request, or none."""
        self._policies.before(request)
        scheduler = self._state.scheduler
        turn = scheduler.turn
        try:
            outcome = scheduler.submit_all(request, count, waits=True, now=now, ends=ends)
        except Exception as error:
            return self._policy_failed(request, turn, error)
        if isinstance(outcome, Rejection):
            self._record_turn()
            return as_capacity(outcome)
        return outcome

    def _try_on(
        self, node: NodeStatus, tenant: TenantStatus, requests: list[Request], ends: Seconds
    ) -> Outcome:
        """Place requests on one node within the tenant's quota, all or none."""
        for request in dict.fromkeys(requests):
            self._policies.before(request)
        state = self._state
        offers = Offers(state.scheduler)
        turn, before = state.scheduler.turn, self._instances_on(node)
        try:
            outcome = offers.place_on(node.name, requests, now=self._work.now, ends=ends)
        except Exception as error:
            self._undo(tuple(self._instances_on(node) - before))
            return self._policy_failed(requests[0], turn, error)
        if isinstance(outcome, Rejection):
            return as_capacity(outcome)
        too_much = excess(tenant, state.parts(outcome))
        if too_much is None:
            return outcome
        offers.take_back(outcome, requests)
        self._record_turn()
        return Rejection(requests[0], Reason.QUOTA, too_much)

    def _policy_failed(self, request: Request, turn: int, error: Exception) -> _PolicyFailed:
        """Reject a request on which the policy raised; its placements were undone."""
        scheduler = self._state.scheduler
        scheduler.turn = turn
        self._on_policy_error(error)
        sentence = (
            f"policy {scheduler.policy.name!r} failed on this request, and nothing was changed: "
            "see the log"
        )
        return _PolicyFailed(request, Reason.QUOTA, sentence)

    def _instances_on(self, node: NodeStatus) -> set[Instance]:
        cluster = self._state.cluster
        return {instance for gpu in node.gpus for instance in cluster.instances_on(gpu)}

    def _undo(self, instances: tuple[Instance, ...]) -> None:
        for instance in reversed(instances):
            self._state.cluster.undo_place(instance)

    def _record_turn(self) -> None:
        """Record that a round-robin policy advanced although nothing was placed."""
        if self._state.scheduler.turn != self._state.turn:
            self._work.enter(TurnTaken(self._state.scheduler.turn))

    @contextmanager
    def _holding(self) -> Iterator[None]:
        """Count what a command places and has not entered yet against the quota."""
        try:
            yield
        finally:
            self.held = []

    # Entries and answers

    def _record(self, tenant: TenantStatus, terms: Terms) -> AllocationRecord:
        return AllocationRecord(
            id=self._work.new_id("a"),
            tenant=tenant.ref,
            want=terms.want,
            count=terms.count,
            priority=terms.priority,
            labels=terms.labels,
            lease=terms.lease,
            preemptible=terms.preemptible,
            expected_seconds=terms.expected_seconds,
            requested=self._work.now,
        )

    def _allocate(
        self, tenant: TenantStatus, terms: Terms, instances: tuple[Instance, ...]
    ) -> AllocationRecord:
        record = msgspec.structs.replace(
            self._record(tenant, terms), placed=self._work.now, parts=self._state.parts(instances)
        )
        self._work.enter(Allocated(record), instances)
        return record

    def _queue(self, tenant: TenantStatus, terms: Terms, why: Rejection) -> AllocationRecord:
        record = msgspec.structs.replace(
            self._record(tenant, terms),
            deadline=self._work.now + terms.wait,
            reason=why.reason,
            detail=why.detail,
        )
        self._work.enter(Queued(record, self._state.last_ticket + 1))
        return record

    def _rejection(
        self,
        tenant: TenantStatus,
        terms: Terms,
        rejection: Rejection,
        index: int | None = None,
    ) -> RefusedError:
        reason, detail = rejection.reason, rejection.detail
        if isinstance(rejection, _PolicyFailed):
            return RefusedError(500, detail, index=index)
        self._work.enter(Rejected(tenant.ref, terms.want, terms.count, reason, detail))
        return RefusedError(409, detail, reason=reason, index=index)

    def _batch(self, status: int, records: Iterable[AllocationRecord]) -> Answer:
        views = tuple(allocation_view(self._state, record) for record in records)
        return json_answer(status, BatchView(allocations=views))

    # The queue

    def serve(self) -> None:
        """Place the queued requests for which there is room, and reserve windows for others."""
        if self._work.room_appeared:
            self._work.room_appeared = False
            self.dispatcher.room_appeared()
            self.dispatcher.serve(self._work.now)
        while self.dispatcher.grant(self._work.now):
            pass

    def _settle(self) -> None:
        """Serve the queue before a new request is decided, if a queued one may have room."""
        if self._work.room_appeared:
            self.serve()

    # Callbacks of the dispatcher

    def accept(self, ticket: Ticket, instances: tuple[Instance, ...]) -> Rejection | None:
        """Record the placement of a queued request, unless it exceeds the quota."""
        refusal = self.excess(ticket, instances)
        if refusal is not None:
            self._record_turn()
            return refusal
        state = self._state
        tenant = state.tenants[ticket.tenant].ref
        served = Served(state.by_ticket[ticket.number], tenant, state.parts(instances))
        self._work.enter(served, instances)
        return None

    def reserve(self, line: LineKey, windows: tuple[Window, ...]) -> None:
        """Record the reserved windows of a line."""
        tenant = self._state.tenants[line.tenant].ref
        self._work.enter(
            Reserved(
                tenant,
                self._state.want_of(line),
                line.instances,
                self._state.window_records(windows),
            )
        )


def as_ticket(state: State, tenant: TenantRef, terms: Terms, now: Seconds) -> Ticket:
    """Return the ticket of a new request, as if it were to wait."""
    return Ticket(
        number=state.last_ticket + 1,
        request=state.canonical(request_of(terms.want)),
        count=terms.count,
        tenant=tenant.id,
        priority=terms.priority,
        entered=now,
        lease=terms.lease,
        expected=terms.expected_seconds,
    )
