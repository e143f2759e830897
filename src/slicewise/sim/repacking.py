"""Whether instances could be rearranged to fit is, on most models, a matter of counting them.

If everyone may be moved at no cost, all that matters is how many instances of each kind there
are. For two families of models that question has an exact answer from the counts alone. Which
family a model belongs to is read off its profiles' windows. The two rules are plain functions of
counts; `oracle` compiles them.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    def fits(self, running: Sequence[int], gpus: int) -> bool:
        """Whether so many GPUs can hold these counts, given by column."""
        if self.rule is Rule.HALVES:
            return fits_halves(running, gpus)
        return fits_aligned(running, self.sizes, self.room, gpus)


def fits_halves(running: Sequence[int], gpus: int) -> bool:
    """Whether GPUs of two unequal halves hold these counts, in the order of `HALVES_SHAPES`.

    A lower half is four slices: two pairs that hold anything of their size. An upper half is
    such a pair and a last one, slices 6 and 7, that holds a double 1g or one 1g. Nothing but a
    whole GPU crosses halves and nothing but a half crosses pairs, so each kind is given what is
    of least use to those after it, largest first.
    """
    whole, lower_only, half, full_only, pair, single = running
    gpus -= whole
    if gpus < 0:
        return False
    # A half goes to an upper half while there is one: a lower half would be worth more later.
    upper = gpus - min(half, gpus)
    lower = gpus - lower_only - (half - min(half, gpus))
    if lower < 0:
        return False
    # In the same way a pair goes to a last pair first, where only one single could be.
    last = upper - min(pair, upper)
    full = 2 * lower + upper - full_only - (pair - min(pair, upper))
    if full < 0:
        return False
    return bool(single <= 2 * full + last)


def fits_aligned(
    running: Sequence[int], sizes: Sequence[int], room: Sequence[int], gpus: int
) -> bool:
    """Whether aligned windows of nested sizes fit, columns from the largest size down.

    Larger windows are made of whole smaller ones, so wherever they are they leave the same
    number of those: only the volume counts, against what windows of a size can cover.
    """
    volume = 0
    for column in range(len(sizes)):
        volume += running[column] * sizes[column]
        if volume > room[column] * gpus:
            return False
    return True


def repacking(mix: Mix) -> Repacking | str:
    """The rule for a mix; where none is exact, the reason in one sentence."""
    return repacking_of(mix.geometry, mix.profiles)


def repacking_of(geometry: Geometry, profiles: tuple[Profile, ...]) -> Repacking | str:
    """The rule for some profiles of a model; where none is exact, the reason in one sentence."""
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
    """The profile that fits wherever another of these does, if there is one.

    Each window of the others holds one of its windows. Whoever could be given any of these
    profiles needs only be thought of with this one: put in place of another it takes no slice
    that was not taken before.
    """
    return next((p for p in profiles if all(_holds(other, p) for other in profiles)), None)


def _holds(large: Profile, small: Profile) -> bool:
    """Whether every window of a profile has a window of another one in it."""
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
