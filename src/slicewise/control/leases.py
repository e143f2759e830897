"""Leases: ends allocations whose lease is over, warns their tenants before, extends leases."""

from __future__ import annotations

from slicewise.api.base import moment
from slicewise.control.allocations import Allocations
from slicewise.control.answers import Answer, RefusedError, json_answer
from slicewise.control.commands import Extend
from slicewise.control.quota import too_long
from slicewise.control.state import State
from slicewise.control.unit_of_work import UnitOfWork
from slicewise.control.views import allocation_view
from slicewise.core.request import Reason
from slicewise.journal.entries import AllocationRecord, Cause, Seconds
from slicewise.journal.lease_entries import LeaseEnding, LeaseExtended


class Leases:
    """Ends leases, warns of their end, and extends them."""

    def __init__(self, work: UnitOfWork, allocations: Allocations) -> None:
        self._work = work
        self._state = work.state
        self._allocations = allocations

    def expire(self) -> None:
        """End allocations whose lease is over, and warn the tenants of those that end soon."""
        now = self._work.now
        for allocation in self._state.leases_due(now):
            ends = allocation.ends
            assert ends is not None  # only an allocation with a lease is due
            if ends <= now:
                self._allocations.end(allocation, Cause.LEASE)
            else:
                self._work.enter(LeaseEnding(allocation.id, allocation.tenant, ends))

    def extend(self, command: Extend) -> Answer:
        """Extend a lease: it ends the given time from now, and never earlier than before."""
        state, identity, lease = self._state, command.allocation, command.lease
        allocation = state.allocations.get(identity)
        if allocation is None or command.tenant not in (None, allocation.tenant):
            raise RefusedError(404, f"no allocation {identity!r}")
        if allocation.placed is None:
            sentence = f"allocation {identity!r} is queued: its lease begins when it is placed"
            raise RefusedError(409, sentence, reason="queued")
        before, ends = allocation.ends, self._work.now + lease
        if before is None:
            sentence = f"allocation {identity!r} has no lease to extend: it lasts until its release"
            raise RefusedError(409, sentence, reason="no lease")
        excessive = too_long(state.tenants[allocation.tenant.id], lease)
        if excessive is not None:
            raise RefusedError(409, excessive, reason=Reason.QUOTA)
        opening = promised_opening(state, allocation)
        if opening is not None and ends > max(opening, before):
            raise RefusedError(
                409,
                f"the room of allocation {identity!r} is promised to a waiting request: its lease "
                f"may last until {moment(max(opening, before))}, not until {moment(ends)}",
                reason="promised",
            )
        if ends > before:
            self._work.enter(LeaseExtended(identity, allocation.tenant, lease, ends))
        return json_answer(200, allocation_view(state, state.allocations[identity]))


def promised_opening(state: State, allocation: AllocationRecord) -> Seconds | None:
    """Return the time from which the room of an allocation is promised to a waiting request.

    Its lease is not extended past that time. None if nothing is promised.
    """
    if not len(state.reservations):
        return None
    opens = []
    for identity in state.instances[allocation.id]:
        instance = state.cluster.instance(identity)
        reservation = state.reservations.on(instance.gpu)
        if reservation is None or reservation[1].opens is None:
            continue
        if instance in state.reservations.blockers(reservation[1]):
            opens.append(reservation[1].opens)
    return min(opens, default=None)
