"""Quotas: whether a tenant would exceed its limits, and the message about it; its leases."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from slicewise.control.commands import Terms
from slicewise.control.state import State, TenantStatus
from slicewise.core.cluster import Instance
from slicewise.core.geometry import Geometry
from slicewise.core.request import Reason, Rejection, Request
from slicewise.engine.queue import Queue, Ticket
from slicewise.engine.reservations import LineKey, Window
from slicewise.journal.entries import Part, Seconds


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


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much of the queue one tenant may take."""

    requests: int = 1000
    lines: int = 100
    """Every release tries the lines of all tenants, so those of one cost the others time."""


def too_many_wait(
    tenant: TenantStatus, ticket: Ticket, queue: Queue, most: QueueLimits
) -> str | None:
    """Return why the tenant may not queue this request, too; None if it may."""
    if tenant.waiting >= most.requests:
        return (
            f"tenant {tenant.name!r} has {tenant.waiting} queued requests, "
            f"and the limit is {most.requests}"
        )
    lines = queue.lines_of(ticket.tenant)
    if queue.line(ticket.line) is None and lines >= most.lines:
        return (
            f"tenant {tenant.name!r} has queued requests of {lines} kinds, and the limit is "
            f"{most.lines}: ask for instances as in one of these, or cancel one"
        )
    return None


def with_lease(terms: Terms, tenant: TenantStatus) -> Terms:
    """Return the terms of a request; without a lease, they get the tenant's default."""
    if terms.lease is not None:
        return terms
    quota = tenant.quota
    default = quota.default_lease_seconds
    lease = quota.max_lease_seconds if default is None else default
    return terms if lease is None else replace(terms, lease=lease)


def too_long(tenant: TenantStatus, lease: Seconds | None) -> str | None:
    """Return why the tenant may not have a lease of this length; None if it may."""
    longest = tenant.quota.max_lease_seconds
    if lease is None or longest is None or lease <= longest:
        return None
    return f"a lease of tenant {tenant.name!r} lasts at most {longest:g} seconds, not {lease:g}"


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


class QuotaCheck:
    """Checks quotas for the dispatcher and records nothing: enough for a dry run."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.held: list[Part] = []
        """Instances that the current command has placed and not recorded yet."""

    def over_quota(self, ticket: Ticket) -> Rejection | None:
        """Return why a tenant may not have what a ticket asks for, wherever it is placed."""
        tenant = self._state.tenants[ticket.tenant]
        if not has_limits(tenant):
            return None
        models = self._state.geometries.values()
        too_much = least_excess(tenant, ticket.request, ticket.count, self.held, models)
        return None if too_much is None else Rejection(ticket.request, Reason.QUOTA, too_much)

    def excess(self, ticket: Ticket, instances: tuple[Instance, ...]) -> Rejection | None:
        """Return how these instances exceed the quota, which may depend on the profiles chosen."""
        tenant = self._state.tenants[ticket.tenant]
        if not has_limits(tenant):
            return None
        too_much = excess(tenant, [*self.held, *self._state.parts(instances)])
        return None if too_much is None else Rejection(ticket.request, Reason.QUOTA, too_much)

    def ends(self, instance: Instance) -> Seconds | None:
        """Return when an instance ends, by its lease or a notice; None if that is unknown."""
        record = self._state.allocations.get(self._state.owner.get(instance.id, ""))
        if record is None or record.reclaimed_at is None:
            return None if record is None else record.ends
        return record.reclaimed_at if record.ends is None else min(record.ends, record.reclaimed_at)

    def accept(self, ticket: Ticket, instances: tuple[Instance, ...]) -> Rejection | None:
        """Refuse: only the handler serves the queue."""
        raise AssertionError("a dry run does not serve the queue")

    def reserve(self, line: LineKey, windows: tuple[Window, ...]) -> None:
        """Refuse: only the handler reserves windows."""
        raise AssertionError("a dry run reserves nothing")
