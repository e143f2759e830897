"""What can be requested: profiles that some GPU model offers, and counts that fit the cluster."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache

from slicewise.catalog import Catalog, Entry
from slicewise.control.answers import RefusedError
from slicewise.core.errors import UnknownNameError
from slicewise.core.geometry import Geometry, Profile
from slicewise.core.request import Reason, Rejection, Request
from slicewise.core.tables import cached


def refuse_unknown(
    request: Request, models: Collection[Geometry], index: int | None = None
) -> None:
    """Refuse a request that no GPU model offers, neither in the cluster nor in the catalog.

    ``models`` are those of the cluster, ``index`` is the request's place in a batch.
    """
    if not _offered(request, models):
        unknown = _unknown(request, models)
        if unknown is not None:
            raise RefusedError(400, unknown, index=index, field="profile")


def as_capacity(rejection: Rejection) -> Rejection:
    """Return a capacity rejection for a profile that exists, but on no node of the cluster."""
    if rejection.reason is not Reason.UNKNOWN_PROFILE:
        return rejection
    return Rejection(rejection.request, Reason.CAPACITY, rejection.detail)


def _offered(request: Request, models: Collection[Geometry]) -> bool:
    want = request.want
    if isinstance(want, str) and not request.models:  # the common case, made fast
        for geometry in models:
            if geometry.has(want):
                return True
    return any(request.candidates(geometry) for geometry in models)


def _unknown(request: Request, models: Collection[Geometry]) -> str | None:
    """Return why no model offers a request, with similar names; None if the catalog has one."""
    catalog = [entry.geometry for entry in _catalog() if entry.geometry is not None]
    if any(request.candidates(geometry) for geometry in catalog):
        return None
    if isinstance(request.want, str):
        named = [geometry for geometry in (*models, *catalog) if geometry.model in request.models]
        known = dict.fromkeys(p.name for g in named or models or catalog for p in g.profiles)
        where = f"profile on {' or '.join(request.models)}" if request.models else "profile"
        return str(UnknownNameError(where, request.want, known))
    return f"no GPU model known here offers {request}"


@cache
def _catalog() -> tuple[Entry, ...]:
    return tuple(Catalog.builtin().entries())


def fits_empty_cluster(request: Request, count: int, gpus: Mapping[Geometry, int]) -> bool:
    """Return whether so many instances would fit if all these GPUs were empty."""
    room = 0
    for geometry, number in gpus.items():
        profiles = [profile for _, profile in request.candidates(geometry)]
        room += number * max((instances_per_gpu(geometry, p) for p in profiles), default=0)
    return room >= count


@cached(1024)
def instances_per_gpu(geometry: Geometry, profile: Profile) -> int:
    """Return how many instances of one profile an empty GPU holds.

    All windows have the same length, so taking the lowest free start each time is optimal.
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
