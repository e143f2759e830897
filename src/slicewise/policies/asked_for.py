"""The windows of the profiles that are asked for, and what of them the occupied slices leave.

A policy that knows the profiles its tenants ask for need not keep places for the others. A variant
of a profile takes the same windows, so it counts as the plain profile. On a model that offers none
of the profiles, all plain ones count: what is asked for there is not known.
"""

from __future__ import annotations

from slicewise.core.geometry import Geometry, Profile
from slicewise.core.tables import cached

AskedFor = frozenset[str] | None
"""The names of the profiles that are asked for; None stands for every plain profile."""


@cached(1024)
def asked_profiles(geometry: Geometry, asked_for: AskedFor) -> tuple[Profile, ...]:
    """The plain profiles of a model that count."""
    if asked_for is None:
        return geometry.plain_profiles
    names = {p.variant_of or p.name for p in geometry.profiles if p.name in asked_for}
    return tuple(p for p in geometry.plain_profiles if p.name in names) or geometry.plain_profiles


@cached(1024)
def asked_windows(geometry: Geometry, asked_for: AskedFor = None) -> tuple[int, ...]:
    """The windows of all their placements; where profiles share one, it is there for each."""
    return tuple(
        profile.window(start)
        for profile in asked_profiles(geometry, asked_for)
        for start in profile.starts
    )


@cached(1024)
def whole_is_asked(geometry: Geometry, asked_for: AskedFor = None) -> bool:
    """Whether one of them takes a whole GPU."""
    return geometry.full in asked_windows(geometry, asked_for)


@cached(256)
def open_places(geometry: Geometry, asked_for: AskedFor = None) -> tuple[int, ...]:
    """By mask: how many of their placements are open."""
    windows = asked_windows(geometry, asked_for)
    return tuple(sum(not window & mask for window in windows) for mask in range(geometry.full + 1))


@cached(256)
def stranded_slices(geometry: Geometry, asked_for: AskedFor = None) -> tuple[int, ...]:
    """By mask: the slices, as a mask, that are free and in no open placement of theirs."""
    windows = frozenset(asked_windows(geometry, asked_for))
    found = []
    for mask in range(geometry.full + 1):
        usable = 0
        for window in windows:
            if not window & mask:
                usable |= window
        found.append(geometry.full & ~mask & ~usable)
    return tuple(found)
