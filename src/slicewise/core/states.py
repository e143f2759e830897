"""The states a GPU can be in, and how instances move it from one to another.

What may be placed on a GPU depends only on which slices are occupied and on how much of each
budget is used. Both together are its *state*. A model has a few hundred reachable ones, found
once by walking every legal placement from the empty GPU; after that, legality and the outcome of
a placement are table look-ups.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from operator import add, gt

from slicewise.core.errors import GeometryError
from slicewise.core.geometry import Geometry, Placement, Profile
from slicewise.core.tables import cached

MAX_CELLS = 1 << 22
"""States times placements, which the tables of a model hold: a GPU of 16 slices with every mask
and 64 placements. Budgets can make more of a few lines, and more than memory holds."""

ILLEGAL = -1
"""In transition tables: this placement cannot be made (or released) in this state."""


@dataclass(frozen=True, slots=True)
class GpuState:
    """One GPU as a policy sees it: what is taken, and what would be legal next."""

    geometry: Geometry
    mask: int
    used: tuple[int, ...]
    """Used amount of each of the geometry's budgets, compute first."""

    @property
    def free_slices(self) -> int:
        """Memory slices not taken."""
        return self.geometry.slices - self.mask.bit_count()

    @property
    def free_compute(self) -> int:
        """Compute slices not taken."""
        return self.geometry.compute - self.used[0]

    def within_budgets(self, profile: Profile) -> bool:
        """Whether no budget would be overdrawn, wherever the instance went."""
        return all(
            used + need <= budget.total
            for used, need, budget in zip(
                self.used, self.geometry.needs(profile), self.geometry.all_budgets, strict=True
            )
        )

    def overdrawn(self, profile: Profile) -> str:
        """The first budget that an instance, not within budgets, would overdraw, in words."""
        needs = self.geometry.needs(profile)
        budget, used = next(
            (budget, used)
            for budget, used, need in zip(self.geometry.all_budgets, self.used, needs, strict=True)
            if used + need > budget.total
        )
        return f"the GPU's {budget.name} budget ({used} of {budget.total} used)"

    def feasible_starts(self, profile: Profile) -> tuple[int, ...]:
        """The starts at which the hardware would accept ``profile`` now, ascending."""
        if not self.within_budgets(profile):
            return ()
        return tuple(s for s in profile.starts if not profile.window(s) & self.mask)

    def after(self, placement: Placement) -> GpuState:
        """The state once ``placement``, legal here, is made."""
        needs = self.geometry.needs(placement.profile)
        return GpuState(
            self.geometry,
            self.mask | placement.window,
            tuple(u + n for u, n in zip(self.used, needs, strict=True)),
        )


def empty_state(geometry: Geometry) -> GpuState:
    """A GPU with nothing on it."""
    return GpuState(geometry, 0, (0,) * len(geometry.all_budgets))


@dataclass(frozen=True, eq=False)
class StateSpace:
    """Every reachable state of a model, numbered; state 0 is the empty GPU."""

    geometry: Geometry
    states: tuple[GpuState, ...]
    after_place: tuple[tuple[int, ...], ...]
    """State by placement: the state that follows, or ILLEGAL."""
    after_release: tuple[tuple[int, ...], ...]
    """State by placement: the state left when that instance ends, or ILLEGAL."""

    def __len__(self) -> int:
        return len(self.states)


@cached(256)
def state_space(geometry: Geometry, profiles: frozenset[str] | None = None) -> StateSpace:
    """The states reachable with these profiles (all of them unless named)."""
    placements = [p for p in geometry.placements if profiles is None or p.profile.name in profiles]
    found = _reachable(geometry, placements)
    states = tuple(sorted(found, key=lambda key: (key[0].bit_count(), key)))
    number = {key: index for index, key in enumerate(states)}
    width = len(geometry.placements)
    place = [[ILLEGAL] * width for _ in states]
    release = [[ILLEGAL] * width for _ in states]
    for key, followers in found.items():
        here = number[key]
        for placement, follower in followers:
            there = number[follower]
            place[here][placement] = there
            release[there][placement] = here
    return StateSpace(
        geometry,
        tuple(GpuState(geometry, mask, used) for mask, used in states),
        tuple(map(tuple, place)),
        tuple(map(tuple, release)),
    )


_Key = tuple[int, tuple[int, ...]]
"""A state as mask and used budgets."""


def _reachable(
    geometry: Geometry, placements: Collection[Placement]
) -> dict[_Key, list[tuple[int, _Key]]]:
    """Every state reachable from empty, with the placements that lead on from it."""
    totals = [budget.total for budget in geometry.all_budgets]
    moves = [(p.number, p.window, geometry.needs(p.profile)) for p in placements]
    most = MAX_CELLS // len(geometry.placements)
    start = (0, empty_state(geometry).used)
    found: dict[_Key, list[tuple[int, _Key]]] = {start: []}
    waiting = [start]
    for key in waiting:  # Nearly empty ones first: they lead to most, so too many are soon seen.
        mask, used = key
        for number, window, needs in moves:
            if window & mask:
                continue
            after = tuple(map(add, used, needs))
            if any(map(gt, after, totals)):
                continue
            follower = (mask | window, after)
            found[key].append((number, follower))
            if follower not in found:
                found[follower] = []
                waiting.append(follower)
        if len(found) > most:
            raise GeometryError(
                geometry.model,
                f"a GPU of this model can be in more than {most:,} states, which is too many to "
                "schedule; describe it with fewer starts, profiles or budgets",
            )
    return found
