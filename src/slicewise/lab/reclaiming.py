"""Fair lines with reclaim: instances end for tenants that stay within their guarantee.

Every instance is preemptible. One that is ended loses what it had done: its request waits again, at
the front of its line and without giving up, and it runs for its whole lifetime once it is placed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from slicewise.core.cluster import Instance
from slicewise.engine.queue import Ticket
from slicewise.engine.reclaim import Claim, Notice, Reclaim, ReclaimRules
from slicewise.engine.shares import Entitlement
from slicewise.engine.victims import Victim
from slicewise.lab.disciplines import InLines
from slicewise.lab.tenants import Asked


@dataclass
class Run:
    """An instance that runs."""

    asked: Asked
    instance: Instance
    since: int
    reclaims: int
    """How often it was ended before."""
    ends: float | None = None
    """When its notice is over, if it has one."""
    claimed_on: int = -1
    """The GPU with the window for which it ends."""


class InLinesWithReclaim(InLines):
    """Fair lines in which tenants have guarantees, and claim them."""

    def __init__(self, reclaim_rules: ReclaimRules, *fair: Any) -> None:
        super().__init__(*fair)
        slices = self.scheduler.cluster.slices
        for tenant in self.scenario.tenants:
            guarantee = int(tenant.guarantee * slices)
            self.shares.entitle(tenant.name, Entitlement(tenant.weight, guarantee))
        self._engine = Reclaim(self.scheduler, self.queue, self.reservations, reclaim_rules)
        self._runs: dict[int, Run] = {}
        """By instance."""
        self._noticed: dict[int, Run] = {}
        self._held: defaultdict[int, list[tuple[Asked, int]]] = defaultdict(list)
        """By GPU with a claimed window: what was ended there, and how often."""
        self._rested: list[tuple[float, Asked]] = []
        """What may be placed again from a time on."""
        self._reclaims: dict[int, int] = {}
        """By number of a request that waits again: how often it was ended."""
        self._again = 0

    def slot(self, now: int, arrivals: Iterable[Asked]) -> None:
        """Notices end first; at the end of the slot, windows are claimed."""
        self.now = now
        self._end_notices()
        self._enter_rested()
        super().slot(now, arrivals)
        self._check()
        while (claim := self._find()) is not None:
            self._claim(claim)
            self._check()

    def _end_notices(self) -> None:
        due = [
            run for run in self._noticed.values() if run.ends is not None and run.ends <= self.now
        ]
        for run in due:
            instance = run.instance
            self._ending[run.since + run.asked.lifetime].remove(instance)
            self.scheduler.release(instance)
            self._held[run.claimed_on].append((run.asked, run.reclaims + 1))
            self.lost += instance.size * (self.now - run.since)
            self._ended(instance)
            self.slices[self._owner.pop(instance.id)] -= instance.size
        if due:
            self._room_appeared()
            self._pass()

    def _enter_rested(self) -> None:
        """Let those wait again that have rested, at the front of their lines."""
        due = [asked for until, asked in self._rested if until <= self.now]
        self._rested = [one for one in self._rested if one[0] > self.now]
        for asked in sorted(due, key=lambda one: -one.slot):
            self.waiting[asked.number] = asked
            self.waiting_kinds[asked.kind] += 1
            self._arrived(replace(self._ticket(asked), entered=asked.slot))

    def _find(self) -> Claim | None:
        return self._engine.find(self._running, self._notices(), self.over_quota, self.now)

    def _claim(self, claim: Claim) -> None:
        """Reserve the window of a claim, and give notice to what is in it."""
        before = len(self.reservations.of(claim.line))
        windows = self._engine.windows_with(claim)
        self.reserve(claim.line, windows)
        for victim in claim.victims:
            run = self._runs[victim.instances[0].id]
            run.ends = self.now + self._engine.rules.notice
            run.claimed_on = claim.window.gpu
            self._noticed[run.instance.id] = run
        if len(windows) <= before:  # it replaces another window, which is open to others now
            self._room_appeared()
            self._pass()

    def _check(self) -> None:
        """Drop claims that do not hold; let what was ended for a window rest once it is gone."""
        while (found := self._engine.broken(self._notices(), self._leaves_by)) is not None:
            line, window = found
            self.reserve(line, tuple(one for one in self.reservations.of(line) if one != window))
            self._room_appeared()
            self._pass()
        blockers = self._engine.blockers
        for identity, run in list(self._noticed.items()):
            if identity not in blockers.get(run.claimed_on, ()):
                run.ends = None
                del self._noticed[identity]
        for gpu in [gpu for gpu in self._held if gpu not in blockers]:
            for asked, reclaims in self._held.pop(gpu):
                self._again -= 1
                self._reclaims[self._again] = reclaims
                until = self.now + self._engine.rules.rest(reclaims)
                self._rested.append((until, asked._replace(number=self._again)))

    # What the engine asks

    def _running(self) -> Iterator[Victim]:
        """Yield the instances without a notice."""
        tenants = self.scenario.tenants
        for identity, run in self._runs.items():
            if identity not in self._noticed:
                name = tenants[run.asked.tenant].name
                yield Victim(f"{identity:020}", name, 0, run.since, (run.instance,))

    def _notices(self) -> list[Notice]:
        tenants = self.scenario.tenants
        return [
            Notice(
                f"{identity:020}",
                tenants[run.asked.tenant].name,
                run.instance.size,
                run.claimed_on,
            )
            for identity, run in self._noticed.items()
        ]

    def _leaves_by(self, instance: Instance, time: float) -> bool:
        ends = self._runs[instance.id].ends
        return ends is not None and ends <= time

    # What happens

    def _run(self, ticket: Ticket, instances: tuple[Instance, ...]) -> None:
        asked = self.waiting[ticket.number]
        super()._run(ticket, instances)
        (instance,) = instances
        reclaims = self._reclaims.pop(ticket.number, 0)
        self._runs[instance.id] = Run(asked, instance, self.now, reclaims)

    def _ended(self, instance: Instance) -> None:
        super()._ended(instance)
        del self._runs[instance.id]
        self._noticed.pop(instance.id, None)
