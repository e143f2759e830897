"""The policies as their definitions read: GPU by GPU, slice by slice, no tables and no index.

Slow on purpose. This is the twin that every fast path must agree with, decision for decision,
and the yardstick benchmarks measure against. It shares only the geometry's plain facts with the
rest: sets of slices instead of masks, lists instead of indexes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

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


class Decision(NamedTuple):
    """Where a request goes."""

    gpu: int
    profile: str
    start: int


class ReferenceScheduler:
    """Any built-in policy by name, over a plain list of GPUs."""

    def __init__(self, gpus: list[ReferenceGpu], policy: str) -> None:
        self.gpus = gpus
        self.strict = policy.endswith("-strict")
        self.rule = policy.removesuffix("-strict")
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
            return [(self._least_lost(gpu, profile, start), start) for start in feasible]
        if self.rule in ("mfi", "mfi-overlap"):
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
        reading = Reading.PARTIAL if self.rule == "mfi" else Reading.OVERLAP
        before = gpu.occupied
        after = before | Held(profile, start).slices
        return reference_score(gpu.geometry, after, reading) - reference_score(
            gpu.geometry, before, reading
        )

    def _least_lost(self, gpu: ReferenceGpu, profile: Profile, start: int) -> tuple[bool, Fraction]:
        before = gpu.occupied
        after = before | Held(profile, start).slices
        plain = [other for other in gpu.geometry.profiles if other.variant_of is None]
        windows = [Held(other, at).slices for other in plain for at in other.starts]
        lost = sum(not w & before and bool(w & after) for w in windows)
        whole = set(range(gpu.geometry.slices))
        for sign, taken in ((1, after), (-1, before)):
            usable = set().union(*(w for w in windows if not w & taken))
            lost += sign * 2 * len(whole - taken - usable)
        return not before, lost - Fraction(4 * len(before), gpu.geometry.slices)

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
