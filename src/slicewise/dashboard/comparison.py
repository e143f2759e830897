"""Compare two policies on the same arrivals: two simulated clusters on the real engine.

In every slot, expired instances end, then one request arrives on both sides. Arrivals are those of
the steady experiment: profiles by the distribution, lifetimes such that sustained demand is
``load`` of the cluster. The same terms always give the same run.
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
from slicewise.core.tables import cached
from slicewise.engine.scheduler import Scheduler
from slicewise.lab.mix import Mix, parse_mix
from slicewise.lab.workload import draw_kinds, longest_lifetime, run_generator
from slicewise.policies.registry import policy

MAX_STEPS = 4000
"""Slots of a run; all arrivals are drawn at once, so that pages of a run are consistent."""


@cached(1 << 16)
def stranded(state: GpuState) -> int:
    """The stranded slices of a GPU in this state, as a mask.

    They are free, and enough for a profile, but no placement can use them. Of the plain profiles
    that fit by the number of free slices and the compute left, take the largest: if none of them
    has a feasible start, every free slice is stranded. Otherwise the stranded slices are those
    that no feasible placement covers. `static/look/geometry.js` computes the same in the browser;
    a test compares the two.
    """
    geometry = state.geometry
    free = geometry.full & ~state.mask
    fitting = [
        profile
        for profile in geometry.plain_profiles
        if profile.size <= state.free_slices and state.within_budgets(profile)
    ]
    if not fitting:
        return 0
    largest = max(profile.size for profile in fitting)
    if not any(state.feasible_starts(p) for p in fitting if p.size == largest):
        return free
    covered = 0
    for profile in fitting:
        for start in state.feasible_starts(profile):
            covered |= profile.window(start)
    return free & ~covered


@dataclass(frozen=True, slots=True)
class ComparisonTerms:
    """The parameters of a comparison."""

    policies: tuple[str, str]
    geometry: Geometry
    mix: str
    gpus: int
    load: float
    seed: int


class ArrivalOutcome(NamedTuple):
    """The outcome of an arrival on one side, and the totals of that side after it."""

    gpu: int | None
    start: int | None
    reason: str | None
    """The reason if it was rejected."""
    detail: str | None
    accepted: int
    """Requests accepted so far, this one included."""
    occupied: int
    """Occupied slices of all GPUs."""
    stranded: int
    """Free slices that no placement can use."""
    fragmentation: int
    """F of all GPUs together."""


class ComparisonStep(NamedTuple):
    """One slot: the arrival and its outcome on both sides."""

    profile: int
    """Index into the profiles of the mix."""
    lifetime: int
    sides: tuple[ArrivalOutcome, ArrivalOutcome]


class _Side:
    """One of the two clusters."""

    def __init__(self, terms: ComparisonTerms, name: str) -> None:
        self._cluster = Cluster.of(terms.geometry, terms.gpus)
        self._scheduler = Scheduler(self._cluster, policy(name))
        self._leaving: defaultdict[int, list[Instance]] = defaultdict(list)
        self._accepted = 0
        self._stranded = 0

    def slot(self, slot: int, profile: str, lifetime: int) -> ArrivalOutcome:
        """End expired instances, then submit the arrival."""
        for instance in self._leaving.pop(slot, ()):
            before = self._state(instance.gpu)
            self._scheduler.release(instance)
            self._update_stranded(before, instance.gpu)
        states = list(self._cluster.state_of)
        got = self._scheduler.submit(profile)
        gpu = start = reason = detail = None
        if isinstance(got, Rejection):
            reason, detail = str(got.reason), got.detail
        else:
            gpu, start = got.gpu, got.start
            self._leaving[slot + lifetime].append(got)
            self._accepted += 1
            self._update_stranded(self._cluster.states[states[gpu]], gpu)
        cluster = self._cluster
        return ArrivalOutcome(
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

    def _update_stranded(self, before: GpuState, gpu: int) -> None:
        after = stranded(self._state(gpu)).bit_count()
        self._stranded += after - stranded(before).bit_count()


class PolicyComparison:
    """A run of both sides, computed as far as it is requested."""

    def __init__(self, terms: ComparisonTerms) -> None:
        self.terms = terms
        self.mix: Mix = parse_mix(terms.mix, terms.geometry)
        rng = run_generator(terms.seed, 0)
        longest = longest_lifetime(self.mix, terms.gpus, terms.load)
        self._kinds: list[int] = draw_kinds(rng, self.mix, MAX_STEPS).tolist()
        drawn = rng.integers(1, longest, size=MAX_STEPS, endpoint=True)
        self._lifetimes: list[int] = drawn.tolist()
        first, second = terms.policies
        self._sides = (_Side(terms, first), _Side(terms, second))
        self._steps: list[ComparisonStep] = []

    def steps(self, begin: int, end: int) -> Sequence[ComparisonStep]:
        """The slots from ``begin`` up to ``end``; earlier ones are computed if necessary."""
        first, second = self._sides
        for slot in range(len(self._steps), min(end, MAX_STEPS)):
            kind, lifetime = self._kinds[slot], self._lifetimes[slot]
            name = self.mix.profiles[kind].name
            outcomes = (first.slot(slot, name, lifetime), second.slot(slot, name, lifetime))
            self._steps.append(ComparisonStep(kind, lifetime, outcomes))
        return self._steps[begin:end]
