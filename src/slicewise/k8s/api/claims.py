"""What pods ask for and are given: classes of devices, and claims on them."""

from __future__ import annotations

from typing import Any

import msgspec

from slicewise.k8s.api.common import ApiObject, Condition, Meta, NodeSelector

# Classes


class CelSelector(ApiObject, frozen=True):
    """An expression that a device must meet."""

    expression: str


class Selector(ApiObject, frozen=True):
    """What a device must meet."""

    cel: CelSelector | None = None


class Opaque(ApiObject, frozen=True):
    """Parameters for a driver."""

    driver: str
    parameters: Any = None


class Configuration(ApiObject, frozen=True):
    """Parameters of a class or a claim, for these requests or for all."""

    opaque: Opaque | None = None
    requests: tuple[str, ...] = ()


class ClassSpec(ApiObject, frozen=True):
    """What a class asks of devices."""

    selectors: tuple[Selector, ...] = ()
    config: tuple[Configuration, ...] = ()
    extended_resource_name: str | None = None


class DeviceClass(ApiObject, frozen=True):
    """A kind of devices that claims name."""

    metadata: Meta
    spec: ClassSpec = ClassSpec()


# Claims


class Exactly(ApiObject, frozen=True):
    """Devices of one class, so many of them."""

    device_class_name: str
    selectors: tuple[Selector, ...] = ()
    allocation_mode: str = "ExactCount"
    count: int = 1
    admin_access: bool = False
    capacity: Any = None


class DeviceRequest(ApiObject, frozen=True):
    """One request of a claim."""

    name: str
    exactly: Exactly | None = None


class ClaimDevices(ApiObject, frozen=True):
    """What a claim asks for."""

    requests: tuple[DeviceRequest, ...] = ()
    constraints: tuple[Any, ...] = ()
    config: tuple[Configuration, ...] = ()


class ClaimSpec(ApiObject, frozen=True):
    """What a claim asks for; it never changes."""

    devices: ClaimDevices = ClaimDevices()


# Allocations


class Result(ApiObject, frozen=True):
    """A device that was given to a request."""

    request: str
    driver: str
    pool: str
    device: str
    admin_access: bool = False
    share_id: str | None = msgspec.field(default=None, name="shareID")
    binding_conditions: tuple[str, ...] = ()


class AllocatedDevices(ApiObject, frozen=True):
    """The devices of an allocation."""

    results: tuple[Result, ...] = ()


class Allocation(ApiObject, frozen=True):
    """What a claim was given."""

    devices: AllocatedDevices = AllocatedDevices()
    node_selector: NodeSelector | None = None


class Consumer(ApiObject, frozen=True):
    """Who may use a claim."""

    resource: str = ""
    name: str = ""
    uid: str = ""


class DeviceStatus(ApiObject, frozen=True):
    """How a device of an allocation fares."""

    driver: str
    pool: str
    device: str
    conditions: tuple[Condition, ...] = ()


class ClaimStatus(ApiObject, frozen=True):
    """What became of a claim."""

    allocation: Allocation | None = None
    reserved_for: tuple[Consumer, ...] = ()
    devices: tuple[DeviceStatus, ...] = ()


class ResourceClaim(ApiObject, frozen=True):
    """A claim on devices."""

    metadata: Meta
    spec: ClaimSpec = ClaimSpec()
    status: ClaimStatus = ClaimStatus()
