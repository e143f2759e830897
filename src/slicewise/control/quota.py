"""Quotas: whether a tenant would exceed its limits, and the message that explains it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from slicewise.control.state import TenantStatus
from slicewise.core.geometry import Geometry
from slicewise.core.request import Request
from slicewise.journal.entries import Part


def has_limits(tenant: TenantStatus) -> bool:
    """Return whether the quota limits the resources that the tenant may hold."""
    quota = tenant.quota
    return not (quota.memory_slices is quota.compute_slices is quota.instances is None)


def excess(tenant: TenantStatus, more: Collection[Part]) -> str | None:
    """Return how these additional instances would exceed the quota; None if they would not."""
    return _excess(
        tenant,
        sum(part.size for part in more),
        sum(part.compute for part in more),
        len(more),
    )


def least_excess(
    tenant: TenantStatus,
    request: Request,
    count: int,
    held: Collection[Part],
    geometries: Iterable[Geometry],
) -> str | None:
    """Return how a request exceeds the quota wherever it is placed; None if it might not.

    This is checked before placing, because a tenant without quota should learn that even when the
    cluster is full. ``held`` are instances that are placed, but not in the tenant's usage yet.
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


def too_many_wait(tenant: TenantStatus, most: int) -> str | None:
    """Return why the tenant may not queue another request; None if it may."""
    if tenant.waiting < most:
        return None
    return f"tenant {tenant.name!r} has {tenant.waiting} queued requests, and the limit is {most}"


def _excess(tenant: TenantStatus, memory: int, compute: int, instances: int) -> str | None:
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
