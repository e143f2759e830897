"""The objects of the Kubernetes API, with the fields that the controller reads.

A cluster of a thousand nodes publishes hundreds of thousands of devices, so objects are decoded
directly into these structures, not through dictionaries. Imports `journal` and `core` only.
"""

from __future__ import annotations

from slicewise.kubernetes.api.batch import Job
from slicewise.kubernetes.api.common import (
    Condition,
    LabelSelector,
    ListMeta,
    ListOf,
    Meta,
    NodeSelector,
    NodeTerm,
    Requirement,
    Status,
    WatchEvent,
)
from slicewise.kubernetes.api.core import (
    Container,
    KubeletEvent,
    Lease,
    Namespace,
    Node,
    Pod,
    PodDisruptionBudget,
    Taint,
    Toleration,
)
from slicewise.kubernetes.api.resource import (
    Configuration,
    Counter,
    CounterSet,
    Device,
    DeviceClass,
    DeviceRequest,
    DeviceTaint,
    DeviceTaintRule,
    DeviceToleration,
    Pool,
    ResourceClaim,
    ResourceSlice,
)
from slicewise.kubernetes.api.storage import (
    PersistentVolume,
    PersistentVolumeClaim,
    StorageClass,
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
    "DeviceTaint",
    "DeviceTaintRule",
    "DeviceToleration",
    "Job",
    "KubeletEvent",
    "LabelSelector",
    "Lease",
    "ListMeta",
    "ListOf",
    "Meta",
    "Namespace",
    "Node",
    "NodeSelector",
    "NodeTerm",
    "PersistentVolume",
    "PersistentVolumeClaim",
    "Pod",
    "PodDisruptionBudget",
    "Pool",
    "Requirement",
    "ResourceClaim",
    "ResourceSlice",
    "Status",
    "StorageClass",
    "Taint",
    "Toleration",
    "WatchEvent",
]
