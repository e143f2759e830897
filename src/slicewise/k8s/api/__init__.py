"""The objects of the Kubernetes API, as far as they are read: fields that nobody uses are skipped.

A cluster of a thousand nodes publishes hundreds of thousands of devices, so objects are decoded
straight into these structures, without going through dictionaries.
"""

from __future__ import annotations

from slicewise.k8s.api.claims import Configuration, DeviceClass, DeviceRequest, ResourceClaim
from slicewise.k8s.api.common import (
    Condition,
    Happening,
    ListMeta,
    ListOf,
    Meta,
    NodeSelector,
    NodeTerm,
    Requirement,
    Status,
)
from slicewise.k8s.api.core import Container, Lease, Namespace, Node, Pod, Taint, Toleration
from slicewise.k8s.api.devices import Counter, CounterSet, Device, Pool, ResourceSlice

__all__ = [
    "Condition",
    "Configuration",
    "Container",
    "Counter",
    "CounterSet",
    "Device",
    "DeviceClass",
    "DeviceRequest",
    "Happening",
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
]
