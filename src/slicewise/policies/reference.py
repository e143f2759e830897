"""The policies as their definitions read: GPU by GPU, slice by slice, no tables and no index.

Slow on purpose. This is the twin that every fast path must agree with, decision for decision,
and the yardstick benchmarks measure against. It shares only the geometry's plain facts with the
rest: sets of slices instead of masks, lists instead of indexes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from slicewise.core.compute_fragmentation import ComputeReading
from slicewise.core.fragmentation import Reading
from slicewise.core.geometry import Geometry, Profile
from slicewise.core.request import Reason, Request
from slicewise.policies.base import Key


class Held(NamedTuple):
    """An instance on a GPU."""

    profile: Profile
    start: int

    @property
    def slices(self) -> set[int]:
        """The slices it takes."""
        return set(range(self.start, self.start + self.profile.size))


@dataclass(eq=False)
class ReferenceGpu:
    """A GPU and what is on it."""

    geometry: Geometry
    held: list[Held] = field(default_factory=list)
    schedulable: bool = True

    @property
    def occupied(self) -> set[int]:
        """The slices that are taken."""
        return {s for held in self.held for s in held.slices}

    @property
    def free(self) -> int:
        """How many slices are free."""
        return self.geometry.slices - len(self.occupied)

    @property
    def free_compute(self) -> int:
        """How many compute slices are free."""
        return self.geometry.compute - sum(held.profile.compute for held in self.held)

    def feasible(self, profile: Profile, start: int) -> bool:
        """Whether the hardware would create the instance."""
        if Held(profile, start).slices & self.occupied or self.free_compute < profile.compute:
            return False
        for budget in self.geometry.budgets:
            used = sum(held.profile.uses.get(budget.name, 0) for held in self.held)
            if used + profile.uses.get(budget.name, 0) > budget.total:
                return False
        return True

    def feasible_starts(self, profile: Profile) -> list[int]:
        """Ascending."""
        return [start for start in profile.starts if self.feasible(profile, start)]

    def fragmented(self, profile: Profile) -> bool:
        """Whether enough slices are free, but every legal window is blocked."""
        windows = [Held(profile, start).slices for start in profile.starts]
        return self.free >= profile.size and all(w & self.occupied for w in windows)


def reference_score(geometry: Geometry, occupied: set[int], reading: Reading) -> int:
    """F as the paper defines it."""
    total = 0
    for profile in geometry.profiles:
        if profile.variant_of is not None:
            continue
        if profile.size > geometry.slices - len(occupied):
            continue
        for start in profile.starts:
            window = Held(profile, start).slices
            taken = window & occupied
            if taken and (reading is Reading.OVERLAP or taken != window):
                total += profile.size
    return total


@lru_cache(maxsize=4096)  # without it the agreement tests take minutes
def reference_compute_score(
    geometry: Geometry, occupied: frozenset[int], compute: int, reading: ComputeReading
) -> int:
    """F in compute slices: the least of all sets of instances that take exactly this."""
    return min(
        _compute_score(geometry, held, reading) for held in _arranged(geometry, occupied, compute)
    )


def _arranged(
    geometry: Geometry, occupied: frozenset[int], compute: int
) -> Iterator[tuple[Held, ...]]:
    """Every set of instances on these memory slices with so many compute slices in total."""
    if not occupied:
        if not compute:
            yield ()
        return
    lowest = min(occupied)
    for profile in {(p.size, p.compute, p.starts): p for p in geometry.profiles}.values():
        held = Held(profile, lowest)
        if lowest in profile.starts and held.slices <= occupied and profile.compute <= compute:
            rest = occupied - held.slices
            for others in _arranged(geometry, rest, compute - profile.compute):
                yield held, *others


def _compute_score(geometry: Geometry, held: tuple[Held, ...], reading: ComputeReading) -> int:
    occupied = {s for each in held for s in each.slices}
    busy = {s for each in held for s in _compute_slices(geometry, each)}
    free = geometry.compute - sum(each.profile.compute for each in held)
    total = 0
    for profile in geometry.profiles:
        if profile.variant_of is not None or profile.compute > free:
            continue
        for start in profile.starts:
            asked = Held(profile, start)
            room = bool(_compute_slices(geometry, asked) - busy)
            if reading is ComputeReading.EITHER:
                room = room or bool(asked.slices - occupied)
            if asked.slices & occupied and room:
                total += profile.compute
    return total


def _compute_slices(geometry: Geometry, held: Held) -> set[int]:
    """The compute slices behind an instance."""
    behind = max(1, geometry.slices // geometry.compute)
    first = held.start // behind
    return {s for s in range(first, first + held.profile.compute) if s < geometry.compute}


def asked_windows(
    geometry: Geometry, asked_for: frozenset[str] | None
) -> list[tuple[str, set[int]]]:
    """Every placement of the plain profiles asked for, as name and slices; of all if none is."""
    names = {p.variant_of or p.name for p in geometry.profiles if p.name in (asked_for or ())}
    plain = [p for p in geometry.profiles if p.variant_of is None]
    return [
        (profile.name, Held(profile, start).slices)
        for profile in [p for p in plain if p.name in names] or plain
        for start in profile.starts
    ]


def stranded_slices_of(
    geometry: Geometry, windows: list[tuple[str, set[int]]], taken: set[int]
) -> set[int]:
    """The free slices that no open window covers."""
    usable = set().union(*(w for _, w in windows if not w & taken))
    return set(range(geometry.slices)) - taken - usable


def reference_least_lost(
    gpu: ReferenceGpu, profile: Profile, start: int, asked_for: frozenset[str] | None = None
) -> tuple[bool, Fraction]:
    """Whether the GPU is empty; then placements lost, stranded slices, less the share occupied."""
    geometry, before = gpu.geometry, gpu.occupied
    after = before | Held(profile, start).slices
    windows = asked_windows(geometry, asked_for)
    lost = sum(not w & before and bool(w & after) for _, w in windows)
    lost += 2 * len(stranded_slices_of(geometry, windows, after))
    lost -= 2 * len(stranded_slices_of(geometry, windows, before))
    return not before, lost - Fraction(4 * len(before), geometry.slices)


def reference_lost_time(
    gpu: ReferenceGpu,
    profile: Profile,
    start: int,
    asked_for: frozenset[str] | None = None,
    stranding: float = 4,
    weights: Mapping[str, float] | None = None,
    spares: bool = False,
) -> tuple[bool, Fraction]:
    """Whether the GPU is empty and opened last; then size times the time lost, and stranding."""
    geometry, new = gpu.geometry, Held(profile, start).slices
    windows = asked_windows(geometry, asked_for)
    cost = Fraction(0)
    for name, window in windows:
        if window & new:
            blockers = sum(bool(held.slices & window) for held in gpu.held)
            weight = Fraction((weights or {}).get(name, 1))
            cost += weight * len(window) * Fraction(1, 1 + blockers)
    stranded_now = stranded_slices_of(geometry, windows, gpu.occupied)
    newly = stranded_slices_of(geometry, windows, gpu.occupied | new) - stranded_now
    last = spares or any(len(window) == geometry.slices for _, window in windows)
    return last and not gpu.occupied, cost + Fraction(stranding) * len(newly)


class Decision(NamedTuple):
    """Where a request goes."""

    gpu: int
    profile: str
    start: int


_COMPUTE_GUIDES = {
    "mfi-compute": ComputeReading.COMPUTE,
    "mfi-either": ComputeReading.EITHER,
}


class ReferenceScheduler:
    """Any built-in policy by name, over a plain list of GPUs."""

    def __init__(self, gpus: list[ReferenceGpu], policy: str) -> None:
        self.gpus = gpus
        self.strict = policy.endswith("-strict")
        # Rehearsals choose its table; until then it is that of least-lost.
        self.rule = "least-lost" if policy == "rehearsed" else policy.removesuffix("-strict")
        self.turn = 0

    def submit(self, request: Request) -> Decision | Reason:
        """Decide and carry out."""
        decision = self.decide(request)
        if isinstance(decision, Decision):
            gpu = self.gpus[decision.gpu]
            gpu.held.append(Held(gpu.geometry.profile(decision.profile), decision.start))
        return decision

    def release(self, decision: Decision) -> None:
        """End the instance a decision made."""
        gpu = self.gpus[decision.gpu]
        gpu.held.remove(Held(gpu.geometry.profile(decision.profile), decision.start))

    def decide(self, request: Request) -> Decision | Reason:
        """The best of all options on all GPUs; GPUs are visited from the lowest id, or in turn."""
        best: tuple[object, int, Profile, int | None] | None = None
        for number in self._visiting_order():
            gpu = self.gpus[number]
            if not gpu.schedulable:
                continue
            for waste, profile in request.candidates(gpu.geometry):
                for key, start in self._options(gpu, profile):
                    if best is None or (waste, key) < best[0]:  # type: ignore[operator]
                        best = (waste, key), number, profile, start
        if best is None:
            return self._why(request)
        _, number, profile, start = best
        if self.rule == "round-robin":
            self.turn = number + 1
        if start is None:
            return Reason.FRAGMENTED if self._fragmented(request, number) else Reason.CAPACITY
        return Decision(number, profile.name, start)

    def _visiting_order(self) -> list[int]:
        order = list(range(len(self.gpus)))
        if self.rule == "round-robin":
            return order[self.turn :] + order[: self.turn]
        return order

    def _options(self, gpu: ReferenceGpu, profile: Profile) -> list[tuple[Key, int | None]]:
        """What the policy would do on this GPU: keys (lower is better) and starts."""
        feasible = gpu.feasible_starts(profile)
        if self.rule == "least-lost":
            return [(reference_least_lost(gpu, profile, start), start) for start in feasible]
        if self.rule in ("least-lost-time", "lease-aware"):  # the same where no end is known
            return [(reference_lost_time(gpu, profile, start), start) for start in feasible]
        if self.rule.startswith("mfi"):
            return [(self._increment(gpu, profile, start), start) for start in feasible]
        key = {"best-fit": gpu.free, "worst-fit": -gpu.free}.get(self.rule, 0)
        by_index = self.rule in ("best-fit", "worst-fit")
        order = profile.start_order if by_index else profile.starts
        for start in order:
            if start in feasible:
                return [(key, start)]
        room = gpu.free >= profile.size and gpu.free_compute >= profile.compute
        if self.strict and (room or self.rule == "round-robin"):
            return [(key, None)]
        return []

    def _increment(self, gpu: ReferenceGpu, profile: Profile, start: int) -> int:
        geometry, before = gpu.geometry, gpu.occupied
        after = before | Held(profile, start).slices
        if self.rule in _COMPUTE_GUIDES:
            guide = _COMPUTE_GUIDES[self.rule]
            used = geometry.compute - gpu.free_compute
            return reference_compute_score(
                geometry, frozenset(after), used + profile.compute, guide
            ) - reference_compute_score(geometry, frozenset(before), used, guide)
        reading = Reading.PARTIAL if self.rule == "mfi" else Reading.OVERLAP
        return reference_score(geometry, after, reading) - reference_score(
            geometry, before, reading
        )

    def _why(self, request: Request) -> Reason:
        if not any(request.candidates(gpu.geometry) for gpu in self.gpus):
            return Reason.UNKNOWN_PROFILE
        usable = [n for n, gpu in enumerate(self.gpus) if gpu.schedulable]
        if any(self._fragmented(request, number) for number in usable):
            return Reason.FRAGMENTED
        return Reason.CAPACITY

    def _fragmented(self, request: Request, number: int) -> bool:
        gpu = self.gpus[number]
        return any(gpu.fragmented(profile) for _, profile in request.candidates(gpu.geometry))
