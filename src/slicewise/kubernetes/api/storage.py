"""PersistentVolumes, their claims, and StorageClasses."""

from __future__ import annotations

import msgspec

from slicewise.kubernetes.api.common import ApiObject, LabelSelector, Meta, NodeSelector


class ClaimReference(ApiObject, frozen=True):
    """The claim that a volume is bound to or kept for."""

    name: str = ""
    namespace: str = ""
    uid: str = ""

    @property
    def key(self) -> str:
        """Namespace and name of the claim."""
        return f"{self.namespace}/{self.name}"


class VolumeNodeAffinity(ApiObject, frozen=True):
    """The nodes that can reach a volume."""

    required: NodeSelector | None = None


class VolumeSpec(ApiObject, frozen=True):
    """The spec of a volume."""

    capacity: dict[str, str] = msgspec.field(default_factory=dict)
    access_modes: tuple[str, ...] = ()
    storage_class_name: str = ""
    volume_mode: str = "Filesystem"
    node_affinity: VolumeNodeAffinity | None = None
    claim_ref: ClaimReference | None = None


class VolumeStatus(ApiObject, frozen=True):
    """The status of a volume."""

    phase: str = ""


class PersistentVolume(ApiObject, frozen=True):
    """A volume."""

    metadata: Meta
    spec: VolumeSpec = VolumeSpec()
    status: VolumeStatus = VolumeStatus()


class StorageRequests(ApiObject, frozen=True):
    """The requested size."""

    requests: dict[str, str] = msgspec.field(default_factory=dict)


class VolumeClaimSpec(ApiObject, frozen=True):
    """The spec of a claim on a volume."""

    volume_name: str = ""
    storage_class_name: str | None = None
    volume_mode: str = "Filesystem"
    access_modes: tuple[str, ...] = ()
    resources: StorageRequests = StorageRequests()
    selector: LabelSelector | None = None


class PersistentVolumeClaim(ApiObject, frozen=True):
    """A claim on a volume."""

    metadata: Meta
    spec: VolumeClaimSpec = VolumeClaimSpec()


class TopologyLabel(ApiObject, frozen=True):
    """The allowed values of a node's label."""

    key: str
    values: tuple[str, ...] = ()


class TopologyTerm(ApiObject, frozen=True):
    """Labels that must all have an allowed value."""

    match_label_expressions: tuple[TopologyLabel, ...] = ()


class StorageClass(ApiObject, frozen=True):
    """A class of volumes."""

    metadata: Meta
    provisioner: str = ""
    volume_binding_mode: str = "Immediate"
    allowed_topologies: tuple[TopologyTerm, ...] = ()
