"""The objects of the Kubernetes API, with the fields that the controller reads.

A cluster of a thousand nodes publishes hundreds of thousands of devices, so objects are decoded
directly into these structures, not through dictionaries.
"""

from __future__ import annotations

from slicewise.kubernetes.api.common import (
    Condition,
    ListMeta,
    ListOf,
    Meta,
    NodeSelector,
    NodeTerm,
    Requirement,
    Status,
    WatchEvent,
)
from slicewise.kubernetes.api.core import Container, Lease, Namespace, Node, Pod, Taint, Toleration
from slicewise.kubernetes.api.resource import (
    Configuration,
    Counter,
    CounterSet,
    Device,
    DeviceClass,
    DeviceRequest,
    Pool,
    ResourceClaim,
    ResourceSlice,
)

__all__ = [
    "Condition",
    "Configuration",
    "Container",
    "Counter",
    "CounterSet",
    "Device",
    "DeviceClass",
    "DeviceRequest",
    "Lease",
    "ListMeta",
    "ListOf",
    "Meta",
    "Namespace",
    "Node",
    "NodeSelector",
    "NodeTerm",
    "Pod",
    "Pool",
    "Requirement",
    "ResourceClaim",
    "ResourceSlice",
    "Status",
    "Taint",
    "Toleration",
    "WatchEvent",
]
