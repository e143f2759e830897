"""The `rehearsed` policy in simulations: rehearsals during a run.

`Rehearsing` does what the owner of the policy does in a service: it counts the demand, switches
back, rehearses when that is due and uses the winner. A rehearsal takes no simulated time.
`EngineRehearsing` runs on the engine, `CompiledRehearsing` on the compiled loops, some slots at a
time; a test compares them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from slicewise.core.cluster import Cluster
from slicewise.core.request import Request
from slicewise.engine.demand import DemandEstimate
from slicewise.engine.rehearsal import Rehearsal, Standing, due, switch_back
from slicewise.engine.scheduler import Scheduler
from slicewise.lab.engine_loop import EngineRun, record_totals
from slicewise.lab.mix import Mix
from slicewise.lab.rehearsal import lease_tables_for, rehearse, tables_for
from slicewise.lab.workload import Arrivals, Ints, SmallInts
from slicewise.policies.lease_aware import LeaseAware
from slicewise.policies.rehearsed import Rehearsed, table_for

if TYPE_CHECKING:
    from slicewise.lab.lease_loops import Ends, LeaseTables

BLOCK = 20
"""The slots between two looks at whether a rehearsal is due."""

Switched = Callable[[int, Standing, str, Rehearsal | None], None]
"""Called with the slot, the choice from then on, why, and the rehearsal that found it."""


class Rehearsing:
    """The estimate and the choice in force during a run; a slot is the unit of time."""

    def __init__(self, mix: Mix, gpus: int, switched: Switched = lambda *what: None) -> None:
        self.demand = DemandEstimate()
        self.standing = Standing()
        self._geometries = (mix.geometry,)
        self._gpus = ((mix.geometry, gpus),)
        self._profiles = [profile.name for profile in mix.profiles]
        self._requests = [Request(name) for name in self._profiles]
        self._ending: defaultdict[int, list[tuple[str, int, int | None]]] = defaultdict(list)
        self._switched = switched

    def before(self, slot: int, kind: int) -> bool:
        """Return whether a request made the policy switch back before it is decided."""
        back = switch_back(self.demand, self.standing, self._requests[kind], self._geometries)
        if back is None:
            return False
        self.standing, why = back
        self._switched(slot, self.standing, why, None)
        return True

    def knows(self, kind: int) -> bool:
        """Return whether the choice in force covers a request."""
        return self.standing.choice.covers(self._requests[kind], self._geometries)

    def after(self, slot: int, kind: int, lifetime: int, stated: int, accepted: bool) -> None:
        """Count what happened in a slot; ``stated`` is 0 if nothing was said of the lifetime."""
        for profile, lived, said in self._ending.pop(slot, ()):
            self.demand.ended(profile, lived, said)
        self.demand.asked(slot, self._requests[kind])
        if accepted:
            leaving = self._profiles[kind], lifetime, stated or None
            self._ending[slot + lifetime].append(leaving)

    def rehearse(self, slot: int) -> bool:
        """Rehearse if that is due; return whether the choice has changed."""
        if not due(self.demand, self.standing):
            return False
        rehearsal = rehearse(self.demand, self._gpus, self.standing.choice)
        assert rehearsal is not None  # requests and lifetimes are known by now
        before, self.standing = self.standing, rehearsal.standing
        self._switched(slot, self.standing, rehearsal.why, rehearsal)
        return before.choice != self.standing.choice


class EngineRehearsing:
    """A run on the engine: the readable twin of `CompiledRehearsing`."""

    def __init__(
        self, mix: Mix, gpus: int, gpus_per_node: int, switched: Switched = lambda *what: None
    ) -> None:
        self._policy = Rehearsed()
        self._cluster = Cluster.of(mix.geometry, gpus, gpus_per_node)
        self._run = EngineRun(Scheduler(self._cluster, self._policy), mix)
        self._rehearsing = Rehearsing(mix, gpus, switched)

    def advance(self, arrivals: Arrivals, begin: int, trace: SmallInts) -> None:
        """Run the slots from ``begin`` and fill in the trace."""
        rehearsing = self._rehearsing
        each = zip(*(column.tolist() for column in _all_of(arrivals)), strict=True)
        for slot, (kind, lifetime, stated) in enumerate(each, begin):
            if rehearsing.before(slot, kind):
                self._policy.use(rehearsing.standing.choice)
            accepted = self._run.slot(slot, kind, lifetime, stated)
            rehearsing.after(slot, kind, lifetime, stated, accepted)
            trace[slot - begin, 0] = accepted
            record_totals(self._cluster, trace, slot - begin)
            if (slot + 1) % BLOCK == 0 and rehearsing.rehearse(slot + 1):
                self._policy.use(rehearsing.standing.choice)


class CompiledRehearsing:
    """A run on the compiled loops: one call for the slots between two possible switches."""

    def __init__(
        self, mix: Mix, gpus: int, longest: int, switched: Switched = lambda *what: None
    ) -> None:
        from slicewise.lab import compiled_loops as loops
        from slicewise.lab import kernel

        self._geometries = (mix.geometry,)
        self._requests = tuple(Request(profile.name) for profile in mix.profiles)
        self._rehearsing = Rehearsing(mix, gpus, switched)
        self._departures = loops.new_departures(longest)
        self._longest = longest
        ring = len(self._departures.ending)
        self._leaves = np.full(ring, -1, np.int64)
        """By slot of arrival: when the instance leaves, or -1; when it is said to, or -1."""
        self._said = np.full(ring, -1, np.int64)
        self._leases: LeaseTables | None = None
        self._use(0)
        states = self._tables.after_place.shape[0]
        self._gpus = kernel.new_gpus(np.zeros(gpus, np.int64), states)

    def _use(self, slot: int) -> None:
        """Take the tables of the choice in force, before a slot."""
        choice = self._rehearsing.standing.choice
        bare = replace(choice, leases=False, mean_lifetime=0.0)
        self._tables = tables_for(self._geometries, self._requests, bare)
        self._known = np.array([self._rehearsing.knows(k) for k in range(len(self._requests))])
        self._leases = None
        policy = table_for(choice)
        if isinstance(policy, LeaseAware):
            from slicewise.lab import lease_loops

            self._leases = lease_loops.with_times(
                lease_tables_for(self._geometries, self._requests, policy.base),
                policy.mean_lifetime,
                self._longest,
            )
            self._ends = self._ends_at(slot, self._leases)

    def _ends_at(self, slot: int, leases: LeaseTables) -> Ends:
        """Return when the instances on each GPU are said to end; only leases keep this."""
        from slicewise.lab import lease_loops

        ends = lease_loops.new_ends(len(self._gpus.state_of))
        for at in np.flatnonzero(self._leaves >= slot):
            gpu, placement = self._departures.instances[at, :2]
            window = int(leases.placed[0, placement])
            first = (window & -window).bit_length() - 1
            ends.window[gpu, first] = window
            ends.end[gpu, first] = self._said[at]
        return ends

    def _advance(self, arrivals: Arrivals, begin: int, trace: SmallInts) -> None:
        """Run slots under one choice."""
        from slicewise.lab import compiled_loops, lease_loops

        kinds, lifetimes, stated = _all_of(arrivals)
        cluster = self._tables, self._gpus
        if self._leases is None:
            compiled_loops.advance(*cluster, self._departures, kinds, lifetimes, begin, trace)
        else:
            lease_loops.advance(
                *cluster,
                self._leases,
                self._ends,
                self._departures,
                kinds,
                lifetimes,
                stated,
                begin,
                trace,
            )
        slots = np.arange(begin, begin + len(kinds))
        at = slots % len(self._leaves)
        self._leaves[at] = np.where(trace[:, 0] == 1, slots + lifetimes, -1)
        self._said[at] = np.where(stated > 0, slots + stated, -1)

    def advance(self, arrivals: Arrivals, begin: int, trace: SmallInts) -> None:
        """Run the slots from ``begin`` and fill in the trace."""
        rehearsing = self._rehearsing
        kinds, lifetimes, stated = _all_of(arrivals)
        at = 0
        while at < len(kinds):
            if rehearsing.before(begin + at, int(kinds[at])):
                self._use(begin + at)
            end = min(len(kinds), at + BLOCK - (begin + at) % BLOCK)
            unknown = np.flatnonzero(~self._known[kinds[at:end]])
            if len(unknown):  # never the first one: the policy has switched back for it
                end = at + int(unknown[0])
            part = slice(at, end)
            here = Arrivals(kinds[part], lifetimes[part], stated[part])
            self._advance(here, begin + at, trace[part])
            columns = kinds[part], lifetimes[part], stated[part], trace[part, 0]
            each = zip(*(column.tolist() for column in columns), strict=True)
            for slot, (kind, lifetime, said, accepted) in enumerate(each, begin + at):
                rehearsing.after(slot, kind, lifetime, said, bool(accepted))
            at = end
            if (begin + at) % BLOCK == 0 and rehearsing.rehearse(begin + at):
                self._use(begin + at)


def _all_of(arrivals: Arrivals) -> tuple[Ints, Ints, Ints]:
    """Return kinds, lifetimes, and what was said of them or 0."""
    kinds, lifetimes, stated = arrivals
    return kinds, lifetimes, np.zeros_like(lifetimes) if stated is None else stated
