"""What drivers publish: the devices of a GPU, and what they share."""

from __future__ import annotations

import msgspec

from slicewise.k8s.api.common import ApiObject, Meta


class Counter(ApiObject, frozen=True):
    """An amount, as the API writes it."""

    value: str


class Capacity(ApiObject, frozen=True):
    """An amount that a device has."""

    value: str


class CounterSet(ApiObject, frozen=True):
    """What the devices of one GPU share, and how much of each there is."""

    name: str
    counters: dict[str, Counter]


class Consumption(ApiObject, frozen=True):
    """What a device takes of a counter set while it is allocated."""

    counter_set: str
    counters: dict[str, Counter] = msgspec.field(default_factory=dict)


class Attribute(ApiObject, frozen=True):
    """A property of a device."""

    string: str | None = None


class DeviceTaint(ApiObject, frozen=True):
    """Keeps claims away that do not tolerate it."""

    key: str
    effect: str
    value: str = ""


class Device(ApiObject, frozen=True):
    """A device that can be allocated."""

    name: str
    attributes: dict[str, Attribute] = msgspec.field(default_factory=dict)
    capacity: dict[str, Capacity] = msgspec.field(default_factory=dict)
    consumes_counters: tuple[Consumption, ...] = ()
    taints: tuple[DeviceTaint, ...] = ()
    node_name: str = ""
    """Where its slice says of each device by itself where it is."""
    binding_conditions: tuple[str, ...] = ()
    allow_multiple_allocations: bool = False


class Pool(ApiObject, frozen=True):
    """The pool that a slice is part of; its other slices are needed to know it."""

    name: str
    generation: int = 0
    resource_slice_count: int = 1


class SliceSpec(ApiObject, frozen=True):
    """What a driver publishes about a node."""

    driver: str
    pool: Pool
    node_name: str = ""
    shared_counters: tuple[CounterSet, ...] = ()
    devices: tuple[Device, ...] = ()


class ResourceSlice(ApiObject, frozen=True):
    """Devices, or counters, of a pool."""

    metadata: Meta
    spec: SliceSpec
