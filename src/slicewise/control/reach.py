"""Whether a request could be placed if nothing else were there: what waiting can bring at all."""

from __future__ import annotations

from collections.abc import Mapping

from slicewise.core.geometry import Geometry, Profile
from slicewise.core.request import Request
from slicewise.core.tables import kept


def within_reach(request: Request, count: int, gpus: Mapping[Geometry, int]) -> bool:
    """Whether so many instances fit on these GPUs when all of them are empty."""
    room = 0
    for geometry, number in gpus.items():
        profiles = [profile for _, profile in request.candidates(geometry)]
        room += number * max((most(geometry, profile) for profile in profiles), default=0)
    return room >= count


@kept(1024)
def most(geometry: Geometry, profile: Profile) -> int:
    """How many instances of one profile an empty GPU holds.

    All windows are equally long, so taking the lowest start that is still free is best.
    """
    windows = free_from = 0
    for start in profile.starts:
        if start >= free_from:
            windows += 1
            free_from = start + profile.size
    for budget, need in zip(geometry.all_budgets, geometry.needs(profile), strict=True):
        if need:
            windows = min(windows, budget.total // need)
    return windows
