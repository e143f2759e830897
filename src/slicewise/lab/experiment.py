"""The experiments; each simulates one run of one policy at a time.

*Published* fills an empty cluster once, as the paper does. *Steady* runs for many lifetimes at a
constant offered load, as a cloud does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from slicewise.core.cluster import Cluster
from slicewise.core.errors import SlicewiseError
from slicewise.core.request import Request
from slicewise.engine.scheduler import Scheduler
from slicewise.lab.engine_loop import EngineRun
from slicewise.lab.measure import Measure
from slicewise.lab.mix import Mix
from slicewise.lab.packed_tables import Models, compile_tables
from slicewise.lab.repacking import Repacking, repacking
from slicewise.lab.sustained import Drift, Knowledge, LifetimeLaw, Sustained
from slicewise.lab.workload import (
    BINS,
    Arrivals,
    Ints,
    Lifetime,
    SmallInts,
    fill_up,
    longest_lifetime,
    run_generator,
)
from slicewise.policies.base import Policy, TablePolicy
from slicewise.policies.lease_aware import LeaseAware
from slicewise.policies.rehearsed import Rehearsed

if TYPE_CHECKING:
    from slicewise.lab.kernel import Tables
    from slicewise.lab.lease_loops import LeaseTables

Tick = Callable[[int], None]
"""Called with the units of work that were just finished."""

Advance = Callable[[Arrivals, int, SmallInts], None]
"""Runs a cluster through the slots of some arrivals, from a first slot, and fills in a trace."""

TRACE = ("accepted", "states_examined", "occupied", "active", "fragmentation")
"""The columns of a trace, per slot: whether the request was accepted, the states the decision
examined, and the cluster's totals after it, as the measure defines them."""

PUBLISHED_COLUMNS = ("arrivals", "accepted", "scheduled", "occupied", "active", "fragmentation")
"""The columns per bin of demand: the first two are counts, the others are read at its end.
The measure says what is in use and what fragmentation is."""

STEADY_COLUMNS = ("arrivals", "rejected", "slices", "rejected_slices", *TRACE[1:])
"""The columns that are summed over the measured slots."""

ORACLE = "oracle"
"""The name of the limit among policies."""

_CHUNK = 1 << 16
"""Slots of a steady run drawn at a time, which bounds its memory."""

MAX_GPUS = 50_000_000
"""The index of a larger cluster would not fit in memory."""


@dataclass(frozen=True)
class Experiment(ABC):
    """The common part of all experiments. A run's result is an array of integers."""

    mixes: tuple[Mix, ...]
    policies: tuple[Policy, ...]
    gpus: int = 100
    runs: int = 20
    seed: int = 1
    on_engine: bool = False
    """Run on the engine, even for policies that could be compiled."""
    gpus_per_node: int = 8
    """For policies that choose a node; the last node may have fewer GPUs."""
    _compiled: dict[tuple[int, int], tuple[Models, Tables, LeaseTables | None]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not self.mixes or not self.policies:
            raise SlicewiseError("an experiment needs at least one distribution and one policy")
        _require(self.gpus, "gpus", 1, MAX_GPUS)
        _require(self.runs, "runs", 1, 1_000_000)
        _require(self.seed, "seed", 0, 1 << 64)
        _require(self.gpus_per_node, "gpus per node", 1, MAX_GPUS)

    @property
    def measured(self) -> Measure:
        """What is added up over the GPUs."""
        return Measure.MEMORY

    @abstractmethod
    def units(self, mix: int) -> int:
        """Return the units of work in one run."""

    def entrants(self, mix: int) -> range:
        """Return the indexes of the entrants of a mix: the policies, in order."""
        return range(len(self.policies))

    @abstractmethod
    def simulate(self, mix: int, policy: int, run: int, tick: Tick) -> Ints:
        """Simulate one run of one entrant; the same arguments give the same result."""

    def runs_on_engine(self, policy: Policy) -> bool:
        """Return whether the engine runs a policy, because it has no table in advance."""
        return self.on_engine or not isinstance(policy, TablePolicy | Rehearsed)

    def _tables(self, mix: int, policy: int) -> tuple[Models, Tables, LeaseTables | None]:
        known = self._compiled.get((mix, policy))
        if known is None:
            table_policy = self.policies[policy]
            assert isinstance(table_policy, TablePolicy)
            chosen = self.mixes[mix]
            models = Models([chosen.geometry], [Request(p.name) for p in chosen.profiles])
            tables = compile_tables(models, table_policy, self.measured)
            leases = None
            if isinstance(table_policy, LeaseAware):
                from slicewise.lab.lease_loops import compile_leases

                leases = compile_leases(models, table_policy)
            known = self._compiled[mix, policy] = models, tables, leases
        return known

    def _fresh_cluster(self, mix: int, policy: int, longest: int) -> Advance:
        """Create an empty cluster under a policy; return the function that advances it."""
        chosen = self.mixes[mix]
        if isinstance(self.policies[policy], Rehearsed):
            from slicewise.lab.rehearsing import CompiledRehearsing, EngineRehearsing

            if self.on_engine:
                return EngineRehearsing(chosen, self.gpus, self.gpus_per_node).advance
            return CompiledRehearsing(chosen, self.gpus, longest).advance
        chosen_policy = self.policies[policy]
        mean = self._mean_lifetime(mix, longest)
        if isinstance(chosen_policy, LeaseAware):
            chosen_policy = replace(chosen_policy, mean_lifetime=mean)
        if self.runs_on_engine(chosen_policy):
            cluster = Cluster.of(chosen.geometry, self.gpus, self.gpus_per_node)
            scheduler = Scheduler(cluster, chosen_policy)
            return EngineRun(scheduler, chosen, self.measured).advance
        from slicewise.lab import compiled_loops as loops
        from slicewise.lab import kernel

        models, tables, leases = self._tables(mix, policy)
        if leases is not None:
            from slicewise.lab.lease_run import LeaseRun

            return LeaseRun(tables, leases, self.gpus, mean, longest).advance
        gpus = kernel.new_gpus(np.zeros(self.gpus, np.int64), len(models.states))
        departures = loops.new_departures(longest)

        def advance(arrivals: Arrivals, begin: int, trace: SmallInts) -> None:
            kinds, lifetimes, _ = arrivals
            loops.advance(tables, gpus, departures, kinds, lifetimes, begin, trace)

        return advance

    def _mean_lifetime(self, mix: int, longest: int) -> float:
        """Return the mean of the lifetimes, in slots."""
        return (1 + longest) / 2

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_compiled": {}}  # building tables is cheaper than sending them


@dataclass(frozen=True)
class Published(Experiment):
    """The paper's experiment: one request per slot until demand reaches the capacity."""

    lifetime: Lifetime = Lifetime.CAPACITY
    measure: Measure = Measure.MEMORY

    @property
    def measured(self) -> Measure:
        """What is added up over the GPUs."""
        return self.measure

    def units(self, mix: int) -> int:
        """Return 1."""
        return 1

    def simulate(self, mix: int, policy: int, run: int, tick: Tick) -> Ints:
        """Return an array of demand bins by `PUBLISHED_COLUMNS`."""
        rng = run_generator(self.seed, run)
        arrivals, bins = fill_up(rng, self.mixes[mix], self.gpus, self.lifetime)
        arrivals = arrivals._replace(stated=arrivals.lifetimes)
        trace = np.zeros((len(bins), len(TRACE)), np.int32)
        self._fresh_cluster(mix, policy, int(arrivals.lifetimes.max()))(arrivals, 0, trace)
        tick(1)
        accepted = trace[:, 0]
        # The last slot of each bin; a bin without a request keeps the state before it.
        ends = np.searchsorted(bins, np.arange(BINS), side="right")
        read = np.column_stack([np.cumsum(accepted), trace[:, 2:4]])
        read = np.vstack([np.zeros_like(read[:1]), read])[ends]
        arrived = np.bincount(bins, minlength=BINS)
        accepted_in = np.bincount(bins, accepted, BINS).astype(np.int64)
        severity = self.measure.severity(trace, bins, ends)
        return np.column_stack([arrived, accepted_in, read, severity]).astype(np.int64)


@dataclass(frozen=True)
class Steady(Experiment):
    """Sustained load: arrivals continue for many lifetimes; the warm-up is not measured."""

    load: float = 0.85
    """Offered concurrent demand, as a share of the cluster's capacity."""
    lifetimes: int = 40
    """Length of a run, in longest lifetimes."""
    warmup: int = 3
    """Length of the part before the measurement, in longest lifetimes."""
    oracle: bool = True
    """Whether the limit runs beside the policies, as the last entrant."""
    law: LifetimeLaw = LifetimeLaw.UNIFORM
    leases: Knowledge | None = None
    """What is said of lifetimes; by default all to `lease-aware` and nothing to others."""
    drift: tuple[Drift, ...] = ()
    """By mix: how it changes; empty if none does."""
    windows: int = 0
    """The parts of the measured time in which requests and rejections are counted apart."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.oracle and any(policy.name == ORACLE for policy in self.policies):
            raise SlicewiseError(f"{ORACLE!r} is the name of the limit: rename the policy")
        if not 0 < self.load <= 100:
            raise SlicewiseError(
                f"load {self.load} is not above 0 and at most 100 (0.85 is 85% of capacity)"
            )
        _require(self.warmup, "warmup", 0, 1_000_000)
        _require(self.lifetimes, "duration", self.warmup + 1, 1_000_001)

    def units(self, mix: int) -> int:
        """Return the number of slots."""
        return self.lifetimes * longest_lifetime(self.mixes[mix], self.gpus, self.load)

    def limit(self, mix: int) -> Repacking | str:
        """Return the oracle's rule, or the reason why there is no oracle."""
        return repacking(self.mixes[mix]) if self.oracle else "it was not requested"

    def entrants(self, mix: int) -> range:
        """Return the indexes of the policies and, if it has a rule, of the oracle."""
        return range(len(self.policies) + isinstance(self.limit(mix), Repacking))

    def simulate(self, mix: int, policy: int, run: int, tick: Tick) -> Ints:
        """Return sums over the measured slots by `STEADY_COLUMNS`; 0 if an oracle has no value.

        They are followed by the arrivals and the rejections of each window.
        """
        arriving = self.arriving(mix)
        rng = run_generator(self.seed, run)
        aware = policy < len(self.policies) and isinstance(self.policies[policy], LeaseAware)
        told = self.leases or (Knowledge.EXACT if aware else Knowledge.NONE)
        said = rng.spawn(1)[0]  # what is said of lifetimes does not change the arrivals
        sizes = np.array([profile.size for profile in self.mixes[mix].profiles], np.int64)
        sums = np.zeros(len(STEADY_COLUMNS), np.int64)
        windows = np.zeros((2, self.windows), np.int64)
        advance = self._fresh_cluster(mix, policy, arriving.longest)
        slots = self.units(mix)
        warmup = slots * self.warmup // self.lifetimes
        for begin in range(0, slots, _CHUNK):
            count = min(_CHUNK, slots - begin)
            arrivals = arriving.draw(rng, begin, count)
            stated = told.stated(said, arrivals.lifetimes, arriving.mean_lifetime)
            arrivals = arrivals._replace(stated=stated)
            trace = np.zeros((count, len(TRACE)), np.int32)
            advance(arrivals, begin, trace)
            settled = slice(max(0, warmup - begin), None)
            rejected = trace[settled, 0] == 0
            asked = sizes[arrivals.kinds[settled]]
            sums[:4] += len(asked), rejected.sum(), asked.sum(), asked[rejected].sum()
            sums[4:] += trace[settled, 1:].sum(axis=0, dtype=np.int64)
            if self.windows:
                at = np.arange(begin, begin + count)[settled] - warmup
                window = at * self.windows // (slots - warmup)
                windows[0] += np.bincount(window, minlength=self.windows)
                windows[1] += np.bincount(window[rejected], minlength=self.windows)
            tick(count)
        return np.concatenate([sums, *windows])

    def _mean_lifetime(self, mix: int, longest: int) -> float:
        """Return the mean, which is that of uniform lifetimes whatever their law."""
        return super()._mean_lifetime(mix, longest_lifetime(self.mixes[mix], self.gpus, self.load))

    def arriving(self, mix: int) -> Sustained:
        """Return the arrivals of a mix."""
        changing = self.drift[mix] if self.drift else None
        chosen = self.mixes[mix]
        return Sustained(chosen, self.gpus, self.load, self.units(mix), self.law, changing)

    def _fresh_cluster(self, mix: int, policy: int, longest: int) -> Advance:
        if policy < len(self.policies):
            return super()._fresh_cluster(mix, policy, longest)
        from slicewise.lab import oracle

        limit = self.limit(mix)
        assert isinstance(limit, Repacking)
        rule = oracle.counting(limit, self.gpus)
        counts = oracle.new_counts(rule, longest)

        def advance(arrivals: Arrivals, begin: int, trace: SmallInts) -> None:
            oracle.advance(rule, counts, arrivals.kinds, arrivals.lifetimes, begin, trace)

        return advance


def _require(value: int, what: str, low: int, high: int) -> None:
    if not low <= value <= high:
        raise SlicewiseError(f"{what} must be {low} to {high}, not {value}")
