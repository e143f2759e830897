"""The states a GPU can be in, and how instances move it from one to another.

A GPU's *state* is the windows of its instances and how much of each budget is used. What may be
placed depends on the occupied slices and the budgets only; how long a window stays shut also
depends on how many instances are in it, which the windows tell. A model has some hundred
reachable states, found once by walking every legal placement from the empty GPU; after that,
legality and the outcome of a placement are table look-ups. A model with very many of them keeps
the occupied slices without the windows.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from operator import add, gt
from typing import NamedTuple

from slicewise.core.errors import GeometryError
from slicewise.core.geometry import Geometry, Placement, Profile
from slicewise.core.tables import cached

MAX_CELLS = 1 << 22
"""States times placements, which the tables of a model hold: a GPU of 16 slices with every mask
and 64 placements. Budgets can make more of a few lines, and more than memory holds."""

MOST_WITH_WINDOWS = 5_000
"""States of a model that tells apart equal slices with other instances. One with more keeps the
mask alone: a decision looks at every state."""

ILLEGAL = -1
"""In transition tables: this placement cannot be made (or released) in this state."""


@dataclass(frozen=True, slots=True)
class GpuState:
    """One GPU as a policy sees it: what is taken, and what would be legal next."""

    geometry: Geometry
    mask: int
    used: tuple[int, ...]
    """Used amount of each of the geometry's budgets, compute first."""
    windows: tuple[int, ...] | None = None
    """The windows of its instances, ascending; None where the model keeps only the mask."""

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

    def refusal(self, number: int, gpu: str) -> str:
        """Why a placement, given by its number, cannot be made on the GPU of that name."""
        placement = self.geometry.placements[number]
        what = f"{placement.profile.name} at slice {placement.start} of {gpu}"
        if placement.window & self.mask:
            taken = self.geometry.mask_text(self.mask)
            return f"{what} overlaps occupied slices ({taken}, slice 0 first)"
        return f"{what} would exceed {self.overdrawn(placement.profile)}"

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
            _with(self.windows, placement.window),
        )

    def blockers(self, window: int) -> int:
        """How many instances have a slice in this window; at least how many without windows."""
        if self.windows is None:
            return int(self.mask & window != 0)
        return sum(taken & window != 0 for taken in self.windows)


def empty_state(geometry: Geometry) -> GpuState:
    """A GPU with nothing on it."""
    windows = () if keeps_windows(geometry) else None
    return GpuState(geometry, 0, (0,) * len(geometry.all_budgets), windows)


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
def keeps_windows(geometry: Geometry) -> bool:
    """Whether the states of a model tell its instances apart, or only the occupied slices."""
    start = _Key(0, (0,) * len(geometry.all_budgets), ())
    return _reachable(geometry, geometry.placements, start, MOST_WITH_WINDOWS) is not None


@cached(256)
def state_space(geometry: Geometry, profiles: frozenset[str] | None = None) -> StateSpace:
    """The states reachable with these profiles (all of them unless named)."""
    placements = [p for p in geometry.placements if profiles is None or p.profile.name in profiles]
    empty = empty_state(geometry)
    most = MAX_CELLS // len(geometry.placements)
    found = _reachable(geometry, placements, _Key(empty.mask, empty.used, empty.windows), most)
    if found is None:
        raise GeometryError(
            geometry.model,
            f"a GPU of this model can be in more than {most:,} states, which is too many to "
            "schedule; describe it with fewer starts, profiles or budgets",
        )
    states = tuple(sorted(found, key=lambda key: (key.mask.bit_count(), key)))
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
        tuple(GpuState(geometry, *key) for key in states),
        tuple(map(tuple, place)),
        tuple(map(tuple, release)),
    )


class _Key(NamedTuple):
    """A state without its geometry."""

    mask: int
    used: tuple[int, ...]
    windows: tuple[int, ...] | None


def _with(windows: tuple[int, ...] | None, window: int) -> tuple[int, ...] | None:
    """The windows and one more."""
    return None if windows is None else tuple(sorted((*windows, window)))


def _reachable(
    geometry: Geometry, placements: Collection[Placement], start: _Key, most: int
) -> dict[_Key, list[tuple[int, _Key]]] | None:
    """The states reachable from one, with the placements that lead on; None if more than most."""
    totals = [budget.total for budget in geometry.all_budgets]
    moves = [(p.number, p.window, geometry.needs(p.profile)) for p in placements]
    found: dict[_Key, list[tuple[int, _Key]]] = {start: []}
    waiting = [start]
    for key in waiting:  # Nearly empty ones first: they lead to most, so too many are soon seen.
        mask, used, windows = key
        for number, window, needs in moves:
            if window & mask:
                continue
            after = tuple(map(add, used, needs))
            if any(map(gt, after, totals)):
                continue
            follower = _Key(mask | window, after, _with(windows, window))
            found[key].append((number, follower))
            if follower not in found:
                found[follower] = []
                waiting.append(follower)
        if len(found) > most:
            return None
    return found
