"""Decides by counting whether instances fit on a cluster if all of them may be moved.

If moves are free, only the number of instances of each kind matters. For two families of models
the counts alone give an exact answer. A model's family follows from the windows of its profiles.
The two rules are plain functions of counts; `oracle` compiles them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

from slicewise.core.geometry import Geometry, Profile
from slicewise.lab.mix import Mix


class Rule(IntEnum):
    """The counting rule of a family of models."""

    HALVES = 0
    """Two unequal halves: the upper one has no start at its last slice."""
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
"""Sizes and starts of the windows of that rule; on an A100: 7g, 4g, 3g, 2g, double 1g, 1g."""


@dataclass(frozen=True)
class Repacking:
    """A rule for the profiles of a mix. A column counts the instances of some profiles."""

    rule: Rule
    columns: tuple[int, ...]
    """By kind of request: its column."""
    sizes: tuple[int, ...]
    """By column: memory slices of the window."""
    room: tuple[int, ...]
    """By column: slices of an empty GPU that windows of this size can cover."""

    def fits(self, running: Sequence[int], gpus: int) -> bool:
        """Return whether a cluster can hold these counts, given by column."""
        if self.rule is Rule.HALVES:
            return fits_halves(running, gpus)
        return fits_aligned(running, self.sizes, self.room, gpus)


def fits_halves(running: Sequence[int], gpus: int) -> bool:
    """Return whether GPUs of two unequal halves hold these counts, in order of `HALVES_SHAPES`.

    A lower half is four slices: two pairs that hold anything of their size. An upper half is such
    a pair and a last pair, slices 6 and 7, that holds a double 1g or one 1g. Only a whole GPU
    crosses halves, and only a half crosses pairs. So each kind, largest first, gets the windows
    that are least useful to the kinds after it.
    """
    whole, lower_only, half, full_only, pair, single = running
    gpus -= whole
    if gpus < 0:
        return False
    # A half takes an upper half if one is free: a lower half is more useful later.
    upper = gpus - min(half, gpus)
    lower = gpus - lower_only - (half - min(half, gpus))
    if lower < 0:
        return False
    # For the same reason a pair takes a last pair first, which holds only one single.
    last = upper - min(pair, upper)
    full = 2 * lower + upper - full_only - (pair - min(pair, upper))
    if full < 0:
        return False
    return bool(single <= 2 * full + last)


def fits_aligned(
    running: Sequence[int], sizes: Sequence[int], room: Sequence[int], gpus: int
) -> bool:
    """Return whether aligned windows of nested sizes fit, columns from the largest size down.

    A larger window consists of whole smaller ones, so it blocks the same number of them at any
    position: only the volume counts, compared with what windows of a size can cover.
    """
    volume = 0
    for column in range(len(sizes)):
        volume += running[column] * sizes[column]
        if volume > room[column] * gpus:
            return False
    return True


def repacking(mix: Mix) -> Repacking | str:
    """Return the exact rule for a mix, or a sentence that says why there is none."""
    return repacking_of(mix.geometry, mix.profiles)


def repacking_of(geometry: Geometry, profiles: tuple[Profile, ...]) -> Repacking | str:
    """Return the exact rule for profiles of a model, or a sentence that says why there is none."""
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


def smallest(profiles: Sequence[Profile]) -> Profile | None:
    """Return the profile that fits wherever any of the others does, if there is one.

    Each window of the others contains one of its windows. A request that accepts any of these
    profiles can be counted as this one: in place of another it takes no additional slice.
    """
    return next((p for p in profiles if all(_holds(other, p) for other in profiles)), None)


def _holds(large: Profile, small: Profile) -> bool:
    """Return whether every window of a profile contains a window of another one."""
    return all(
        any(small.window(inner) & ~large.window(outer) == 0 for inner in small.starts)
        for outer in large.starts
    )


def _counted(
    geometry: Geometry, rule: Rule, columns: tuple[int, ...], sizes: list[int]
) -> Repacking:
    room = tuple(geometry.slices // size * size for size in sizes)
    return Repacking(rule, columns, tuple(sizes), room)


def _shared(geometry: Geometry, profiles: tuple[Profile, ...]) -> str | None:
    """Return the budget that can run out while slices are free, as a reason, or None."""
    for number, budget in enumerate(geometry.all_budgets):
        # The maximum that adjacent windows could use, slice by slice.
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
    """Return why the windows are not aligned blocks of nested sizes, or None."""
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
