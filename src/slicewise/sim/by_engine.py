"""The experiments' inner loops on the engine itself: readable, and open to every policy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from slicewise.core.cluster import Instance
from slicewise.core.request import Rejection
from slicewise.engine.scheduler import Scheduler
from slicewise.sim.mix import Mix
from slicewise.sim.workload import Arrivals, Ints


class EngineRun:
    """A scheduler and the instances that will leave it."""

    def __init__(self, scheduler: Scheduler, mix: Mix) -> None:
        self.scheduler = scheduler
        self.cluster = scheduler.cluster
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

    @property
    def fragmentation_sum(self) -> int:
        """F summed over all GPUs."""
        return round(self.cluster.fragmentation() * self.cluster.gpus)


def _one_by_one(arrivals: Arrivals) -> Iterable[tuple[int, int]]:
    return zip(arrivals.kinds.tolist(), arrivals.lifetimes.tolist(), strict=True)


def published(run: EngineRun, arrivals: Arrivals, bins: Ints, out: Ints) -> None:
    """Fill the cluster up once; the twin of `loops.published`."""
    scheduled = reached = 0
    for slot, (kind, lifetime) in enumerate(_one_by_one(arrivals)):
        here = int(bins[slot])
        for empty in range(reached + 1, here + 1):
            out[empty, 2:] = out[reached, 2:]
        reached = here
        accepted = run.slot(slot, kind, lifetime)
        scheduled += accepted
        out[here, 0] += 1
        out[here, 1] += accepted
        cluster = run.cluster
        out[here, 2:] = (
            scheduled,
            cluster.occupied_slices,
            cluster.active_gpus,
            run.fragmentation_sum,
        )


def steady(
    run: EngineRun, arrivals: Arrivals, sizes: Ints, begin: int, measure_from: int, sums: Ints
) -> None:
    """Go through the slots from ``begin`` on; the twin of `loops.steady`."""
    for i, (kind, lifetime) in enumerate(_one_by_one(arrivals)):
        slot = begin + i
        accepted = run.slot(slot, kind, lifetime)
        if slot >= measure_from:
            size = int(sizes[kind])
            cluster = run.cluster
            sums[:7] += (
                1,
                not accepted,
                size,
                0 if accepted else size,
                cluster.occupied_slices,
                cluster.active_gpus,
                run.fragmentation_sum,
            )
