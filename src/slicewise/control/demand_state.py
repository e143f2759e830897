"""The part of the state that estimates the demand: what was asked for, and how long it stayed.

Requests count whether they were placed, queued or rejected, except for those that a quota rejected:
no placement would have served them. `TenantWindow` bounds what one tenant adds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from slicewise.control.status import request_of
from slicewise.control.tenant_window import TenantWindow
from slicewise.core.request import Reason, Request
from slicewise.engine.demand import DemandData, DemandEstimate
from slicewise.journal.entries import AllocationRecord, Cause, Rejected, Seconds, TenantRef, Want

if TYPE_CHECKING:
    from slicewise.control.state import State

_NOT_DEMAND = frozenset({Reason.QUOTA, Reason.UNKNOWN_PROFILE})
"""Reasons of rejections that say nothing about placements."""
_NATURAL_ENDS = (Cause.RELEASED, Cause.LEASE)
"""Causes of an end by which a lifetime was not cut short."""
_MOST_REQUESTS = 1024
"""The limit on cached requests: tenants choose them, so memory must be bounded."""


class DemandSnapshot(msgspec.Struct, frozen=True):
    """All of a demand state."""

    estimate: DemandData = DemandData()
    asks: tuple[tuple[Seconds, str, int], ...] = ()
    ends: tuple[tuple[Seconds, str, int], ...] = ()
    seen: int = 0
    seen_rejected: int = 0


class DemandState:
    """Counts requests and lifetimes from entries of the journal."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.estimate = DemandEstimate()
        self._asks, self._ends = TenantWindow(), TenantWindow()
        self.seen = 0
        """Instances asked for since the table changed, as far as they count."""
        self.seen_rejected = 0
        """How many of them were rejected, or waited too long."""
        self._requests: dict[Request, Request | None] = {}
        self._models_seen = 0
        """For which models of the cluster the requests are cached."""

    def snapshot(self) -> DemandSnapshot:
        """Return everything that `restore` needs."""
        return DemandSnapshot(
            self.estimate.data(),
            self._asks.entries,
            self._ends.entries,
            self.seen,
            self.seen_rejected,
        )

    def restore(self, snapshot: DemandSnapshot) -> None:
        """Continue from a snapshot."""
        self.estimate = DemandEstimate.of(snapshot.estimate)
        self._asks, self._ends = TenantWindow(snapshot.asks), TenantWindow(snapshot.ends)
        self.seen, self.seen_rejected = snapshot.seen, snapshot.seen_rejected

    def begin_count(self) -> None:
        """Count requests and rejections from now on: another table decides."""
        self.seen = self.seen_rejected = 0

    def created(self, record: AllocationRecord, at: Seconds) -> None:
        """Count the request of a new allocation, placed or queued."""
        if not record.replaces:  # the request for a reclaimed allocation was counted before
            self._asked(record.tenant, record.want, record.count, at)

    def rejected(self, entry: Rejected, at: Seconds) -> None:
        """Count a rejected request."""
        if entry.reason not in _NOT_DEMAND:
            self.seen_rejected += self._asked(entry.tenant, entry.want, entry.count, at)

    def ended(self, record: AllocationRecord, at: Seconds) -> None:
        """Count the lifetimes of an allocation's instances, unless they were cut short."""
        if record.cause is Cause.TIMEOUT:
            self.seen_rejected = min(self.seen, self.seen_rejected + record.count)
        if record.placed is None or record.ended is None or record.cause not in _NATURAL_ENDS:
            return
        lifetime = record.ended - record.placed
        stated = record.expected_seconds
        if stated is None and record.ends is not None:
            stated = record.ends - record.placed
        counted = self._take(self._ends, record.tenant, len(record.parts), at)
        for part in record.parts[:counted]:
            self.estimate.ended(part.profile, lifetime, stated)

    def request_for(self, request: Request) -> Request | None:
        """Return the request that counts for one; None if no model of the cluster offers it.

        Requests with the same candidates are one: a need is canonical, the models are those that
        offer it, and all of them are the same as none in particular.
        """
        models_seen = self._state.cluster.models_seen
        if models_seen != self._models_seen:
            self._requests.clear()
            self._models_seen = models_seen
        try:
            return self._requests[request]
        except KeyError:
            if len(self._requests) == _MOST_REQUESTS:
                self._requests.clear()
            counts = self._request_for(self._state.canonical(request))
            self._requests[request] = counts
            return counts

    def _request_for(self, request: Request) -> Request | None:
        everywhere = Request(request.want)
        offering = {g.model for g in self._state.geometries.values() if everywhere.candidates(g)}
        named = offering.intersection(request.models) if request.models else offering
        if not named:
            return None
        return everywhere if named == offering else Request(request.want, tuple(sorted(named)))

    def _asked(self, tenant: TenantRef, want: Want, count: int, at: Seconds) -> int:
        """Count a request, and return for how many instances."""
        request = self.request_for(request_of(want))
        if request is None:
            return 0
        counted = self._take(self._asks, tenant, count, at)
        # One that counts for none is known to be asked for nevertheless.
        self.estimate.asked(self._steady(at), request, counted)
        self.seen += counted
        return counted

    def _take(self, window: TenantWindow, tenant: TenantRef, count: int, at: Seconds) -> int:
        state = self._state
        held = state.tenants[tenant.id].usage.instances
        return window.take(self._steady(at), tenant.id, count, held, len(state.owner))

    def _steady(self, at: Seconds) -> Seconds:
        """Return the steady time: a step of the clock is no time in which nothing was asked for."""
        return at - self._state.clock_offset
