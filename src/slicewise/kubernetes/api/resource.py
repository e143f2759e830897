"""Objects of resource.k8s.io: ResourceSlices, DeviceClasses and ResourceClaims."""

from __future__ import annotations

from typing import Any

import msgspec

from slicewise.kubernetes.api.common import ApiObject, Condition, Meta, NodeSelector

# ResourceSlices


class Counter(ApiObject, frozen=True):
    """A quantity of a counter."""

    value: str


class Capacity(ApiObject, frozen=True):
    """A quantity that a device has."""

    value: str


class CounterSet(ApiObject, frozen=True):
    """Counters that the devices of one GPU share."""

    name: str
    counters: dict[str, Counter]


class Consumption(ApiObject, frozen=True):
    """The quantities that an allocated device takes from a counter set."""

    counter_set: str
    counters: dict[str, Counter] = msgspec.field(default_factory=dict)


class Attribute(ApiObject, frozen=True):
    """A property of a device."""

    string: str | None = None


class DeviceTaint(ApiObject, frozen=True):
    """A taint: keeps away claims that do not tolerate it."""

    key: str
    effect: str
    value: str = ""


class DeviceToleration(ApiObject, frozen=True):
    """A toleration of device taints."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""
    toleration_seconds: int | None = None


class TaintedDevices(ApiObject, frozen=True):
    """The devices that a rule taints: all that match."""

    driver: str | None = None
    pool: str | None = None
    device: str | None = None


class TaintRuleSpec(ApiObject, frozen=True):
    """The spec of a rule; without a selector it taints nothing."""

    taint: DeviceTaint
    device_selector: TaintedDevices | None = None


class DeviceTaintRule(ApiObject, frozen=True):
    """A taint that an admin puts on devices."""

    metadata: Meta
    spec: TaintRuleSpec


class Device(ApiObject, frozen=True):
    """A device that can be allocated."""

    name: str
    attributes: dict[str, Attribute] = msgspec.field(default_factory=dict)
    capacity: dict[str, Capacity] = msgspec.field(default_factory=dict)
    consumes_counters: tuple[Consumption, ...] = ()
    taints: tuple[DeviceTaint, ...] = ()
    node_name: str = ""
    """Set if the slice names a node for each device."""
    binding_conditions: tuple[str, ...] = ()
    allow_multiple_allocations: bool = False


class Pool(ApiObject, frozen=True):
    """The pool of a slice; all its slices together describe the pool."""

    name: str
    generation: int = 0
    resource_slice_count: int = 1


class SliceSpec(ApiObject, frozen=True):
    """The devices or counters that a driver publishes."""

    driver: str
    pool: Pool
    node_name: str = ""
    shared_counters: tuple[CounterSet, ...] = ()
    devices: tuple[Device, ...] = ()


class ResourceSlice(ApiObject, frozen=True):
    """Devices or counters of a pool."""

    metadata: Meta
    spec: SliceSpec


# DeviceClasses


class CelSelector(ApiObject, frozen=True):
    """A CEL expression that a device must match."""

    expression: str


class Selector(ApiObject, frozen=True):
    """A condition on devices."""

    cel: CelSelector | None = None


class Opaque(ApiObject, frozen=True):
    """Parameters for a driver."""

    driver: str
    parameters: Any = None


class Configuration(ApiObject, frozen=True):
    """Parameters of a class or a claim, for the named requests or for all."""

    opaque: Opaque | None = None
    requests: tuple[str, ...] = ()


class ClassSpec(ApiObject, frozen=True):
    """The selectors and parameters of a class."""

    selectors: tuple[Selector, ...] = ()
    config: tuple[Configuration, ...] = ()
    extended_resource_name: str | None = None


class DeviceClass(ApiObject, frozen=True):
    """A class of devices."""

    metadata: Meta
    spec: ClassSpec = ClassSpec()


# ResourceClaims


class Exactly(ApiObject, frozen=True):
    """A request for a number of devices of one class."""

    device_class_name: str
    selectors: tuple[Selector, ...] = ()
    allocation_mode: str = "ExactCount"
    count: int = 1
    admin_access: bool = False
    tolerations: tuple[DeviceToleration, ...] = ()
    capacity: Any = None


class DeviceRequest(ApiObject, frozen=True):
    """One request of a claim."""

    name: str
    exactly: Exactly | None = None


class ClaimDevices(ApiObject, frozen=True):
    """The requests of a claim."""

    requests: tuple[DeviceRequest, ...] = ()
    constraints: tuple[Any, ...] = ()
    config: tuple[Configuration, ...] = ()


class ClaimSpec(ApiObject, frozen=True):
    """The spec of a claim; immutable."""

    devices: ClaimDevices = ClaimDevices()


# Allocations


class Result(ApiObject, frozen=True):
    """A device that is allocated to a request."""

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
    """The devices and the node of a claim."""

    devices: AllocatedDevices = AllocatedDevices()
    node_selector: NodeSelector | None = None


class Consumer(ApiObject, frozen=True):
    """A pod for which a claim is reserved."""

    resource: str = ""
    name: str = ""
    uid: str = ""


class DeviceStatus(ApiObject, frozen=True):
    """The conditions of an allocated device."""

    driver: str
    pool: str
    device: str
    conditions: tuple[Condition, ...] = ()


class ClaimStatus(ApiObject, frozen=True):
    """The status of a claim."""

    allocation: Allocation | None = None
    reserved_for: tuple[Consumer, ...] = ()
    devices: tuple[DeviceStatus, ...] = ()


class ResourceClaim(ApiObject, frozen=True):
    """A claim on devices."""

    metadata: Meta
    spec: ClaimSpec = ClaimSpec()
    status: ClaimStatus = ClaimStatus()
