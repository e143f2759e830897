"""The experiments; each simulates one run of one policy at a time.

*Published* fills an empty cluster once, as the paper does. *Steady* runs for many lifetimes at a
constant offered load, as a cloud does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from slicewise.core.cluster import Cluster
from slicewise.core.errors import SlicewiseError
from slicewise.core.request import Request
from slicewise.engine.scheduler import Scheduler
from slicewise.lab.engine_loop import EngineRun
from slicewise.lab.mix import Mix
from slicewise.lab.packed_tables import Models, compile_tables
from slicewise.lab.repacking import Repacking, repacking
from slicewise.lab.workload import (
    BINS,
    Arrivals,
    Ints,
    Lifetime,
    SmallInts,
    draw_kinds,
    fill_up,
    longest_lifetime,
    run_generator,
)
from slicewise.policies.base import Policy, TablePolicy

if TYPE_CHECKING:
    from slicewise.lab.kernel import Tables

Tick = Callable[[int], None]
"""Called with the units of work that were just finished."""

Advance = Callable[[Arrivals, int, SmallInts], None]
"""Runs a cluster through the slots of some arrivals, from a first slot, and fills in a trace."""

TRACE = ("accepted", "states_examined", "occupied", "active", "fragmentation")
"""The columns of a trace, per slot: whether the request was accepted, the states the decision
examined, and the cluster's totals after it."""

PUBLISHED_COLUMNS = ("arrivals", "accepted", "scheduled", "occupied", "active", "fragmentation")
"""The columns per bin of demand: the first two are counts, the others are read at its end."""

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
    _compiled: dict[tuple[int, int], tuple[Models, Tables]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not self.mixes or not self.policies:
            raise SlicewiseError("an experiment needs at least one distribution and one policy")
        _require(self.gpus, "gpus", 1, MAX_GPUS)
        _require(self.runs, "runs", 1, 1_000_000)
        _require(self.seed, "seed", 0, 1 << 64)
        _require(self.gpus_per_node, "gpus per node", 1, MAX_GPUS)

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
        return self.on_engine or not isinstance(policy, TablePolicy)

    def _tables(self, mix: int, policy: int) -> tuple[Models, Tables]:
        known = self._compiled.get((mix, policy))
        if known is None:
            table_policy = self.policies[policy]
            assert isinstance(table_policy, TablePolicy)
            chosen = self.mixes[mix]
            models = Models([chosen.geometry], [Request(p.name) for p in chosen.profiles])
            known = self._compiled[mix, policy] = models, compile_tables(models, table_policy)
        return known

    def _fresh_cluster(self, mix: int, policy: int, longest: int) -> Advance:
        """Create an empty cluster under a policy; return the function that advances it."""
        if self.runs_on_engine(self.policies[policy]):
            chosen = self.mixes[mix]
            cluster = Cluster.of(chosen.geometry, self.gpus, self.gpus_per_node)
            return EngineRun(Scheduler(cluster, self.policies[policy]), chosen).advance
        from slicewise.lab import compiled_loops as loops
        from slicewise.lab import kernel

        models, tables = self._tables(mix, policy)
        gpus = kernel.new_gpus(np.zeros(self.gpus, np.int64), len(models.states))
        departures = loops.new_departures(longest)

        def advance(arrivals: Arrivals, begin: int, trace: SmallInts) -> None:
            loops.advance(tables, gpus, departures, *arrivals, begin, trace)

        return advance

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_compiled": {}}  # building tables is cheaper than sending them


@dataclass(frozen=True)
class Published(Experiment):
    """The paper's experiment: one request per slot until demand reaches the capacity."""

    lifetime: Lifetime = Lifetime.CAPACITY

    def units(self, mix: int) -> int:
        """Return 1."""
        return 1

    def simulate(self, mix: int, policy: int, run: int, tick: Tick) -> Ints:
        """Return an array of demand bins by `PUBLISHED_COLUMNS`."""
        rng = run_generator(self.seed, run)
        arrivals, bins = fill_up(rng, self.mixes[mix], self.gpus, self.lifetime)
        trace = np.zeros((len(bins), len(TRACE)), np.int32)
        self._fresh_cluster(mix, policy, int(arrivals.lifetimes.max()))(arrivals, 0, trace)
        tick(1)
        accepted = trace[:, 0]
        # The last slot of each bin; a bin without a request keeps the state before it.
        ends = np.searchsorted(bins, np.arange(BINS), side="right")
        read = np.column_stack([np.cumsum(accepted), trace[:, 2:]])
        read = np.vstack([np.zeros_like(read[:1]), read])[ends]
        arrived = np.bincount(bins, minlength=BINS)
        return np.column_stack(
            [arrived, np.bincount(bins, accepted, BINS).astype(np.int64), read]
        ).astype(np.int64)


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
        """Return sums over the measured slots by `STEADY_COLUMNS`; 0 if an oracle has no value."""
        chosen = self.mixes[mix]
        rng = run_generator(self.seed, run)
        longest = longest_lifetime(chosen, self.gpus, self.load)
        sizes = np.array([profile.size for profile in chosen.profiles], np.int64)
        sums = np.zeros(len(STEADY_COLUMNS), np.int64)
        advance = self._fresh_cluster(mix, policy, longest)
        slots = self.units(mix)
        for begin in range(0, slots, _CHUNK):
            count = min(_CHUNK, slots - begin)
            kinds = draw_kinds(rng, chosen, count)
            lifetimes = rng.integers(1, longest, size=count, endpoint=True)
            trace = np.zeros((count, len(TRACE)), np.int32)
            advance(Arrivals(kinds, lifetimes), begin, trace)
            settled = slice(max(0, self.warmup * longest - begin), None)
            rejected = trace[settled, 0] == 0
            asked = sizes[kinds[settled]]
            sums[:4] += len(asked), rejected.sum(), asked.sum(), asked[rejected].sum()
            sums[4:] += trace[settled, 1:].sum(axis=0, dtype=np.int64)
            tick(count)
        return sums

    def _fresh_cluster(self, mix: int, policy: int, longest: int) -> Advance:
        if policy < len(self.policies):
            return super()._fresh_cluster(mix, policy, longest)
        from slicewise.lab import oracle

        limit = self.limit(mix)
        assert isinstance(limit, Repacking)
        rule = oracle.counting(limit, self.gpus)
        counts = oracle.new_counts(rule, longest)

        def advance(arrivals: Arrivals, begin: int, trace: SmallInts) -> None:
            oracle.advance(rule, counts, *arrivals, begin, trace)

        return advance


def _require(value: int, what: str, low: int, high: int) -> None:
    if not low <= value <= high:
        raise SlicewiseError(f"{what} must be {low} to {high}, not {value}")
