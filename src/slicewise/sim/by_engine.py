"""The experiments' inner loop on the engine itself: readable, and open to every policy."""

from __future__ import annotations

from collections import defaultdict

from slicewise.core.cluster import Instance
from slicewise.core.request import Rejection
from slicewise.engine.scheduler import Scheduler
from slicewise.sim.mix import Mix
from slicewise.sim.workload import Arrivals, SmallInts


class EngineRun:
    """A scheduler and the instances that will leave it."""

    def __init__(self, scheduler: Scheduler, mix: Mix) -> None:
        self.scheduler = scheduler
        self._profiles = mix.profiles
        self._leaving: defaultdict[int, list[Instance]] = defaultdict(list)

    def slot(self, slot: int, kind: int, lifetime: int) -> bool:
        """Terminations first, then the arrival; whether it was accepted."""
        for instance in self._leaving.pop(slot, ()):
            self.scheduler.release(instance)
        outcome = self.scheduler.submit(self._profiles[kind].name)
        if isinstance(outcome, Rejection):
            return False
        self._leaving[slot + lifetime].append(outcome)
        return True

    def advance(self, arrivals: Arrivals, begin: int, trace: SmallInts) -> None:
        """Go through the slots from ``begin`` on and fill in the trace, as `loops.advance` does.

        How many states a decision looked at is not known here and stays as it is.
        """
        cluster = self.scheduler.cluster
        pairs = zip(arrivals.kinds.tolist(), arrivals.lifetimes.tolist(), strict=True)
        for i, (kind, lifetime) in enumerate(pairs):
            trace[i, 0] = self.slot(begin + i, kind, lifetime)
            trace[i, 2] = cluster.occupied_slices
            trace[i, 3] = cluster.active_gpus
            trace[i, 4] = round(cluster.fragmentation() * cluster.gpus)
