"""Two policies on the same arrivals: two clusters that fill and empty in step, on the real engine.

Every slot, instances whose time is over end, then one request arrives, the same on both sides.
Arrivals are those of the steady experiment: profiles by the distribution, lifetimes such that
sustained demand is ``load`` of the cluster. The same terms always give the same run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slicewise.core.cluster import Cluster, Instance
from slicewise.core.geometry import Geometry
from slicewise.core.request import Rejection
from slicewise.core.states import GpuState
from slicewise.dashboard.stranded import stranded
from slicewise.engine.scheduler import Scheduler
from slicewise.policies.registry import policy
from slicewise.sim.mix import Mix, parse_mix
from slicewise.sim.workload import draw_kinds, longest_lifetime, run_generator

MAX_STEPS = 4000
"""Slots of a run; all arrivals are drawn at once, so that pages of it belong together."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What is compared, and on what."""

    policies: tuple[str, str]
    geometry: Geometry
    mix: str
    gpus: int
    load: float
    seed: int


class Outcome(NamedTuple):
    """What became of an arrival on one side, and how that side stands after it."""

    gpu: int | None
    start: int | None
    reason: str | None
    """Why it was rejected, if so."""
    detail: str | None
    accepted: int
    """Requests accepted so far, this one included."""
    occupied: int
    """Slices taken on all GPUs."""
    stranded: int
    """Free slices that nobody can use as they lie."""
    fragmentation: int
    """F of all GPUs together."""


class Step(NamedTuple):
    """One slot: who arrived, for how long, and what became of it on both sides."""

    profile: int
    """Which profile of the mix."""
    lifetime: int
    sides: tuple[Outcome, Outcome]


class _Side:
    """One of the two clusters."""

    def __init__(self, terms: Terms, name: str) -> None:
        self._cluster = Cluster.of(terms.geometry, terms.gpus)
        self._scheduler = Scheduler(self._cluster, policy(name))
        self._leaving: defaultdict[int, list[Instance]] = defaultdict(list)
        self._accepted = 0
        self._stranded = 0

    def slot(self, slot: int, profile: str, lifetime: int) -> Outcome:
        """Terminations first, then the arrival."""
        for instance in self._leaving.pop(slot, ()):
            before = self._state(instance.gpu)
            self._scheduler.release(instance)
            self._follow(before, instance.gpu)
        states = list(self._cluster.state_of)
        got = self._scheduler.submit(profile)
        gpu = start = reason = detail = None
        if isinstance(got, Rejection):
            reason, detail = str(got.reason), got.detail
        else:
            gpu, start = got.gpu, got.start
            self._leaving[slot + lifetime].append(got)
            self._accepted += 1
            self._follow(self._cluster.states[states[gpu]], gpu)
        cluster = self._cluster
        return Outcome(
            gpu,
            start,
            reason,
            detail,
            self._accepted,
            cluster.occupied_slices,
            self._stranded,
            round(cluster.fragmentation() * cluster.gpus),
        )

    def _state(self, gpu: int) -> GpuState:
        return self._cluster.state(gpu)

    def _follow(self, before: GpuState, gpu: int) -> None:
        after = stranded(self._state(gpu)).bit_count()
        self._stranded += after - stranded(before).bit_count()


class Duel:
    """A run that goes on as far as somebody wants to see it."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.mix: Mix = parse_mix(terms.mix, terms.geometry)
        rng = run_generator(terms.seed, 0)
        longest = longest_lifetime(self.mix, terms.gpus, terms.load)
        self._kinds: list[int] = draw_kinds(rng, self.mix, MAX_STEPS).tolist()
        drawn = rng.integers(1, longest, size=MAX_STEPS, endpoint=True)
        self._lifetimes: list[int] = drawn.tolist()
        first, second = terms.policies
        self._sides = (_Side(terms, first), _Side(terms, second))
        self._steps: list[Step] = []

    def steps(self, begin: int, end: int) -> Sequence[Step]:
        """The slots from ``begin`` up to ``end``; those before it are gone through if need be."""
        first, second = self._sides
        for slot in range(len(self._steps), min(end, MAX_STEPS)):
            kind, lifetime = self._kinds[slot], self._lifetimes[slot]
            name = self.mix.profiles[kind].name
            outcomes = (first.slot(slot, name, lifetime), second.slot(slot, name, lifetime))
            self._steps.append(Step(kind, lifetime, outcomes))
        return self._steps[begin:end]
