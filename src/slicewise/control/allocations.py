"""Allocations and the queue: creates, queues, rejects and ends allocations."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

import msgspec

from slicewise.api.allocations import BatchView
from slicewise.control.answers import Answer, RefusedError, json_answer
from slicewise.control.commands import Create, CreateAll, CreateOn, Release, Terms
from slicewise.control.feasibility import as_capacity, fits_empty_cluster, refuse_unknown
from slicewise.control.quota import excess, has_limits, least_excess, too_many_wait
from slicewise.control.state import NodeStatus, TenantStatus, request_of
from slicewise.control.unit_of_work import UnitOfWork
from slicewise.control.views import allocation_view
from slicewise.core.cluster import Instance
from slicewise.core.request import Reason, Rejection, Request
from slicewise.engine.offers import Offers
from slicewise.engine.queue import Ticket
from slicewise.journal.entries import (
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

_Outcome = tuple[Instance, ...] | Rejection
_Attempt = Callable[[list[Part]], _Outcome]
"""Tries to place a request. The argument is what the same pass through the queue has given its
tenant, which counts against the quota and is not in the state yet."""

OnPolicyError = Callable[[Exception], None]
"""Called with an exception that a policy raised."""


class _PolicyFailed(Rejection):
    """The policy raised an exception on this request, and its placements were undone.

    Like an exceeded quota, this does not block other requests in the queue.
    """


class Allocations:
    """Creates and ends allocations."""

    def __init__(
        self, work: UnitOfWork, queued_per_tenant: int, on_policy_error: OnPolicyError
    ) -> None:
        self._work = work
        self._state = work.state
        self._queued_per_tenant = queued_per_tenant
        self._on_policy_error = on_policy_error

    # Commands

    def create(self, command: Create) -> Answer:
        """Create one allocation: placed, queued, or rejected."""
        state, terms = self._state, command.terms
        tenant = self._work.tenant(command.tenant)
        request = self._check_terms(terms, tenant)
        outcome: _Outcome
        if len(state.waiting):
            outcome = self._try_in_order(
                self._ticket([terms], tenant.ref.id if terms.wait > 0 else ""),
                tenant,
                lambda held: self._try(tenant, request, terms.count, held),
            )
        else:
            outcome = self._try(tenant, request, terms.count)
        if not isinstance(outcome, Rejection):
            return json_answer(201, allocation_view(state, self._allocate(tenant, terms, outcome)))
        if terms.wait > 0 and not isinstance(outcome, _PolicyFailed):
            too_many = too_many_wait(tenant, self._queued_per_tenant)
            if too_many is None:
                return json_answer(202, allocation_view(state, self._queue(tenant, terms, outcome)))
            outcome = Rejection(request, Reason.QUOTA, too_many)
        raise self._rejection(tenant, terms, outcome)

    def create_all(self, command: CreateAll) -> Answer:
        """Create several allocations, all or none; they cannot be queued."""
        tenant = self._work.tenant(command.tenant)
        for index, terms in enumerate(command.all):
            self._check_terms(terms, tenant, index)
        placed: list[tuple[Instance, ...]] = []

        def attempt(held: list[Part]) -> _Outcome:
            own = list(held)
            for terms in command.all:
                outcome = self._try(tenant, request_of(terms.want), terms.count, own)
                if isinstance(outcome, Rejection):
                    for instances in reversed(placed):
                        self._undo(instances)
                    self._record_turn()
                    return outcome
                placed.append(outcome)
                own += self._state.parts(outcome)
            return tuple(instance for instances in placed for instance in instances)

        outcome = self._try_in_order(self._ticket(command.all), tenant, attempt)
        if isinstance(outcome, Rejection):
            index = len(placed)  # the first one that did not fit
            raise self._rejection(tenant, command.all[index], outcome, index)
        records = [
            self._allocate(tenant, terms, instances)
            for terms, instances in zip(command.all, placed, strict=True)
        ]
        return self._batch(201, records)

    def create_on(self, command: CreateOn) -> Answer:
        """Create several allocations on one node, all or none.

        Allocations that an equal command created before are returned instead.
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

        outcome = self._try_in_order(
            self._ticket(command.all),
            tenant,
            lambda held: self._try_on(node, tenant, requests, held),
        )
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
        self._work.enter(Ended(ended))
        self._work.room_appeared = True
        for part in ended.parts:
            self._work.finish_draining(part.node)
        return ended

    # Placing

    def _check_terms(self, terms: Terms, tenant: TenantStatus, index: int | None = None) -> Request:
        """Return the request, unless the priority is too high or no GPU model offers it."""
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
        self, tenant: TenantStatus, request: Request, count: int, held: list[Part] | None = None
    ) -> _Outcome:
        """Place all instances of a request within the tenant's quota, or none."""
        held = held or []
        limited = has_limits(tenant)
        too_much = None
        if limited:
            too_much = least_excess(tenant, request, count, held, self._state.geometries.values())
        if too_much is None:
            scheduler = self._state.scheduler
            turn = scheduler.turn
            try:
                outcome = scheduler.submit_all(self._state.canonical(request), count, waits=True)
            except Exception as error:
                return self._policy_failed(request, turn, error)
            if isinstance(outcome, Rejection):
                self._record_turn()
                return as_capacity(outcome)
            if limited:
                too_much = excess(tenant, [*held, *self._state.parts(outcome)])
            if too_much is None:
                return outcome
            self._undo(outcome)
            self._record_turn()
        return Rejection(request, Reason.QUOTA, too_much)

    def _try_on(
        self, node: NodeStatus, tenant: TenantStatus, requests: list[Request], held: list[Part]
    ) -> _Outcome:
        """Place requests on one node within the tenant's quota, all or none."""
        state = self._state
        offers = Offers(state.scheduler)
        turn, before = state.scheduler.turn, self._instances_on(node)
        try:
            outcome = offers.place_on(node.name, requests)
        except Exception as error:
            self._undo(tuple(self._instances_on(node) - before))
            return self._policy_failed(requests[0], turn, error)
        if isinstance(outcome, Rejection):
            return as_capacity(outcome)
        too_much = excess(tenant, [*held, *state.parts(outcome)])
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

    def _ticket(self, terms: tuple[Terms, ...] | list[Terms], tenant: str = "") -> Ticket:
        """Return the next ticket, for a request that is decided together with the queue.

        Requests that may wait queue behind others of their tenant. Requests that may not belong to
        no tenant's line, and may overtake queued requests as far as backfill allows.
        """
        first = terms[0]
        priority = max(one.priority for one in terms)
        number = self._state.last_ticket + 1
        return Ticket(number, request_of(first.want), first.count, tenant, priority)

    def _try_in_order(self, ticket: Ticket, tenant: TenantStatus, attempt: _Attempt) -> _Outcome:
        """Try to place a request when the queue's order comes to it; at once if none wait."""
        state = self._state
        waiting = len(state.waiting)
        if not waiting:
            return attempt([])
        room_appeared = self._work.room_appeared
        state.waiting.enter(ticket)
        outcome = self.serve((ticket.number, tenant, attempt))
        if ticket.number in state.waiting:
            state.waiting.withdraw(ticket.number)
            # Tickets behind it may have been held back for it: serve the queue again for them.
            self._work.room_appeared = room_appeared
        return _behind_others(ticket.request, waiting) if outcome is None else outcome

    def serve(self, visitor: tuple[int, TenantStatus, _Attempt] | None = None) -> _Outcome | None:
        """Make one pass through the queue, and place the requests that fit.

        ``visitor`` is a request that takes part in this pass only. Returns its outcome; None if
        its turn did not come.
        """
        state = self._state
        self._work.room_appeared = False
        visitor_number = 0 if visitor is None else visitor[0]
        visitor_outcome: _Outcome | None = None
        held: defaultdict[str, list[Part]] = defaultdict(list)  # placed, but not entered yet

        def place(ticket: Ticket) -> _Outcome:
            nonlocal visitor_outcome
            if visitor is not None and ticket.number == visitor_number:
                _, tenant, attempt = visitor
                outcome = visitor_outcome = attempt(held[tenant.ref.id])
            else:
                tenant = state.tenants[ticket.tenant]
                outcome = self._try(tenant, ticket.request, ticket.count, held[tenant.ref.id])
            if not isinstance(outcome, Rejection):
                held[tenant.ref.id] += state.parts(outcome)
            elif not fits_empty_cluster(ticket.request, ticket.count, state.gpus):
                # Waiting cannot help this request, so others need not wait behind it.
                return Rejection(outcome.request, Reason.QUOTA, outcome.detail)
            return outcome

        for ticket, instances in state.waiting.serve(place):
            if ticket.number != visitor_number:
                tenant = state.tenants[ticket.tenant].ref
                served = Served(state.by_ticket[ticket.number], tenant, state.parts(instances))
                self._work.enter(served, instances)
        overtaken = state.waiting.take_overtaken()
        overtaken.pop(visitor_number, None)
        if overtaken:
            self._work.enter(Overtaken(overtaken))
        return visitor_outcome


def _behind_others(request: Request, waiting: int) -> Rejection:
    others = "another request waits" if waiting == 1 else f"{waiting} other requests wait"
    return Rejection(request, Reason.CAPACITY, f"{others} for room ahead of {request}")
