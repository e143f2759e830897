"""Statistics of the last day: a sample of decisions and of the cluster every ten seconds.

Every process keeps its own, from the journal entries that its replica applies, so a standby has the
same samples as the leader. They are lost when the process ends; the journal remains.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from slicewise.control.ports import StoreError
from slicewise.core.fragmentation import Reading
from slicewise.journal.entries import (
    Allocated,
    AllocationRecord,
    Ended,
    Queued,
    Rejected,
    Row,
    Seconds,
    Served,
    TenantRef,
)
from slicewise.runtime.runtime import Runtime
from slicewise.server.capacity import FreeCapacity

STEP_SECONDS = 10.0
KEPT_SAMPLES = 8640
"""A day."""
KEPT_REJECTIONS = 500
MAX_TALLIES = 200_000
"""Figures by tenant kept in all samples; the oldest are dropped first."""
GAVE_UP = "waited too long"
"""The reason of a request that timed out in the queue."""
_UPDATE_SECONDS = 1.0
_PAGE = 5000


@dataclass(slots=True)
class Counts:
    """Counts of decisions in an interval."""

    accepted: int = 0
    queued: int = 0
    ended: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    waited: int = 0
    wait_seconds: float = 0.0
    longest_wait: float = 0.0

    def reject(self, reason: str, times: int = 1) -> None:
        """Count rejections."""
        self.rejected[reason] = self.rejected.get(reason, 0) + times

    def wait(self, seconds: float) -> None:
        """Count a request that was placed from the queue."""
        self.waited += 1
        self.wait_seconds += seconds
        self.longest_wait = max(self.longest_wait, seconds)

    def add(self, other: Counts) -> None:
        """Add the counts of another interval."""
        self.accepted += other.accepted
        self.queued += other.queued
        self.ended += other.ended
        for reason, times in other.rejected.items():
            self.reject(reason, times)
        self.waited += other.waited
        self.wait_seconds += other.wait_seconds
        self.longest_wait = max(self.longest_wait, other.longest_wait)


@dataclass(frozen=True, slots=True)
class ClusterFigures:
    """The cluster at one moment."""

    waiting: int
    instances: int
    slices: int
    free_slices: int
    fragmentation: float
    placements: dict[str, int]


@dataclass(slots=True)
class Sample:
    """The decisions of an interval, and the cluster at its end."""

    start: Seconds
    at: Seconds
    counts: Counts
    by_tenant: dict[TenantRef, Counts]
    waiting: dict[TenantRef, int]
    """By tenant: its queued requests, if it has any."""
    cluster: ClusterFigures

    def of(self, tenant: TenantRef | None) -> Counts:
        """The counts of all tenants, or of one."""
        return self.counts if tenant is None else self.by_tenant.get(tenant, Counts())

    def waiting_of(self, tenant: TenantRef | None) -> int:
        """The queued requests of all tenants, or of one."""
        return self.cluster.waiting if tenant is None else self.waiting.get(tenant, 0)

    @property
    def tallies(self) -> int:
        """The number of figures by tenant."""
        return len(self.by_tenant) + len(self.waiting)

    def forget_tenants(self) -> None:
        """Keep no figures by tenant."""
        self.by_tenant, self.waiting = {}, {}


class RecentStats:
    """Collects samples from the journal entries as they are committed."""

    def __init__(self, runtime: Runtime, capacity: Callable[[], FreeCapacity]) -> None:
        self._runtime = runtime
        self._capacity = capacity
        self._samples: deque[Sample] = deque(maxlen=KEPT_SAMPLES)
        self._rejections: deque[Row] = deque(maxlen=KEPT_REJECTIONS)
        self._counts = Counts()
        self._by_tenant: dict[TenantRef, Counts] = {}
        self._tally_count = 0
        self._seen: int | None = None
        self._lock = asyncio.Lock()
        self.since: Seconds = runtime.clock()
        """Start of the statistics."""
        self._start = self.since

    async def run(self) -> None:
        """Update every second until cancelled."""
        while True:
            if self._runtime.loaded:
                await self.update()
            await asyncio.sleep(_UPDATE_SECONDS)

    async def update(self) -> None:
        """Count new entries; store a sample if the interval is over."""
        try:
            async with self._lock:
                await self._catch_up()
        except StoreError:
            return  # retried with the next update
        now = self._runtime.clock()
        if not self._start <= now < self._start + STEP_SECONDS:  # service time may go back
            self._store(now)

    async def _catch_up(self) -> None:
        runtime = self._runtime
        if self._seen is None:
            start = runtime.replica.seq
            old = await runtime.in_thread(self._old_rejections)
            self._rejections.extendleft(row for row in old if row.seq <= start)
            self._seen = start
        while True:
            rows = runtime.replica.since(self._seen, _PAGE)
            if rows is None:
                rows = await runtime.in_thread(runtime.store.rows, self._seen, _PAGE)
            if not rows:
                return
            self.count(rows)
            self._seen = rows[-1].seq

    def _old_rejections(self) -> list[Row]:
        return self._runtime.store.history(before=None, limit=KEPT_REJECTIONS, kinds=("rejected",))

    def count(self, rows: Iterable[Row]) -> None:
        """Count journal entries."""
        for row in rows:
            match row.entry:
                case Allocated(record):
                    for counts in self._counts_of(record.tenant):
                        counts.accepted += 1
                case Queued(record):
                    for counts in self._counts_of(record.tenant):
                        counts.queued += 1
                case Served(identity, tenant):
                    waiter = self._runtime.state.allocations.get(identity)
                    for counts in self._counts_of(tenant):
                        counts.accepted += 1
                        if waiter is not None:
                            counts.wait(max(0.0, row.at - waiter.requested))
                case Rejected(tenant, reason=reason):
                    self._rejections.append(row)
                    for counts in self._counts_of(tenant):
                        counts.reject(reason)
                case Ended(record):
                    self._count_end(record)

    def _count_end(self, record: AllocationRecord) -> None:
        for counts in self._counts_of(record.tenant):
            if record.parts:
                counts.ended += 1
            elif record.cause == GAVE_UP:
                counts.reject(GAVE_UP)

    def _counts_of(self, tenant: TenantRef) -> tuple[Counts, Counts]:
        own = self._by_tenant.get(tenant)
        if own is None:
            own = self._by_tenant[tenant] = Counts()
        return self._counts, own

    def _store(self, now: Seconds) -> None:
        if len(self._samples) == KEPT_SAMPLES:
            self._tally_count -= self._samples[0].tallies
        self._samples.append(self._sample(now))
        self._tally_count += self._samples[-1].tallies
        for sample in self._samples:
            if self._tally_count <= MAX_TALLIES:
                break
            self._tally_count -= sample.tallies
            sample.forget_tenants()
        self._counts, self._by_tenant = Counts(), {}
        self._start = now

    def _sample(self, now: Seconds) -> Sample:
        tenants = self._runtime.state.tenants.values()
        waiting = {tenant.ref: tenant.waiting for tenant in tenants if tenant.waiting}
        return Sample(self._start, now, self._counts, self._by_tenant, waiting, self._figures())

    def _figures(self) -> ClusterFigures:
        state = self._runtime.state
        placements: dict[str, int] = {}
        for use in self._capacity().models():
            for profile, left in use.placements.items():
                placements[profile] = placements.get(profile, 0) + left
        cluster = state.cluster
        return ClusterFigures(
            len(state.waiting),
            cluster.instance_count,
            cluster.slices,
            cluster.free_slices,
            cluster.fragmentation(Reading.PARTIAL),
            placements,
        )

    def samples(self, seconds: float) -> Sequence[Sample]:
        """The samples of the last seconds, including the current interval."""
        now = self._runtime.clock()
        kept = [sample for sample in self._samples if sample.at > now - seconds]
        return [*kept, self._sample(now)]

    def rejections(self, tenant: TenantRef | None, limit: int) -> list[Row]:
        """The latest rejections of all tenants or of one, newest first."""
        found: list[Row] = []
        for row in reversed(self._rejections):
            entry = row.entry
            if isinstance(entry, Rejected) and tenant in (None, entry.tenant):
                found.append(row)
                if len(found) == limit:
                    break
        return found
