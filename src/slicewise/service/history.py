"""A memory of the last day: what was decided, and how the cluster stood, every ten seconds.

Every process keeps its own, from the rows its replica takes in, so a standby remembers the same as
the leader. It lasts as long as the process; what is kept for good is the journal.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from slicewise.control.entries import (
    Allocated,
    AllocationRecord,
    Ended,
    Queued,
    Rejected,
    Row,
    Seconds,
    Served,
    TenantRemoved,
)
from slicewise.control.ports import StoreError
from slicewise.core.fragmentation import Reading
from slicewise.service.capacity import Capacity
from slicewise.service.plant import Plant

STEP_SECONDS = 10.0
KEPT_SAMPLES = 8640
"""A day of them."""
KEPT_REJECTIONS = 500
MAX_TALLIES = 200_000
"""Tallies of single tenants kept in all samples together; the oldest are given up first."""
GAVE_UP = "waited too long"
"""The reason told for a request that waited in vain."""
_LOOK_SECONDS = 1.0
_AT_A_TIME = 5000


@dataclass(slots=True)
class Tally:
    """What happened in a stretch of time."""

    accepted: int = 0
    queued: int = 0
    ended: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    waited: int = 0
    wait_seconds: float = 0.0
    longest_wait: float = 0.0

    def refuse(self, reason: str, times: int = 1) -> None:
        """Count refusals."""
        self.rejected[reason] = self.rejected.get(reason, 0) + times

    def wait(self, seconds: float) -> None:
        """Count one that was placed after waiting."""
        self.waited += 1
        self.wait_seconds += seconds
        self.longest_wait = max(self.longest_wait, seconds)

    def add(self, other: Tally) -> None:
        """Count what another stretch of time counted."""
        self.accepted += other.accepted
        self.queued += other.queued
        self.ended += other.ended
        for reason, times in other.rejected.items():
            self.refuse(reason, times)
        self.waited += other.waited
        self.wait_seconds += other.wait_seconds
        self.longest_wait = max(self.longest_wait, other.longest_wait)


@dataclass(frozen=True, slots=True)
class Standing:
    """How the cluster stood at a moment."""

    waiting: int
    instances: int
    slices: int
    free_slices: int
    fragmentation: float
    placements: dict[str, int]


@dataclass(slots=True)
class Sample:
    """A stretch of time, and how the cluster stood at its end."""

    begun: Seconds
    at: Seconds
    tally: Tally
    by_tenant: dict[str, Tally]
    standing: Standing

    def of(self, tenant: str | None) -> Tally:
        """Everybody's tally, or one tenant's."""
        return self.tally if tenant is None else self.by_tenant.get(tenant, Tally())


class History:
    """Counts rows as they come, and remembers."""

    def __init__(self, plant: Plant, capacity: Callable[[], Capacity]) -> None:
        self._plant = plant
        self._capacity = capacity
        self._samples: deque[Sample] = deque(maxlen=KEPT_SAMPLES)
        self._rejections: deque[Row] = deque(maxlen=KEPT_REJECTIONS)
        self._tally = Tally()
        self._by_tenant: dict[str, Tally] = {}
        self._tallies = 0
        self._seen: int | None = None
        self._looking = asyncio.Lock()
        self.since: Seconds = plant.clock()
        """Since when it counts."""
        self._begun = self.since

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            if self._plant.loaded:
                await self.look()
            await asyncio.sleep(_LOOK_SECONDS)

    async def look(self) -> None:
        """Count what is new, and keep a sample if it is time for one."""
        try:
            async with self._looking:
                await self._catch_up()
        except StoreError:
            return  # it will answer again; nothing is lost until then
        now = self._plant.clock()
        if not self._begun <= now < self._begun + STEP_SECONDS:  # a clock may be set back
            self._keep(now)

    async def _catch_up(self) -> None:
        plant = self._plant
        if self._seen is None:
            begin = plant.replica.seq
            old = await plant.in_thread(self._old_rejections)
            self._rejections.extendleft(row for row in old if row.seq <= begin)
            self._seen = begin
        while True:
            rows = plant.replica.since(self._seen, _AT_A_TIME)
            if rows is None:
                rows = await plant.in_thread(plant.store.rows, self._seen, _AT_A_TIME)
            if not rows:
                return
            self.count(rows)
            self._seen = rows[-1].seq

    def _old_rejections(self) -> list[Row]:
        return self._plant.store.history(before=None, limit=KEPT_REJECTIONS, kinds=("rejected",))

    def count(self, rows: Iterable[Row]) -> None:
        """Count rows."""
        for row in rows:
            match row.entry:
                case Allocated(record):
                    for tally in self._whose(record.tenant):
                        tally.accepted += 1
                case Queued(record):
                    for tally in self._whose(record.tenant):
                        tally.queued += 1
                case Served(identity, tenant):
                    waiter = self._plant.state.allocations.get(identity)
                    for tally in self._whose(tenant):
                        tally.accepted += 1
                        if waiter is not None:
                            tally.wait(max(0.0, row.at - waiter.requested))
                case Rejected(tenant, reason=reason):
                    self._rejections.append(row)
                    for tally in self._whose(tenant):
                        tally.refuse(reason)
                case Ended(record):
                    self._count_end(record)
                case TenantRemoved(tenant):
                    self._forget(tenant)

    def _count_end(self, record: AllocationRecord) -> None:
        for tally in self._whose(record.tenant):
            if record.parts:
                tally.ended += 1
            elif record.cause == GAVE_UP:
                tally.refuse(GAVE_UP)

    def _whose(self, tenant: str) -> tuple[Tally, Tally]:
        own = self._by_tenant.get(tenant)
        if own is None:
            own = self._by_tenant[tenant] = Tally()
        return self._tally, own

    def _forget(self, tenant: str) -> None:
        """What a tenant did is not for the next one of that name."""
        self._by_tenant.pop(tenant, None)
        for sample in self._samples:
            if sample.by_tenant.pop(tenant, None) is not None:
                self._tallies -= 1

    def _keep(self, now: Seconds) -> None:
        if len(self._samples) == KEPT_SAMPLES:
            self._tallies -= len(self._samples[0].by_tenant)
        self._samples.append(self._sample(now))
        self._tallies += len(self._by_tenant)
        for sample in self._samples:
            if self._tallies <= MAX_TALLIES:
                break
            self._tallies -= len(sample.by_tenant)
            sample.by_tenant = {}
        self._tally, self._by_tenant = Tally(), {}
        self._begun = now

    def _sample(self, now: Seconds) -> Sample:
        return Sample(self._begun, now, self._tally, self._by_tenant, self.standing())

    def standing(self) -> Standing:
        """How the cluster stands."""
        state = self._plant.state
        placements: dict[str, int] = {}
        for use in self._capacity().models():
            for profile, left in use.placements.items():
                placements[profile] = placements.get(profile, 0) + left
        whole = state.cluster
        return Standing(
            len(state.waiting),
            whole.instance_count,
            whole.slices,
            whole.free_slices,
            whole.fragmentation(Reading.PARTIAL),
            placements,
        )

    def samples(self, seconds: float) -> Sequence[Sample]:
        """Those of the last so many seconds, and what there is of the one that is not over."""
        now = self._plant.clock()
        kept = [sample for sample in self._samples if sample.at > now - seconds]
        return [*kept, self._sample(now)]

    def rejections(self, tenant: str | None, most: int) -> list[Row]:
        """The latest, of everybody or of one tenant, the latest first."""
        found: list[Row] = []
        for row in reversed(self._rejections):
            entry = row.entry
            if isinstance(entry, Rejected) and tenant in (None, entry.tenant):
                found.append(row)
                if len(found) == most:
                    break
        return found
