"""What the allocation of a claim says: its devices, its user, and whether pods are held back."""

from __future__ import annotations

from typing import NamedTuple

from slicewise.kubernetes.api import ResourceClaim


class DeviceId(NamedTuple):
    """A device, as allocations name it."""

    driver: str
    pool: str
    device: str


def devices_of(claim: ResourceClaim) -> tuple[DeviceId, ...]:
    """The devices of an allocation, except those with administrative access."""
    allocation = claim.status.allocation
    if allocation is None:
        return ()
    return tuple(
        DeviceId(result.driver, result.pool, result.device)
        for result in allocation.devices.results
        if not result.admin_access
    )


def held_back(claim: ResourceClaim) -> bool:
    """Whether no pod can be bound with an allocation yet, by its binding conditions."""
    allocation = claim.status.allocation
    needed = {
        one
        for result in (allocation.devices.results if allocation else ())
        for one in result.binding_conditions
    }
    met = {
        one.type
        for device in claim.status.devices
        for one in device.conditions
        if one.status == "True"
    }
    return not needed <= met


def user_label(claim: ResourceClaim) -> dict[str, str]:
    """A label with the pod of a claim, if the claim names it."""
    owners = [owner.name for owner in claim.metadata.owner_references if owner.kind == "Pod"]
    names = owners or [user.name for user in claim.status.reserved_for if user.resource == "pods"]
    return {"pod": names[0]} if names else {}
