"""Measures the time of a decision by cluster size, beside the paper's scan of all GPUs.

Every path continues from the same settled cluster under sustained load. The time of a slot is
measured: one request decided and placed and, on average, one instance released. Times are medians
of several batches. They depend on the machine and its load, so only ratios within one run are
meaningful.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import FunctionType, ModuleType
from typing import TypeVar

import numpy as np

from slicewise.core.cluster import Cluster, Instance
from slicewise.core.geometry import Geometry
from slicewise.core.request import Rejection, Request
from slicewise.engine.scheduler import Scheduler
from slicewise.lab import compiled_loops as loops
from slicewise.lab import kernel, lease_loops
from slicewise.lab.experiment import TRACE, Tick
from slicewise.lab.mfi_scan import ScanRun, scan_tables
from slicewise.lab.mix import Mix
from slicewise.lab.packed_tables import Models, compile_tables
from slicewise.lab.workload import Arrivals, draw_kinds, longest_lifetime, run_generator
from slicewise.policies.base import TablePolicy
from slicewise.policies.lease_aware import LeaseAware
from slicewise.policies.ranking import Ranking

Row = dict[str, object]
_Work = TypeVar("_Work")
_BATCHES = 7


@dataclass(frozen=True)
class SlotCounts:
    """The number of slots to time on each path; scans of larger clusters get fewer."""

    engine: int = 14_000
    compiled: int = 700_000
    scanned_gpus: int = 150_000_000
    """The total number of GPUs examined by the compiled scan."""
    vectorised_gpus: int = 15_000_000
    """The total number of GPUs examined by the NumPy scan."""


class SettledCluster:
    """A cluster under sustained load, and its next arrivals."""

    def __init__(self, mix: Mix, policy: TablePolicy, gpus: int, load: float) -> None:
        self.mix = mix
        self.count = gpus
        self.load = load
        self._rng = run_generator(seed=1, run=0)
        self._longest = longest_lifetime(mix, gpus, load)
        self.models = Models([mix.geometry], [Request(p.name) for p in mix.profiles])
        self.leases: lease_loops.LeaseTables | None = None
        if isinstance(policy, LeaseAware):
            mean = (1 + self._longest) / 2
            policy = replace(policy, mean_lifetime=mean)
            leases = lease_loops.compile_leases(self.models, policy)
            self.leases = lease_loops.with_times(leases, mean, self._longest)
            self._ends = lease_loops.new_ends(gpus, mix.geometry.slices)
        self.policy = policy
        self.tables = compile_tables(self.models, policy)
        self.gpus = kernel.new_gpus(np.zeros(gpus, np.int64), len(self.models.states))
        self.departures = loops.new_departures(self._longest)
        self.slot = 0
        # After one longest lifetime no instance is left from the start of the empty cluster.
        while self.slot < self._longest + 1000:
            self.advance(self.draw(min(1 << 18, self._longest + 1000 - self.slot)))

    def draw(self, count: int) -> Arrivals:
        """Draw the next arrivals."""
        kinds = draw_kinds(self._rng, self.mix, count)
        return Arrivals(kinds, self._rng.integers(1, self._longest, size=count, endpoint=True))

    def advance(self, arrivals: Arrivals) -> float:
        """Advance the cluster with the compiled loop; return the mean number of states examined."""
        trace = np.zeros((len(arrivals.kinds), len(TRACE)), np.int32)
        kinds, lifetimes, _ = arrivals
        tables, gpus, departures, slot = self.tables, self.gpus, self.departures, self.slot
        if self.leases is None:
            loops.advance(tables, gpus, departures, kinds, lifetimes, slot, trace)
        else:  # every end is known
            lease_loops.advance(
                tables,
                gpus,
                self.leases,
                self._ends,
                departures,
                kinds,
                lifetimes,
                lifetimes,
                slot,
                trace,
            )
        self.slot += len(arrivals.kinds)
        return float(trace[:, 1].mean())

    def instances(self) -> Iterator[tuple[int, int, int]]:
        """Yield the running instances: the slot in which each ends, its GPU and placement."""
        ring = len(self.departures.ending)
        ending = self.departures.ending.tolist()
        instances = self.departures.instances
        for ahead in range(ring):
            instance = ending[(self.slot + ahead) % ring]
            while instance >= 0:
                gpu, placement, successor, _ = instances[instance].tolist()
                yield self.slot + ahead, gpu, placement
                instance = successor

    def scan_run(self) -> ScanRun:
        """Return a copy of this cluster for the paper's scan."""
        masks = np.array([state.mask for state in self.models.states], np.int32)
        windows = np.array([p.window for p in self.mix.geometry.placements], np.int32)
        instances = self.departures.instances.copy()
        instances[:, 1] = windows[instances[:, 1]]
        return ScanRun(
            scan_tables(self.mix.geometry, self.mix.profiles),
            masks[self.gpus.state_of],
            instances,
            self.departures.ending.copy(),
            self.slot,
        )


def measure_compiled(settled: SettledCluster, plan: SlotCounts) -> Row:
    """Measure the compiled loop."""
    examined: list[float] = []

    def batch(arrivals: Arrivals) -> None:
        examined.append(settled.advance(arrivals))

    size = plan.compiled // _BATCHES
    nanoseconds = _time([settled.draw(size) for _ in range(_BATCHES)], batch, size)
    return _row("compiled", settled, nanoseconds, statistics.fmean(examined))


def measure_engine(settled: SettledCluster, plan: SlotCounts) -> tuple[Row, int]:
    """Measure the engine's Python API on the same cluster; also return its size in bytes."""
    cluster = Cluster.of(settled.mix.geometry, settled.count)
    scheduler = Scheduler(cluster, settled.policy)
    size = plan.engine // _BATCHES
    end = settled.slot + plan.engine
    ending: defaultdict[int, list[Instance]] = defaultdict(list)
    for slot, gpu, placement in settled.instances():
        instance = cluster.put(gpu, placement, slot)
        if slot < end:
            ending[slot].append(instance)
    names = [profile.name for profile in settled.mix.profiles]
    now = settled.slot

    def batch(requests: list[tuple[str, int]]) -> None:
        nonlocal now
        for name, lifetime in requests:
            for instance in ending.pop(now, ()):
                scheduler.release(instance)
            outcome = scheduler.submit(name, now=now, ends=now + lifetime)
            if not isinstance(outcome, Rejection) and now + lifetime < end:
                ending[now + lifetime].append(outcome)
            now += 1

    batches = []
    for _ in range(_BATCHES):
        arrivals = settled.draw(size)
        kinds, lifetimes = arrivals.kinds.tolist(), arrivals.lifetimes.tolist()
        batches.append([(names[kind], life) for kind, life in zip(kinds, lifetimes, strict=True)])
    nanoseconds = _time(batches, batch, size)
    ranking = Ranking(settled.policy, cluster)
    shares = zip(names, settled.mix.probabilities, strict=True)
    examined = sum(share * len(ranking.row(Request(name)).states) for name, share in shares)
    return _row("engine", settled, nanoseconds, examined), deep_size(cluster)


def measure_scan_compiled(settled: SettledCluster, plan: SlotCounts) -> Row:
    """Measure the paper's scan, compiled."""
    run = settled.scan_run()
    size = max(1, min(20_000, plan.scanned_gpus // settled.count) // _BATCHES)
    settled.scan_run().compiled(*settled.draw(1)[:2])  # compiles
    batches = [settled.draw(size) for _ in range(_BATCHES)]
    nanoseconds = _time(batches, lambda arrivals: run.compiled(*arrivals[:2]), size)
    return _row("scan-compiled", settled, nanoseconds, settled.count)


def measure_scan_numpy(settled: SettledCluster, plan: SlotCounts) -> Row:
    """Measure the paper's scan, vectorised."""
    run = settled.scan_run()
    size = max(1, min(2_000, plan.vectorised_gpus // settled.count) // _BATCHES)
    batches = [settled.draw(size) for _ in range(_BATCHES)]
    nanoseconds = _time(batches, lambda arrivals: run.by_numpy(*arrivals[:2]), size)
    return _row("scan-numpy", settled, nanoseconds, settled.count)


def _time(batches: list[_Work], batch: Callable[[_Work], None], size: int) -> float:
    """Return the nanoseconds per slot, as the median over the batches."""
    each: list[float] = []
    for work in batches:
        begin = time.perf_counter_ns()
        batch(work)
        each.append((time.perf_counter_ns() - begin) / size)
    return statistics.median(each)


def _row(path: str, settled: SettledCluster, nanoseconds: float, examined: float) -> Row:
    return {
        "path": path,
        "policy": settled.policy.name,
        "gpus": settled.count,
        "load": settled.load,
        "ns_per_decision": nanoseconds,
        "states_examined_mean": examined,
    }


def deep_size(thing: object) -> int:
    """Return the bytes of an object and everything it references, without code and GPU models."""
    total = 0
    seen: set[int] = set()
    waiting = [thing]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, (type, ModuleType, FunctionType, Geometry)):
            continue
        seen.add(id(each))
        total += sys.getsizeof(each)
        waiting.extend(gc.get_referents(each))
    return total


PATHS = ("engine", "compiled", "scan-compiled", "scan-numpy")


def benchmark(
    mix: Mix,
    policies: Sequence[TablePolicy],
    sizes: Sequence[int],
    load: float,
    plan: SlotCounts,
    tick: Tick,
) -> tuple[list[Row], list[Row]]:
    """Measure every path at every size; return rows of decisions and of the engine's memory.

    The scans are MFI's, so they are measured once per size.
    """
    decisions: list[Row] = []
    memory: list[Row] = []
    for gpus in sizes:
        for number, policy in enumerate(policies):
            settled = SettledCluster(mix, policy, gpus, load)
            row, size = measure_engine(settled, plan)
            decisions.append(row)
            memory.append(
                {
                    "policy": policy.name,
                    "gpus": gpus,
                    "engine_bytes": size,
                    "engine_bytes_per_gpu": size / gpus,
                }
            )
            if number == 0:
                decisions.append(measure_scan_compiled(settled, plan))
                decisions.append(measure_scan_numpy(settled, plan))
            decisions.append(measure_compiled(settled, plan))
            tick(1)
    return decisions, memory
