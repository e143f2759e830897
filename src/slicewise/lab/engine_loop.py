"""The inner loop of experiments on the engine: the readable twin of `compiled_loops`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from slicewise.core.cluster import Cluster, Instance
from slicewise.core.request import Rejection
from slicewise.engine.scheduler import Scheduler
from slicewise.lab.mix import Mix
from slicewise.lab.workload import Arrivals, SmallInts


class EngineRun:
    """A scheduler, and its instances by the slot in which they end."""

    def __init__(self, scheduler: Scheduler, mix: Mix) -> None:
        self.scheduler = scheduler
        self._profiles = mix.profiles
        self._ending: defaultdict[int, list[Instance]] = defaultdict(list)

    def slot(self, slot: int, kind: int, lifetime: int) -> bool:
        """Release what ends in this slot, decide the arrival; return whether it is accepted."""
        for instance in self._ending.pop(slot, ()):
            self.scheduler.release(instance)
        outcome = self.scheduler.submit(self._profiles[kind].name)
        if isinstance(outcome, Rejection):
            return False
        self._ending[slot + lifetime].append(outcome)
        return True

    def advance(self, arrivals: Arrivals, begin: int, trace: SmallInts) -> None:
        """Run the slots from ``begin`` and fill in the trace, as `compiled_loops.advance` does.

        The engine does not report the states it examines: their column is not written.
        """
        advance_slots(self.slot, self.scheduler.cluster, arrivals, begin, trace)


def advance_slots(
    slot: Callable[[int, int, int], bool],
    cluster: Cluster,
    arrivals: Arrivals,
    begin: int,
    trace: SmallInts,
) -> None:
    """Call ``slot`` with number, kind and lifetime for every arrival, and fill in the trace."""
    pairs = zip(arrivals.kinds.tolist(), arrivals.lifetimes.tolist(), strict=True)
    for i, (kind, lifetime) in enumerate(pairs):
        trace[i, 0] = slot(begin + i, kind, lifetime)
        record_totals(cluster, trace, i)


def record_totals(cluster: Cluster, trace: SmallInts, i: int) -> None:
    """Write the totals of the cluster into a row of the trace."""
    trace[i, 2] = cluster.occupied_slices
    trace[i, 3] = cluster.active_gpus
    trace[i, 4] = round(cluster.fragmentation() * cluster.gpus)
