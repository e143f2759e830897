"""Quotas: whether a tenant would hold more than it may, and the sentence to say so."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from slicewise.control.entries import Part
from slicewise.control.state import TenantStanding
from slicewise.core.geometry import Geometry
from slicewise.core.request import Request


def has_limits(tenant: TenantStanding) -> bool:
    """Whether there is anything the tenant could have too much of."""
    quota = tenant.quota
    return not (quota.memory_slices is quota.compute_slices is quota.instances is None)


def excess(tenant: TenantStanding, more: Collection[Part]) -> str | None:
    """What would be too much if the tenant had these instances as well, or None."""
    return _excess(
        tenant,
        sum(part.size for part in more),
        sum(part.compute for part in more),
        len(more),
    )


def least_excess(
    tenant: TenantStanding,
    request: Request,
    count: int,
    held: Collection[Part],
    geometries: Iterable[Geometry],
) -> str | None:
    """What would be too much wherever the request went, or None if it might be within.

    Asked before looking for a place, so that a tenant without quota left is told so even when
    the cluster is full.
    """
    profiles = [profile for g in geometries for _, profile in request.candidates(g)]
    size = min((profile.size for profile in profiles), default=0)
    compute = min((profile.compute for profile in profiles), default=0)
    return _excess(
        tenant,
        count * size + sum(part.size for part in held),
        count * compute + sum(part.compute for part in held),
        count + len(held),
    )


def too_many_wait(tenant: TenantStanding, most: int) -> str | None:
    """Why one more request of the tenant may not wait in the queue, or None if it may."""
    if tenant.waiting < most:
        return None
    return f"{tenant.waiting} requests of tenant {tenant.name!r} wait already, and {most} may"


def _excess(tenant: TenantStanding, memory: int, compute: int, instances: int) -> str | None:
    quota, usage = tenant.quota, tenant.usage
    for what, limit, used, more in (
        ("memory slices", quota.memory_slices, usage.memory_slices, memory),
        ("compute slices", quota.compute_slices, usage.compute_slices, compute),
        ("instances", quota.instances, usage.instances, instances),
    ):
        if limit is not None and used + more > limit:
            return (
                f"tenant {tenant.name!r} uses {used} of its {limit} {what}, "
                f"and this would take {more} more"
            )
    return None
