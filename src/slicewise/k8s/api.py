"""The objects of the Kubernetes API, as far as they are read: fields that nobody uses are skipped.

A cluster of a thousand nodes publishes hundreds of thousands of devices, so objects are decoded
straight into these structures, without going through dictionaries.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec


class _Object(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """What all of them are: immutable, with the API's own names on the wire."""


class OwnerReference(_Object, frozen=True):
    """Whom an object belongs to."""

    kind: str
    name: str
    uid: str
    controller: bool = False


class Meta(_Object, frozen=True):
    """What every object has."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    annotations: dict[str, str] = msgspec.field(default_factory=dict)
    finalizers: tuple[str, ...] = ()
    owner_references: tuple[OwnerReference, ...] = ()

    @property
    def key(self) -> str:
        """Its name among all of its kind."""
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


# Selecting nodes


class Requirement(_Object, frozen=True):
    """One condition on labels or fields."""

    key: str
    operator: str
    values: tuple[str, ...] = ()


class NodeTerm(_Object, frozen=True):
    """Conditions that must all hold."""

    match_expressions: tuple[Requirement, ...] = ()
    match_fields: tuple[Requirement, ...] = ()


class NodeSelector(_Object, frozen=True):
    """Terms of which one must hold."""

    node_selector_terms: tuple[NodeTerm, ...] = ()


# Nodes and namespaces


class Taint(_Object, frozen=True):
    """Keeps pods away that do not tolerate it."""

    key: str
    effect: str
    value: str = ""


class NodeSpec(_Object, frozen=True):
    """What was set on a node."""

    unschedulable: bool = False
    taints: tuple[Taint, ...] = ()


class NodeStatus(_Object, frozen=True):
    """What a node has."""

    allocatable: dict[str, str] = msgspec.field(default_factory=dict)


class Node(_Object, frozen=True):
    """A machine."""

    metadata: Meta
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


class Namespace(_Object, frozen=True):
    """A tenant."""

    metadata: Meta


# Pods


class Resources(_Object, frozen=True):
    """What a container asks for."""

    requests: dict[str, str] = msgspec.field(default_factory=dict)
    limits: dict[str, str] = msgspec.field(default_factory=dict)


class Container(_Object, frozen=True):
    """A container of a pod."""

    name: str = ""
    resources: Resources = Resources()
    restart_policy: str | None = None


class PodClaim(_Object, frozen=True):
    """A claim of a pod: one that exists, or one to be made from a template."""

    name: str
    resource_claim_name: str | None = None
    resource_claim_template_name: str | None = None


class Toleration(_Object, frozen=True):
    """A taint that a pod does not mind."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""


class NodeAffinity(_Object, frozen=True):
    """On which nodes a pod may be."""

    required: NodeSelector | None = msgspec.field(
        default=None, name="requiredDuringSchedulingIgnoredDuringExecution"
    )


class Affinity(_Object, frozen=True):
    """Where a pod wants to be."""

    node_affinity: NodeAffinity | None = None


class Gate(_Object, frozen=True):
    """Something that must happen before a pod is scheduled."""

    name: str


class PodSpec(_Object, frozen=True):
    """What a pod asks for."""

    node_name: str = ""
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    overhead: dict[str, str] = msgspec.field(default_factory=dict)
    resources: Resources | None = None
    node_selector: dict[str, str] = msgspec.field(default_factory=dict)
    affinity: Affinity | None = None
    tolerations: tuple[Toleration, ...] = ()
    resource_claims: tuple[PodClaim, ...] = ()
    scheduling_gates: tuple[Gate, ...] = ()
    priority: int = 0
    priority_class_name: str = ""
    scheduler_name: str = "default-scheduler"


class Condition(_Object, frozen=True):
    """A condition of an object."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None


class PodClaimStatus(_Object, frozen=True):
    """The claim that was made for a pod from a template."""

    name: str
    resource_claim_name: str | None = None


class PodStatus(_Object, frozen=True):
    """How a pod fares."""

    phase: str = "Pending"
    conditions: tuple[Condition, ...] = ()
    nominated_node_name: str = ""
    resource_claim_statuses: tuple[PodClaimStatus, ...] = ()


class Pod(_Object, frozen=True):
    """A pod."""

    metadata: Meta
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def over(self) -> bool:
        """Whether it has ended, or is about to: it needs nothing any more."""
        return self.status.phase in ("Succeeded", "Failed")


# Devices


class Counter(_Object, frozen=True):
    """An amount, as the API writes it."""

    value: str


class Capacity(_Object, frozen=True):
    """An amount that a device has."""

    value: str


class CounterSet(_Object, frozen=True):
    """What the devices of one GPU share, and how much of each there is."""

    name: str
    counters: dict[str, Counter]


class Consumption(_Object, frozen=True):
    """What a device takes of a counter set while it is allocated."""

    counter_set: str
    counters: dict[str, Counter] = msgspec.field(default_factory=dict)


class Attribute(_Object, frozen=True):
    """A property of a device."""

    string: str | None = None
    int_: int | None = msgspec.field(default=None, name="int")
    bool_: bool | None = msgspec.field(default=None, name="bool")
    version: str | None = None


class DeviceTaint(_Object, frozen=True):
    """Keeps claims away that do not tolerate it."""

    key: str
    effect: str
    value: str = ""


class Device(_Object, frozen=True):
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


class Pool(_Object, frozen=True):
    """The pool that a slice is part of; its other slices are needed to know it."""

    name: str
    generation: int = 0
    resource_slice_count: int = 1


class SliceSpec(_Object, frozen=True):
    """What a driver publishes about a node."""

    driver: str
    pool: Pool
    node_name: str = ""
    shared_counters: tuple[CounterSet, ...] = ()
    devices: tuple[Device, ...] = ()


class ResourceSlice(_Object, frozen=True):
    """Devices, or counters, of a pool."""

    metadata: Meta
    spec: SliceSpec


class CelSelector(_Object, frozen=True):
    """An expression that a device must meet."""

    expression: str


class Selector(_Object, frozen=True):
    """What a device must meet."""

    cel: CelSelector | None = None


class Opaque(_Object, frozen=True):
    """Parameters for a driver."""

    driver: str
    parameters: Any = None


class Configuration(_Object, frozen=True):
    """Parameters of a class or a claim, for these requests or for all."""

    opaque: Opaque | None = None
    requests: tuple[str, ...] = ()


class ClassSpec(_Object, frozen=True):
    """What a class asks of devices."""

    selectors: tuple[Selector, ...] = ()
    config: tuple[Configuration, ...] = ()


class DeviceClass(_Object, frozen=True):
    """A kind of devices that claims name."""

    metadata: Meta
    spec: ClassSpec = ClassSpec()


# Claims


class Exactly(_Object, frozen=True):
    """Devices of one class, so many of them."""

    device_class_name: str
    selectors: tuple[Selector, ...] = ()
    allocation_mode: str = "ExactCount"
    count: int = 1
    admin_access: bool = False
    tolerations: tuple[Any, ...] = ()
    capacity: Any = None


class DeviceRequest(_Object, frozen=True):
    """One request of a claim."""

    name: str
    exactly: Exactly | None = None
    first_available: tuple[Any, ...] = ()


class ClaimDevices(_Object, frozen=True):
    """What a claim asks for."""

    requests: tuple[DeviceRequest, ...] = ()
    constraints: tuple[Any, ...] = ()
    config: tuple[Configuration, ...] = ()


class ClaimSpec(_Object, frozen=True):
    """What a claim asks for; it never changes."""

    devices: ClaimDevices = ClaimDevices()


class Result(_Object, frozen=True):
    """A device that was given to a request."""

    request: str
    driver: str
    pool: str
    device: str
    admin_access: bool = False
    share_id: str | None = msgspec.field(default=None, name="shareID")
    binding_conditions: tuple[str, ...] = ()


class AllocatedDevices(_Object, frozen=True):
    """The devices of an allocation."""

    results: tuple[Result, ...] = ()


class Allocation(_Object, frozen=True):
    """What a claim was given."""

    devices: AllocatedDevices = AllocatedDevices()
    node_selector: NodeSelector | None = None
    allocation_timestamp: str | None = None


class Consumer(_Object, frozen=True):
    """Who may use a claim."""

    resource: str = ""
    name: str = ""
    uid: str = ""


class DeviceStatus(_Object, frozen=True):
    """How a device of an allocation fares."""

    driver: str
    pool: str
    device: str
    conditions: tuple[Condition, ...] = ()


class ClaimStatus(_Object, frozen=True):
    """What became of a claim."""

    allocation: Allocation | None = None
    reserved_for: tuple[Consumer, ...] = ()
    devices: tuple[DeviceStatus, ...] = ()


class ResourceClaim(_Object, frozen=True):
    """A claim on devices."""

    metadata: Meta
    spec: ClaimSpec = ClaimSpec()
    status: ClaimStatus = ClaimStatus()


# Leadership


class LeaseSpec(_Object, frozen=True):
    """Who leads and until when."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class Lease(_Object, frozen=True):
    """The lease of the leader."""

    metadata: Meta
    spec: LeaseSpec = LeaseSpec()


# Lists and watches

Item = TypeVar("Item")


class ListMeta(_Object, frozen=True):
    """Where a list stands."""

    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class ListOf(msgspec.Struct, Generic[Item], frozen=True):
    """A page of objects."""

    metadata: ListMeta
    items: list[Item] = []


class Happening(msgspec.Struct, frozen=True):
    """One line of a watch; the object is decoded once it is known what it is."""

    type: str
    object: msgspec.Raw


class Status(_Object, frozen=True):
    """What the API says when it refuses."""

    message: str = ""
    reason: str = ""
    code: int = 0
