"""Reclaim: which instances end so that a tenant gets what it is guaranteed.

A waiting request that its tenant's guarantee covers may claim a window in which preemptible
allocations run. These end as a whole, after a notice, and only if their tenants stay at or above
their own guarantee. So a tenant never claims from one that could claim it back.

The window is reserved for the line of the request before the notice is given. A claim is dropped
as soon as one of its conditions fails.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from slicewise.core.cluster import Instance
from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Geometry
from slicewise.core.states import ILLEGAL
from slicewise.engine.queue import Line, Queue, Ticket
from slicewise.engine.reservations import LineKey, Reservations, Window
from slicewise.engine.scheduler import Scheduler
from slicewise.engine.victims import Victim, cleared_windows

LOOK_AT = 256
"""The number of GPUs that are searched for the best window; those with more free slices first."""

_MOST_DOUBLINGS = 10
_SHARE = 20
"""One GPU of so many may have a claimed window at a time, and at least one of each model."""


@dataclass(frozen=True, slots=True)
class ReclaimRules:
    """When instances end for a tenant that claims its guarantee."""

    enabled: bool = False
    grace: float = 120.0
    """How long a request waits before it claims a window."""
    min_run: float = 600.0
    """How long an allocation runs before it may be ended."""
    notice: float = 30.0
    """The time from the notice to the end."""
    first_rest: float = 60.0
    """How long an allocation that was ended waits until it is tried again; doubled every time."""

    def __post_init__(self) -> None:
        for name in ("grace", "min_run", "notice", "first_rest"):
            if not 0 <= getattr(self, name) < math.inf:
                raise SlicewiseError(f"{name} of reclaim: {getattr(self, name)} is no duration")

    def rest(self, reclaims: int) -> float:
        """How long an allocation is held back after it was reclaimed this many times."""
        return self.first_rest * float(1 << min(reclaims - 1, _MOST_DOUBLINGS))

    def most(self, gpus: int) -> int:
        """The most claimed windows at a time, among so many GPUs of a model."""
        return max(1, gpus // _SHARE) if gpus else 0


class Notice(NamedTuple):
    """An allocation that has notice of its end."""

    id: str
    tenant: str
    slices: int
    gpu: int
    """The GPU with the claimed window."""


class Claim(NamedTuple):
    """A window for a line, and the allocations that end for it."""

    line: LineKey
    window: Window
    victims: tuple[Victim, ...]


class Reclaim:
    """Finds windows that may be claimed, and checks those that are."""

    def __init__(
        self,
        scheduler: Scheduler,
        queue: Queue,
        reservations: Reservations,
        rules: ReclaimRules,
    ) -> None:
        self.rules = rules
        self._scheduler = scheduler
        self._cluster = scheduler.cluster
        self._queue = queue
        self._reservations = reservations
        self._next_due = 0.0 if rules.enabled else math.inf

    @property
    def next_due(self) -> float | None:
        """When a request may be able to claim a window, if one waits for that."""
        return None if math.isinf(self._next_due) or not len(self._queue) else self._next_due

    # Claiming

    def find(
        self,
        running: Callable[[], Iterable[Victim]],
        notices: Iterable[Notice],
        over_quota: Callable[[Ticket], object],
        now: float,
    ) -> Claim | None:
        """Find a claim for the first request, in fair order, that may and can make one.

        ``running`` tells which preemptible allocations run, except those with a notice.
        """
        self._next_due = math.inf
        if not self.rules.enabled or self._scheduler.scans:
            return None
        entitled = [line for line in self._queue.each_line() if self._beyond(line) is not None]
        surplus = self._surplus(notices)
        victims: list[Victim] | None = None
        for line in sorted(entitled, key=self._queue.order_of):
            ticket = self._beyond(line)
            assert ticket is not None  # it was checked above
            if not self._is_due(ticket, now) or over_quota(ticket) is not None:
                continue
            if victims is None:
                victims = [v for v in running() if surplus(v.tenant) >= v.slices]
            ages = [victim.since + self.rules.min_run for victim in victims]
            old = [victim for victim, of_age in zip(victims, ages, strict=True) if of_age <= now]
            self._next_due = min([self._next_due, *(of_age for of_age in ages if of_age > now)])
            claim = self._best(line, old, surplus, now)
            if claim is not None:
                return claim
        return None

    def _beyond(self, line: Line) -> Ticket | None:
        """The first request of a line without a claimed window, if its guarantee covers it."""
        key = line.key
        shares = self._queue.shares
        if key.instances > 1 or not shares.within_guarantee(key.tenant, key.request, 1):
            return None
        if self._room(key.tenant) < shares.size(key.request):
            return None
        claimed = sum(window.claimed for window in self._reservations.of(key))
        number = line.at(claimed)
        return None if number is None else self._queue.ticket(number)

    def _is_due(self, ticket: Ticket, now: float) -> bool:
        """Whether a request has waited long enough, and no window of its own opens soon."""
        due = ticket.entered + self.rules.grace
        position = self._queue.position(ticket.number)
        own = self._reservations.of(ticket.line)[position : position + 1]
        opens = own[0].opens if own else None
        if opens is not None and now < opens <= now + self.rules.notice:
            due = max(due, opens)
        if due > now:
            self._next_due = min(self._next_due, due)
        return due <= now

    def _room(self, tenant: str) -> int:
        """The slices that a tenant may claim still: its guarantee less what it has and claimed."""
        shares = self._queue.shares
        guarantee = shares.entitlement(tenant).guarantee
        claimed = sum(
            self._size(window) for line, window in self._claimed() if line.tenant == tenant
        )
        return guarantee - shares.slices(tenant) - claimed

    def _surplus(self, notices: Iterable[Notice]) -> Callable[[str], int]:
        """How many slices a tenant has above its guarantee once those with a notice have ended."""
        shares = self._queue.shares
        leaving: Counter[str] = Counter()
        for notice in notices:
            leaving[notice.tenant] += notice.slices
        return lambda tenant: (
            shares.slices(tenant) - leaving[tenant] - shares.entitlement(tenant).guarantee
        )

    def _best(
        self, line: Line, victims: Iterable[Victim], surplus: Callable[[str], int], now: float
    ) -> Claim | None:
        """The best window of a line, by what ends for it.

        That is, in this order: as few allocations as possible, of the lowest priority, with the
        fewest slices, the youngest.
        """
        key = line.key
        victims = list(victims)
        models = self._below_caps(key)
        most = self._room(key.tenant)
        best: tuple[tuple[object, ...], Claim] | None = None
        gpus = self._candidates({one.gpu for v in victims for one in v.instances})
        usable = (gpu for gpu in gpus if self._may_claim_on(gpu, key, models))
        for gpu, placement, waste, ended in cleared_windows(
            self._cluster, key.request, usable, victims
        ):
            if placement.profile.size > most or not _all_may_end(ended, surplus):
                continue
            rank = (
                len(ended),
                max(victim.priority for victim in ended),
                sum(victim.slices for victim in ended),
                -min(victim.since for victim in ended),
                waste,
                gpu,
                placement.start,
            )
            if best is not None and best[0] < rank:
                continue
            if self._cluster.once_cleared(gpu, placement.number) != ILLEGAL:
                window = Window(gpu, placement.number, now + self.rules.notice, claimed=True)
                best = rank, Claim(key, window, ended)
        return None if best is None else best[1]

    def _may_claim_on(self, gpu: int, line: LineKey, models: set[Geometry]) -> bool:
        held = self._reservations.on(gpu)
        mine = held is None or _own(held, line)
        return mine and self._cluster.state(gpu).geometry in models

    def _below_caps(self, line: LineKey) -> set[Geometry]:
        """The models of which another window may be claimed for a line."""
        shares = self._queue.shares
        claimed = Counter(self._cluster.state(w.gpu).geometry for _, w in self._claimed())
        return {
            geometry
            for geometry in shares.models(line.request)
            if claimed[geometry] < self.rules.most(shares.gpus(geometry))
        }

    def _candidates(self, gpus: Iterable[int]) -> Iterable[int]:
        usable = [gpu for gpu in gpus if self._cluster.takes_instances(gpu)]
        usable.sort(key=lambda gpu: (-self._cluster.state(gpu).free_slices, gpu))
        return islice(usable, LOOK_AT)

    def windows_with(self, claim: Claim) -> tuple[Window, ...]:
        """The windows of a line with a claimed one, which replaces another if all have theirs."""
        pool = [w for w in self._reservations.of(claim.line) if w.gpu != claim.window.gpu]
        line = self._queue.line(claim.line)
        if line is not None and len(pool) >= len(line) - line.held:
            pool.remove([window for window in pool if not window.claimed][-1])
        return (*pool, claim.window)

    # Checking

    def broken(
        self, notices: Iterable[Notice], leaves_by: Callable[[Instance, float], bool]
    ) -> tuple[LineKey, Window] | None:
        """The latest claimed window that must be dropped, if any.

        That is so if its tenant is no longer within its guarantee with it, if a victim's tenant
        falls below its own, or if something in the window is not known to leave.
        """
        notices = list(notices)
        surplus = self._surplus(notices)
        spared = {notice.gpu for notice in notices if surplus(notice.tenant) < 0}
        claimed = sorted(self._claimed(), key=lambda one: (one[1].opens or 0.0, one[1].gpu))
        for line, window in reversed(claimed):
            opens = window.opens
            assert opens is not None  # a claimed window opens at the end of a notice
            if (
                window.gpu in spared
                or self._room(line.tenant) < 0
                or not all(leaves_by(one, opens) for one in self._reservations.blockers(window))
            ):
                return line, window
        return None

    @property
    def blockers(self) -> dict[int, set[int]]:
        """By GPU with a claimed window: the ids of the instances that are still in it."""
        blockers = self._reservations.blockers
        return {w.gpu: {one.id for one in blockers(w)} for _, w in self._claimed()}

    def _claimed(self) -> list[tuple[LineKey, Window]]:
        return [(line, w) for line, pool in self._reservations for w in pool if w.claimed]

    def _size(self, window: Window) -> int:
        placements = self._cluster.state(window.gpu).geometry.placements
        return placements[window.placement].profile.size


def _own(held: tuple[LineKey, Window], line: LineKey) -> bool:
    """Whether a reservation is the line's own, and not claimed."""
    return held[0] == line and not held[1].claimed


def _all_may_end(ended: Iterable[Victim], surplus: Callable[[str], int]) -> bool:
    """Whether no tenant falls below its guarantee if these allocations end."""
    lost: Counter[str] = Counter()
    for victim in ended:
        lost[victim.tenant] += victim.slices
    return all(surplus(tenant) >= slices for tenant, slices in lost.items())
