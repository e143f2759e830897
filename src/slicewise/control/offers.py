"""What can be asked for: on the nodes that are there, on others that might be, or nowhere."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache

from slicewise.catalog import Catalog, Entry
from slicewise.control.answers import RefusedError
from slicewise.core.errors import UnknownNameError
from slicewise.core.geometry import Geometry
from slicewise.core.request import Reason, Rejection, Request


def refuse_unknown(request: Request, here: Collection[Geometry], index: int | None = None) -> None:
    """Refuse what no GPU model offers, neither one of those here nor any other that is known."""
    if not _offered(request, here):
        unknown = _unknown(request, here)
        if unknown is not None:
            raise RefusedError(400, unknown, index=index, field="profile")


def as_capacity(rejection: Rejection) -> Rejection:
    """A profile that exists, but on no node here, is a matter of capacity."""
    if rejection.reason is not Reason.UNKNOWN_PROFILE:
        return rejection
    return Rejection(rejection.request, Reason.CAPACITY, rejection.detail)


def _offered(request: Request, here: Collection[Geometry]) -> bool:
    """Whether a model here has a profile that would serve."""
    want = request.want
    if isinstance(want, str) and not request.models:  # as nearly all ask
        for geometry in here:
            if geometry.has(want):
                return True
    return any(request.candidates(geometry) for geometry in here)


def _unknown(request: Request, here: Collection[Geometry]) -> str | None:
    """Why no GPU model anywhere offers what is asked for, if so; near names are those used here."""
    anywhere = [entry.geometry for entry in _catalog() if entry.geometry is not None]
    if any(request.candidates(geometry) for geometry in anywhere):
        return None
    if isinstance(request.want, str):
        named = [geometry for geometry in (*here, *anywhere) if geometry.model in request.models]
        known = dict.fromkeys(p.name for g in named or here or anywhere for p in g.profiles)
        where = f"profile on {' or '.join(request.models)}" if request.models else "profile"
        return str(UnknownNameError(where, request.want, known))
    return f"no GPU model known here offers {request}"


@cache
def _catalog() -> tuple[Entry, ...]:
    return tuple(Catalog.builtin().entries())
