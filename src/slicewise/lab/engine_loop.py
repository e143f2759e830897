"""The inner loop of experiments on the engine: the readable twin of `compiled_loops`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

from slicewise.core.cluster import Cluster, Instance
from slicewise.core.request import Rejection
from slicewise.engine.scheduler import Scheduler
from slicewise.lab.measure import Measure
from slicewise.lab.mix import Mix
from slicewise.lab.workload import Arrivals, SmallInts


class EngineRun:
    """A scheduler, and its instances by the slot in which they end."""

    def __init__(self, scheduler: Scheduler, mix: Mix, measure: Measure = Measure.MEMORY) -> None:
        self.scheduler = scheduler
        self.measure = measure
        self._profiles = mix.profiles
        self._ending: defaultdict[int, list[Instance]] = defaultdict(list)

    def slot(self, slot: int, kind: int, lifetime: int, stated: int = 0) -> bool:
        """Release what ends in this slot, decide the arrival; return whether it is accepted.

        ``stated`` is the lifetime that is said with the request, if any.
        """
        for instance in self._ending.pop(slot, ()):
            self.scheduler.release(instance)
        ends = slot + stated if stated else math.inf
        outcome = self.scheduler.submit(self._profiles[kind].name, now=slot, ends=ends)
        if isinstance(outcome, Rejection):
            return False
        self._ending[slot + lifetime].append(outcome)
        return True

    def advance(self, arrivals: Arrivals, begin: int, trace: SmallInts) -> None:
        """Run the slots from ``begin`` and fill in the trace, as `compiled_loops.advance` does.

        The engine does not report the states it examines: their column is not written.
        """
        stated = [] if arrivals.stated is None else arrivals.stated.tolist()

        def slot(number: int, kind: int, lifetime: int) -> bool:
            return self.slot(number, kind, lifetime, stated[number - begin] if stated else 0)

        advance_slots(slot, self.scheduler.cluster, arrivals, begin, trace, self.measure)


def advance_slots(
    slot: Callable[[int, int, int], bool],
    cluster: Cluster,
    arrivals: Arrivals,
    begin: int,
    trace: SmallInts,
    measure: Measure = Measure.MEMORY,
) -> None:
    """Call ``slot`` with number, kind and lifetime for every arrival, and fill in the trace."""
    pairs = zip(arrivals.kinds.tolist(), arrivals.lifetimes.tolist(), strict=True)
    for i, (kind, lifetime) in enumerate(pairs):
        trace[i, 0] = slot(begin + i, kind, lifetime)
        record_totals(cluster, trace, i)
        if measure is not Measure.MEMORY:
            trace[i, 2], trace[i, 4] = measure.totals(cluster)


def record_totals(cluster: Cluster, trace: SmallInts, i: int) -> None:
    """Write the totals of the cluster into a row of the trace."""
    trace[i, 2] = cluster.occupied_slices
    trace[i, 3] = cluster.active_gpus
    trace[i, 4] = round(cluster.fragmentation() * cluster.gpus)
