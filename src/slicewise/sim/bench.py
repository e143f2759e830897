"""How long a decision takes, from a hundred GPUs to a million, and against the paper's scan.

Every path continues from the same settled cluster: sustained load, reached by the compiled loop.
What is timed is a slot, that is one request decided and carried out and, on average, one
instance released. Times are medians of several batches; they depend on the machine and on what
else it does, so only ratios within one run mean anything.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import TypeVar

import numpy as np

from slicewise.core.cluster import Cluster, Instance
from slicewise.core.geometry import Geometry
from slicewise.core.request import Rejection, Request
from slicewise.engine.scheduler import Scheduler
from slicewise.policies.base import TablePolicy
from slicewise.policies.ranking import Ranking
from slicewise.sim import kernel, loops
from slicewise.sim.experiment import TRACE, Tick
from slicewise.sim.mix import Mix
from slicewise.sim.scan import ScanRun, scan_tables
from slicewise.sim.tables import Models, compile_tables
from slicewise.sim.workload import Arrivals, draw_kinds, longest_lifetime, run_generator

Row = dict[str, object]
_Work = TypeVar("_Work")
_BATCHES = 7


@dataclass(frozen=True)
class Plan:
    """How many slots to time on each path; scans get fewer the more GPUs they have to look at."""

    engine: int = 14_000
    compiled: int = 700_000
    scanned_gpus: int = 150_000_000
    """GPUs a compiled scan looks at in all."""
    vectorised_gpus: int = 15_000_000
    """GPUs the NumPy scan looks at in all."""


class SettledCluster:
    """A cluster under sustained load, and the arrivals that go on from there."""

    def __init__(self, mix: Mix, policy: TablePolicy, gpus: int, load: float) -> None:
        self.mix = mix
        self.policy = policy
        self.count = gpus
        self.load = load
        self._rng = run_generator(seed=1, run=0)
        self._longest = longest_lifetime(mix, gpus, load)
        self.models = Models([mix.geometry], [Request(p.name) for p in mix.profiles])
        self.tables = compile_tables(self.models, policy)
        self.gpus = kernel.new_gpus(np.zeros(gpus, np.int64), len(self.models.states))
        self.departures = loops.new_departures(self._longest)
        self.slot = 0
        # After one longest lifetime nobody is left of the beginning, when all was empty.
        while self.slot < self._longest + 1000:
            self.advance(self.draw(min(1 << 18, self._longest + 1000 - self.slot)))

    def draw(self, count: int) -> Arrivals:
        """The next arrivals."""
        kinds = draw_kinds(self._rng, self.mix, count)
        return Arrivals(kinds, self._rng.integers(1, self._longest, size=count, endpoint=True))

    def advance(self, arrivals: Arrivals) -> float:
        """Take the cluster on by the compiled loop; the mean number of states looked at."""
        trace = np.zeros((len(arrivals.kinds), len(TRACE)), np.int32)
        loops.advance(self.tables, self.gpus, self.departures, *arrivals, self.slot, trace)
        self.slot += len(arrivals.kinds)
        return float(trace[:, 1].mean())

    def guests(self) -> Iterator[tuple[int, int, int]]:
        """Everyone there: the slot they leave in, their GPU and their placement."""
        ring = len(self.departures.leaving)
        leaving = self.departures.leaving.tolist()
        guests = self.departures.guests
        for ahead in range(ring):
            who = leaving[(self.slot + ahead) % ring]
            while who >= 0:
                gpu, placement, follower, _ = guests[who].tolist()
                yield self.slot + ahead, gpu, placement
                who = follower

    def scan_run(self) -> ScanRun:
        """A copy of this cluster for the paper's scan."""
        masks = np.array([state.mask for state in self.models.states], np.int32)
        windows = np.array([p.window for p in self.mix.geometry.placements], np.int32)
        guests = self.departures.guests.copy()
        guests[:, 1] = windows[guests[:, 1]]
        return ScanRun(
            scan_tables(self.mix.geometry, self.mix.profiles),
            masks[self.gpus.state_of],
            guests,
            self.departures.leaving.copy(),
            self.slot,
        )


def measure_compiled(settled: SettledCluster, plan: Plan) -> Row:
    """The compiled loop."""
    looked: list[float] = []

    def batch(arrivals: Arrivals) -> None:
        looked.append(settled.advance(arrivals))

    size = plan.compiled // _BATCHES
    nanoseconds = _time([settled.draw(size) for _ in range(_BATCHES)], batch, size)
    return _row("compiled", settled, nanoseconds, statistics.fmean(looked))


def measure_engine(settled: SettledCluster, plan: Plan) -> tuple[Row, int]:
    """The engine's Python API on the same cluster; also the bytes it takes."""
    cluster = Cluster.of(settled.mix.geometry, settled.count)
    scheduler = Scheduler(cluster, settled.policy)
    size = plan.engine // _BATCHES
    end = settled.slot + plan.engine
    leaving: defaultdict[int, list[Instance]] = defaultdict(list)
    for slot, gpu, placement in settled.guests():
        instance = cluster.put(gpu, placement)
        if slot < end:
            leaving[slot].append(instance)
    names = [profile.name for profile in settled.mix.profiles]
    now = settled.slot

    def batch(requests: list[tuple[str, int]]) -> None:
        nonlocal now
        for name, lifetime in requests:
            for instance in leaving.pop(now, ()):
                scheduler.release(instance)
            outcome = scheduler.submit(name)
            if not isinstance(outcome, Rejection) and now + lifetime < end:
                leaving[now + lifetime].append(outcome)
            now += 1

    batches = []
    for _ in range(_BATCHES):
        arrivals = settled.draw(size)
        kinds, lifetimes = arrivals.kinds.tolist(), arrivals.lifetimes.tolist()
        batches.append([(names[kind], life) for kind, life in zip(kinds, lifetimes, strict=True)])
    nanoseconds = _time(batches, batch, size)
    ranking = Ranking(settled.policy, cluster)
    shares = zip(names, settled.mix.probabilities, strict=True)
    looked = sum(share * len(ranking.row(Request(name)).states) for name, share in shares)
    return _row("engine", settled, nanoseconds, looked), deep_size(cluster)


def measure_scan_compiled(settled: SettledCluster, plan: Plan) -> Row:
    """The paper's scan, compiled."""
    run = settled.scan_run()
    size = max(1, min(20_000, plan.scanned_gpus // settled.count) // _BATCHES)
    settled.scan_run().compiled(*settled.draw(1))  # compiles
    batches = [settled.draw(size) for _ in range(_BATCHES)]
    nanoseconds = _time(batches, lambda arrivals: run.compiled(*arrivals), size)
    return _row("scan-compiled", settled, nanoseconds, settled.count)


def measure_scan_numpy(settled: SettledCluster, plan: Plan) -> Row:
    """The paper's scan, vectorised."""
    run = settled.scan_run()
    size = max(1, min(2_000, plan.vectorised_gpus // settled.count) // _BATCHES)
    batches = [settled.draw(size) for _ in range(_BATCHES)]
    nanoseconds = _time(batches, lambda arrivals: run.by_numpy(*arrivals), size)
    return _row("scan-numpy", settled, nanoseconds, settled.count)


def _time(batches: list[_Work], batch: Callable[[_Work], None], size: int) -> float:
    """Nanoseconds a slot, as the median over the batches."""
    each: list[float] = []
    for work in batches:
        begin = time.perf_counter_ns()
        batch(work)
        each.append((time.perf_counter_ns() - begin) / size)
    return statistics.median(each)


def _row(path: str, settled: SettledCluster, nanoseconds: float, looked: float) -> Row:
    return {
        "path": path,
        "policy": settled.policy.name,
        "gpus": settled.count,
        "load": settled.load,
        "ns_per_decision": nanoseconds,
        "states_examined_mean": looked,
    }


def deep_size(thing: object) -> int:
    """Bytes of an object and of all it leads to, without code and GPU models."""
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
    plan: Plan,
    tick: Tick,
) -> tuple[list[Row], list[Row]]:
    """Measure every path at every size: the decisions, and the engine's memory.

    The scans are MFI's, so they are measured once a size, whatever the policies.
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
