"""Fragmentation in compute slices: F of a GPU's state, in two readings.

`fragmentation` judges memory slices by the mask alone. Here a GPU's compute slices decide. For
every plain profile whose compute slices fit in the number of free ones, every legal start whose
window has an occupied memory slice adds the profile's compute slices, unless the room there is
taken entirely. The readings differ in what that room is: ``compute`` looks at the compute slices
behind the window, ``either`` at its memory slices as well.

An instance takes the compute slices behind its start. A state keeps their number, not their
places: on an A100 a 3g.40gb at 0 leaves the same state as a 1g.20gb at 0 with a 2g.20gb at 2, and
only the first keeps compute slice 1 busy. F of a state is the least of its arrangements.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from slicewise.core.errors import GeometryError
from slicewise.core.geometry import Geometry, Profile
from slicewise.core.states import MAX_CELLS
from slicewise.core.tables import cached


class ComputeReading(StrEnum):
    """Which slices of a blocked window must be taken for it to strand nothing."""

    COMPUTE = "compute"
    EITHER = "either"


class Use(NamedTuple):
    """The part of a state that matters here."""

    mask: int
    compute: int
    """How many compute slices are used."""


def compute_window(geometry: Geometry, profile: Profile, start: int) -> int:
    """The mask of the compute slices behind a placement.

    A compute slice lies behind one memory slice, or behind more on models with more of them. The
    last memory slice of an A100 has none.
    """
    first = start // max(1, geometry.slices // geometry.compute)
    return ((1 << profile.compute) - 1) << first & (1 << geometry.compute) - 1


@cached(256)
def arrangements(geometry: Geometry) -> Mapping[Use, frozenset[int]]:
    """By reachable use: the masks of compute slices that its arrangements of instances take."""
    moves = {
        (window, profile.compute, compute_window(geometry, profile, start))
        for _, profile, start, window in geometry.placements
    }
    most = MAX_CELLS // len(geometry.placements)
    waiting = [(Use(0, 0), 0)]
    found = set(waiting)
    for use, taken in waiting:
        for window, compute, behind in moves:
            if window & use.mask or use.compute + compute > geometry.compute:
                continue
            follower = Use(use.mask | window, use.compute + compute), taken | behind
            if follower not in found:
                found.add(follower)
                waiting.append(follower)
        if len(found) > most:
            raise GeometryError(
                geometry.model,
                f"the instances of a GPU can be arranged in more than {most:,} ways, too many to "
                "score by compute slices; use a policy that is guided by memory slices",
            )
    by_use: dict[Use, set[int]] = {}
    for use, taken in found:
        by_use.setdefault(use, set()).add(taken)
    return {use: frozenset(masks) for use, masks in by_use.items()}


def uses(geometry: Geometry, mask: int) -> tuple[Use, ...]:
    """What instances may use that occupy exactly these slices, the most compute first."""
    found = (use for use in arrangements(geometry) if use.mask == mask)
    return tuple(sorted(found, reverse=True))


def compute_score_by_profile(
    geometry: Geometry, use: Use, reading: ComputeReading = ComputeReading.COMPUTE
) -> dict[str, int]:
    """What each plain profile adds to F, in the arrangement with the least F."""
    masks = arrangements(geometry).get(use)
    if masks is None:
        raise GeometryError(
            geometry.model,
            f"no instances occupy {geometry.mask_text(use.mask)} (slice 0 first) with "
            f"{use.compute} compute slices",
        )
    each = (_added(geometry, use, taken, reading) for taken in sorted(masks))
    return min(each, key=lambda added: sum(added.values()))


def compute_score(
    geometry: Geometry, use: Use, reading: ComputeReading = ComputeReading.COMPUTE
) -> int:
    """F of a GPU in compute slices."""
    return sum(compute_score_by_profile(geometry, use, reading).values())


@cached(256)
def compute_score_table(geometry: Geometry, reading: ComputeReading) -> Mapping[Use, int]:
    """F of every reachable use."""
    return {use: compute_score(geometry, use, reading) for use in arrangements(geometry)}


def _added(geometry: Geometry, use: Use, taken: int, reading: ComputeReading) -> dict[str, int]:
    """What each plain profile adds to F while these compute slices are taken."""
    added: dict[str, int] = {}
    for profile in geometry.plain_profiles:
        added[profile.name] = 0
        if profile.compute > geometry.compute - use.compute:
            continue
        for start in profile.starts:
            window = profile.window(start)
            room = compute_window(geometry, profile, start) & ~taken
            if reading is ComputeReading.EITHER:
                room |= window & ~use.mask
            if window & use.mask and room:
                added[profile.name] += profile.compute
    return added
