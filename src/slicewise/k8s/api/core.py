"""Nodes, namespaces and pods, and the lease of the leader."""

from __future__ import annotations

import msgspec

from slicewise.k8s.api.common import ApiObject, Condition, Meta, NodeSelector

# Nodes and namespaces


class Taint(ApiObject, frozen=True):
    """Keeps pods away that do not tolerate it."""

    key: str
    effect: str
    value: str = ""


class NodeSpec(ApiObject, frozen=True):
    """What was set on a node."""

    unschedulable: bool = False
    taints: tuple[Taint, ...] = ()


class NodeStatus(ApiObject, frozen=True):
    """What a node has."""

    allocatable: dict[str, str] = msgspec.field(default_factory=dict)


class Node(ApiObject, frozen=True):
    """A machine."""

    metadata: Meta
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


class Namespace(ApiObject, frozen=True):
    """A tenant."""

    metadata: Meta


# Pods


class Resources(ApiObject, frozen=True):
    """What a container asks for."""

    requests: dict[str, str] = msgspec.field(default_factory=dict)


class Container(ApiObject, frozen=True):
    """A container of a pod."""

    name: str = ""
    resources: Resources = Resources()
    restart_policy: str | None = None


class PodClaim(ApiObject, frozen=True):
    """A claim of a pod: one that exists, or one to be made from a template."""

    name: str
    resource_claim_name: str | None = None


class Toleration(ApiObject, frozen=True):
    """A taint that a pod does not mind."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""


class NodeAffinity(ApiObject, frozen=True):
    """On which nodes a pod may be."""

    required: NodeSelector | None = msgspec.field(
        default=None, name="requiredDuringSchedulingIgnoredDuringExecution"
    )


class Affinity(ApiObject, frozen=True):
    """Where a pod wants to be."""

    node_affinity: NodeAffinity | None = None


class Gate(ApiObject, frozen=True):
    """Something that must happen before a pod is scheduled."""

    name: str


class PodSpec(ApiObject, frozen=True):
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


class PodClaimStatus(ApiObject, frozen=True):
    """The claim that was made for a pod from a template."""

    name: str
    resource_claim_name: str | None = None


class PodStatus(ApiObject, frozen=True):
    """How a pod fares."""

    phase: str = "Pending"
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
        """Whether it has ended, or is about to: it needs nothing any more."""
        return self.status.phase in ("Succeeded", "Failed")


# Leadership


class LeaseSpec(ApiObject, frozen=True):
    """Who leads and until when."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    lease_transitions: int | None = None


class Lease(ApiObject, frozen=True):
    """The lease of the leader."""

    metadata: Meta
    spec: LeaseSpec = LeaseSpec()
