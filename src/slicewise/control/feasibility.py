"""What can be requested: profiles that some GPU model offers, in the cluster or the catalog."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache

from slicewise.catalog import Catalog, CatalogEntry
from slicewise.control.answers import RefusedError
from slicewise.core.errors import UnknownNameError
from slicewise.core.geometry import Geometry
from slicewise.core.request import Reason, Rejection, Request


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
def _catalog() -> tuple[CatalogEntry, ...]:
    return tuple(Catalog.builtin().entries())
