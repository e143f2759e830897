"""Reclaim: carries out what `engine.reclaim` finds, and records it.

A claim goes through these steps: the window is reserved for the request that claims it, the
allocations in it get notice, they end, and for each of them another allocation waits in its place.
That one is held back until the window has been used or dropped, and then rests for a while.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from slicewise.control.allocations import Allocations
from slicewise.control.unit_of_work import UnitOfWork
from slicewise.core.cluster import Instance
from slicewise.core.request import Reason
from slicewise.engine.reclaim import Notice, Reclaim, ReclaimRules
from slicewise.engine.victims import Victim
from slicewise.journal.entries import (
    AllocationRecord,
    Cause,
    Queued,
    Seconds,
)
from slicewise.journal.reclaim_entries import GpuRef, HeldBack, Reclaiming


class Reclaims:
    """Makes claims, gives notice, ends allocations, and holds back their replacements."""

    def __init__(self, work: UnitOfWork, allocations: Allocations, rules: ReclaimRules) -> None:
        self._work = work
        self._state = state = work.state
        self._allocations = allocations
        self._engine = Reclaim(state.scheduler, state.waiting, state.reservations, rules)

    @property
    def active(self) -> bool:
        """Whether a reclaim is under way: an allocation has notice, or is held back."""
        return bool(self._state.notices or self._state.held)

    @property
    def may_claim(self) -> bool:
        """Whether there may be anything to do for `serve`."""
        return self._engine.rules.enabled or self.active

    @property
    def next_time(self) -> Seconds | None:
        """When a notice or a hold ends, or a request may claim a window."""
        state = self._state
        times = [
            self._engine.next_due,
            *(state.allocations[identity].reclaimed_at for identity in state.notices),
            *(state.allocations[identity].held_until for identity in state.held),
        ]
        return min((time for time in times if time is not None), default=None)

    def expire(self) -> None:
        """End the allocations whose notice is over, and release those whose hold is over."""
        if not self.active:
            return
        self._check()
        state, now = self._state, self._work.now
        # The oldest is queued last, and thus at the front of its line.
        oldest_last = sorted(self._noticed(), key=lambda one: (-one.requested, one.id))
        for record in oldest_last:
            if record.reclaimed_at is not None and record.reclaimed_at <= now:
                self._end(record)
        for identity in sorted(state.held):
            until = state.allocations[identity].held_until
            if until is not None and until <= now:
                self._work.enter(HeldBack(identity, state.allocations[identity].tenant, None))
                self._work.room_appeared = True

    def serve(self) -> None:
        """Drop the claims that are no longer valid, and make new ones."""
        while True:
            self._check()
            if self._work.room_appeared:
                self._allocations.serve()
            elif not self._claim():
                return

    def _claim(self) -> bool:
        """Make the next claim, if any."""
        state, work, engine = self._state, self._work, self._engine
        claim = engine.find(self._running, self._notices(), self._allocations.over_quota, work.now)
        if claim is None:
            return False
        before = len(state.reservations.of(claim.line))
        windows = engine.windows_with(claim)
        self._allocations.reserve(claim.line, windows)
        if len(windows) <= before:  # it replaces another window, which is open to others now
            work.room_appeared = True
        at = work.now + engine.rules.notice
        node = state.cluster.node_of(claim.window.gpu)
        on = GpuRef(node.name, claim.window.gpu - node.gpus.start)
        for victim in claim.victims:
            record = state.allocations[victim.id]
            work.enter(Reclaiming(record.id, record.tenant, at, on))
        return True

    def _check(self) -> None:
        """Drop invalid claims, and end the notices and holds of claims that are gone."""
        state, work, engine = self._state, self._work, self._engine
        while (found := engine.broken(self._notices(), self._leaves_by)) is not None:
            line, window = found
            left = tuple(one for one in state.reservations.of(line) if one != window)
            self._allocations.reserve(line, left)
            work.room_appeared = True
        blockers = engine.blockers
        for record in self._noticed():
            if blockers.get(self._gpu(record), set()).isdisjoint(state.instances[record.id]):
                work.enter(Reclaiming(record.id, record.tenant, None))
        for identity in sorted(state.held):
            record = state.allocations[identity]
            if record.reclaimed_on is not None and self._gpu(record) not in blockers:
                until = work.now + engine.rules.rest(record.reclaims)
                work.enter(HeldBack(identity, record.tenant, until))

    def _end(self, record: AllocationRecord) -> None:
        """End an allocation, and queue another one in its place."""
        state, work = self._state, self._work
        successor = msgspec.structs.replace(
            record,
            id=work.new_id("a"),
            placed=None,
            parts=(),
            deadline=None,
            reason=Reason.HELD,
            detail="its slices were reclaimed, and the tenant that claimed them comes first",
            reclaimed_at=None,
            replaces=record.id,
            reclaims=record.reclaims + 1,
            held_until=None,
            extended=None,
            warned=False,
        )
        self._allocations.end(
            record,
            Cause.RECLAIMED,
            f"a tenant claimed slices that it is guaranteed; {successor.id} waits in its place",
        )
        first = min([0, *state.by_ticket]) - 1
        work.enter(Queued(successor, first))

    # Callbacks of the engine

    def _noticed(self) -> list[AllocationRecord]:
        return [self._state.allocations[identity] for identity in sorted(self._state.notices)]

    def _notices(self) -> list[Notice]:
        return [
            Notice(
                record.id,
                record.tenant.id,
                sum(part.size for part in record.parts),
                self._gpu(record),
            )
            for record in self._noticed()
        ]

    def _gpu(self, record: AllocationRecord) -> int:
        """Return the GPU where an allocation is reclaimed; -1 if it was removed."""
        on = record.reclaimed_on
        node = None if on is None else self._state.nodes.get(on.node)
        return -1 if on is None or node is None else node.gpus[on.gpu]

    def _running(self) -> Iterator[Victim]:
        """Yield the preemptible allocations, except those that have notice."""
        state = self._state
        for identity in state.preemptible:
            if identity in state.notices:
                continue
            record = state.allocations[identity]
            assert record.placed is not None  # it has instances
            instances = tuple(map(state.cluster.instance, state.instances[identity]))
            yield Victim(identity, record.tenant.id, record.priority, record.placed, instances)

    def _leaves_by(self, instance: Instance, time: Seconds) -> bool:
        """Return whether an instance is leaving, or ends by this time."""
        state = self._state
        if state.owner.get(instance.id) in state.leaving:
            return True
        ends = self._allocations.ends(instance)
        return ends is not None and ends <= time
