"""Nodes, namespaces, pods and leases."""

from __future__ import annotations

import msgspec

from slicewise.kubernetes.api.common import (
    ApiObject,
    Condition,
    LabelSelector,
    Meta,
    NodeSelector,
)

# Nodes and namespaces


class Taint(ApiObject, frozen=True):
    """A taint: keeps away pods that do not tolerate it."""

    key: str
    effect: str
    value: str = ""


class NodeSpec(ApiObject, frozen=True):
    """The spec of a node."""

    unschedulable: bool = False
    taints: tuple[Taint, ...] = ()


class NodeInfo(ApiObject, frozen=True):
    """What the kubelet says of its machine."""

    boot_id: str = msgspec.field(default="", name="bootID")


class NodeStatus(ApiObject, frozen=True):
    """The status of a node."""

    node_info: NodeInfo = NodeInfo()
    allocatable: dict[str, str] = msgspec.field(default_factory=dict)


class Node(ApiObject, frozen=True):
    """A node."""

    metadata: Meta
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


class Namespace(ApiObject, frozen=True):
    """A namespace; a tenant in the cache."""

    metadata: Meta


# Pods


class Resources(ApiObject, frozen=True):
    """Requested resources."""

    requests: dict[str, str] = msgspec.field(default_factory=dict)


class Container(ApiObject, frozen=True):
    """A container of a pod."""

    name: str = ""
    resources: Resources = Resources()
    restart_policy: str | None = None


class PodClaim(ApiObject, frozen=True):
    """A reference to a claim: by name, or by the template that it is created from."""

    name: str
    resource_claim_name: str | None = None
    resource_claim_template_name: str | None = None


class Toleration(ApiObject, frozen=True):
    """A toleration of taints."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""


class NodeAffinity(ApiObject, frozen=True):
    """The required node affinity of a pod."""

    required: NodeSelector | None = msgspec.field(
        default=None, name="requiredDuringSchedulingIgnoredDuringExecution"
    )


class Affinity(ApiObject, frozen=True):
    """The affinity of a pod."""

    node_affinity: NodeAffinity | None = None


class Gate(ApiObject, frozen=True):
    """A scheduling gate."""

    name: str


class VolumeClaimSource(ApiObject, frozen=True):
    """A claim on a volume, by name."""

    claim_name: str = ""


class EphemeralSource(ApiObject, frozen=True):
    """A volume of a claim that is created with the pod."""


class PodVolume(ApiObject, frozen=True):
    """A volume of a pod, if it has a claim."""

    name: str = ""
    persistent_volume_claim: VolumeClaimSource | None = None
    ephemeral: EphemeralSource | None = None


class PodSpec(ApiObject, frozen=True):
    """The spec of a pod."""

    node_name: str = ""
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    overhead: dict[str, str] = msgspec.field(default_factory=dict)
    resources: Resources | None = None
    node_selector: dict[str, str] = msgspec.field(default_factory=dict)
    affinity: Affinity | None = None
    tolerations: tuple[Toleration, ...] = ()
    resource_claims: tuple[PodClaim, ...] = ()
    volumes: tuple[PodVolume, ...] = ()
    scheduling_gates: tuple[Gate, ...] = ()
    priority: int = 0
    priority_class_name: str = ""
    preemption_policy: str = ""
    active_deadline_seconds: int | None = None
    termination_grace_period_seconds: int | None = None


class PodClaimStatus(ApiObject, frozen=True):
    """The claim that was created for a pod from a template; None if none was needed."""

    name: str
    resource_claim_name: str | None = None


class PodStatus(ApiObject, frozen=True):
    """The status of a pod."""

    phase: str = "Pending"
    start_time: str | None = None
    conditions: tuple[Condition, ...] = ()
    nominated_node_name: str = ""
    resource_claim_statuses: tuple[PodClaimStatus, ...] = ()


class Pod(ApiObject, frozen=True):
    """A pod."""

    metadata: Meta
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def over(self) -> bool:
        """Whether the pod has ended and needs no resources."""
        return self.status.phase in ("Succeeded", "Failed")


# Disruptions


class BudgetSpec(ApiObject, frozen=True):
    """The pods of a budget; without a selector there are none."""

    selector: LabelSelector | None = None


class BudgetStatus(ApiObject, frozen=True):
    """How many more pods may be disrupted now."""

    disruptions_allowed: int = 0


class PodDisruptionBudget(ApiObject, frozen=True):
    """A limit on the pods that are disrupted at a time."""

    metadata: Meta
    spec: BudgetSpec = BudgetSpec()
    status: BudgetStatus = BudgetStatus()


# Events


class ObjectReference(ApiObject, frozen=True):
    """The object that an event is about."""

    name: str = ""
    namespace: str = ""
    uid: str = ""


class KubeletEvent(ApiObject, frozen=True):
    """An event of a kubelet, about a pod or its node."""

    metadata: Meta
    involved_object: ObjectReference = ObjectReference()
    reason: str = ""
    message: str = ""
    last_timestamp: str | None = None


# Leases


class LeaseSpec(ApiObject, frozen=True):
    """The holder and the duration of a lease."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    lease_transitions: int | None = None


class Lease(ApiObject, frozen=True):
    """A lease."""

    metadata: Meta
    spec: LeaseSpec = LeaseSpec()
