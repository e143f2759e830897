"""Whether instances could be rearranged to fit is, on most models, a matter of counting them.

If everyone may be moved at no cost, all that matters is how many instances of each kind there
are. For two families of models that question has an exact answer from the counts alone. Which
family a model belongs to is read off its profiles' windows; `oracle` holds the two rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

from slicewise.core.geometry import Geometry, Profile
from slicewise.sim.mix import Mix


class Rule(IntEnum):
    """How counts are judged."""

    HALVES = 0
    """Two unequal halves: the lower has four whole slices, the upper lacks a start at its last."""
    ALIGNED = 1
    """Every window starts at a multiple of its size, and every size divides the next larger."""


HALVES_SLICES = 8
HALVES_SHAPES = (
    (8, (0,)),
    (4, (0,)),
    (4, (0, 4)),
    (2, (0, 2, 4)),
    (2, (0, 2, 4, 6)),
    (1, (0, 1, 2, 3, 4, 5, 6)),
)
"""Size and starts of the windows that rule is about; on an A100: 7g, 4g, 3g, 2g, double 1g, 1g."""


@dataclass(frozen=True)
class Repacking:
    """A rule, and what it has to know about the profiles of a mix. Columns count instances."""

    rule: Rule
    columns: tuple[int, ...]
    """By kind of request: the column it is counted in."""
    sizes: tuple[int, ...]
    """By column: memory slices of the window."""
    room: tuple[int, ...]
    """By column: slices of an empty GPU that windows of this size can cover."""


def repacking(mix: Mix) -> Repacking | str:
    """The rule for a mix; where none is exact, the reason in one sentence."""
    geometry, profiles = mix.geometry, mix.profiles
    shapes = [(profile.size, profile.starts) for profile in profiles]
    why = _shared(geometry, profiles)
    if why is None and geometry.slices == HALVES_SLICES and set(shapes) <= set(HALVES_SHAPES):
        columns = tuple(HALVES_SHAPES.index(shape) for shape in shapes)
        return _counted(geometry, Rule.HALVES, columns, [size for size, _ in HALVES_SHAPES])
    why = why or _unaligned(geometry, profiles)
    if why is not None:
        return f"no exact rule says what {geometry.model} could hold: {why}"
    sizes = sorted((profile.size for profile in profiles), reverse=True)
    columns = tuple(sizes.index(profile.size) for profile in profiles)
    return _counted(geometry, Rule.ALIGNED, columns, sizes)


def _counted(
    geometry: Geometry, rule: Rule, columns: tuple[int, ...], sizes: list[int]
) -> Repacking:
    room = tuple(geometry.slices // size * size for size in sizes)
    return Repacking(rule, columns, tuple(sizes), room)


def _shared(geometry: Geometry, profiles: tuple[Profile, ...]) -> str | None:
    """Why windows alone do not decide: a budget that can run out while slices are free."""
    for number, budget in enumerate(geometry.all_budgets):
        # The most that windows side by side could ask for, going up slice by slice.
        most = [0] * (geometry.slices + 1)
        for end in range(1, geometry.slices + 1):
            asked = [
                most[end - profile.size] + geometry.needs(profile)[number]
                for profile in profiles
                if end - profile.size in profile.starts
            ]
            most[end] = max([most[end - 1], *asked])
        if most[-1] > budget.total:
            return f"{budget.name} may run out before the slices do"
    return None


def _unaligned(geometry: Geometry, profiles: tuple[Profile, ...]) -> str | None:
    """Why the windows are not aligned blocks of nested sizes."""
    for profile in profiles:
        every = range(0, geometry.slices - profile.size + 1, profile.size)
        if profile.starts != tuple(every):
            starts = ", ".join(map(str, profile.starts))
            return f"{profile.name} starts at {starts} and not at every multiple of {profile.size}"
    sizes = sorted({profile.size for profile in profiles})
    for small, large in pairwise(sizes):
        if large % small:
            return f"windows of {large} slices are not made of windows of {small}"
    return None
