"""The pods that wait for devices from slicewise, and their claims.

A pod refers to claims by name, or to templates from which Kubernetes creates claims. Several pods
may share a claim. A pod is pending when all its claims exist and at least one of ours has no
devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from slicewise.core.request import Request
from slicewise.kubernetes.api import DeviceClass, DeviceToleration, NodeSelector, Pod, ResourceClaim
from slicewise.kubernetes.claim_parameters import ClaimParameters, read_parameters

POD_CLAIM_NAME = "resource.kubernetes.io/pod-claim-name"
"""The annotation of a claim that was created from a template: its name in the pod."""


GANG, SIZE = "slicewise.dev/gang", "slicewise.dev/gang-size"
"""The annotations of pods that get their devices together: see `gangs`."""


@dataclass(frozen=True, slots=True)
class PendingPod:
    """A pod, and its claims that need devices."""

    key: str
    pod: Pod
    claims: tuple[tuple[ResourceClaim, ClaimParameters], ...]
    pinned: tuple[NodeSelector, ...]
    """The nodes of its allocated claims."""

    @property
    def requests(self) -> list[Request]:
        """The requested devices of all claims, in order."""
        return [device.want for _, asked in self.claims for device in asked.devices]

    @property
    def tolerations(self) -> frozenset[tuple[DeviceToleration, ...]]:
        """The tolerations of device taints of each requested device."""
        return frozenset(device.tolerations for _, asked in self.claims for device in asked.devices)

    @property
    def problem(self) -> str:
        """Why one of the claims is invalid; empty if all are valid."""
        for claim, asked in self.claims:
            if asked.problem:
                return f"claim {claim.metadata.name!r}: {asked.problem}"
        return ""


class PendingClaims:
    """Pods, claims and classes by name, and the pods of each claim."""

    def __init__(self) -> None:
        self.pods: dict[str, Pod] = {}
        """Pods that have claims and have not ended."""
        self.claims: dict[str, ResourceClaim] = {}
        self.classes: dict[str, DeviceClass] = {}
        self.gangs: dict[str, dict[str, Pod]] = {}
        """By namespace and gang: its pods, also those that have ended well."""
        self.changed_gangs: set[str] = set()
        self._gang_of: dict[str, str] = {}
        self._users: defaultdict[str, dict[str, None]] = defaultdict(dict)
        """By claim: the pods that refer to it, in order of arrival."""

    def set_pod(self, pod: Pod) -> None:
        """Add or update a pod; one that has ended is removed."""
        key = pod.metadata.key
        self.drop_pod(key)
        self._set_gang(pod)
        if pod.spec.resource_claims and not pod.over:
            self.pods[key] = pod
            for claim in claim_keys(pod):
                if claim is not None:
                    self._users[claim][key] = None

    def drop_pod(self, key: str) -> Pod | None:
        """Remove a pod and return it."""
        pod = self.pods.pop(key, None)
        gang = self._gang_of.pop(key, None)
        if gang is not None:
            self.changed_gangs.add(gang)
            del self.gangs[gang][key]
            if not self.gangs[gang]:
                del self.gangs[gang]
        if pod is not None:
            for claim in claim_keys(pod):
                if claim is not None:
                    self._users[claim].pop(key, None)
                    if not self._users[claim]:
                        del self._users[claim]
        return pod

    @staticmethod
    def gang_key(pod: Pod) -> str | None:
        """The gang of a pod, with its namespace; None if it has none."""
        name = pod.metadata.annotations.get(GANG)
        return None if name is None else f"{pod.metadata.namespace}/{name}"

    def _set_gang(self, pod: Pod) -> None:
        gang = self.gang_key(pod) if pod.spec.resource_claims else None
        if gang is not None and pod.status.phase != "Failed":
            self.gangs.setdefault(gang, {})[pod.metadata.key] = pod
            self._gang_of[pod.metadata.key] = gang
            self.changed_gangs.add(gang)

    def users(self, claim: str) -> tuple[str, ...]:
        """The pods that refer to a claim."""
        return tuple(self._users.get(claim, ()))

    def pending_pod(self, key: str) -> PendingPod | None:
        """A pod that waits for devices; None if it needs none, or cannot be placed yet."""
        pod = self.pods.get(key)
        if (
            pod is None
            or pod.spec.node_name
            or pod.spec.scheduling_gates
            or pod.metadata.deletion_timestamp
        ):
            return None
        wanted: list[tuple[ResourceClaim, ClaimParameters]] = []
        pinned: list[NodeSelector] = []
        for name in claim_keys(pod):
            claim = None if name is None else self.claims.get(name)
            if claim is None or claim.metadata.deletion_timestamp:
                return None  # not created yet, or being deleted
            if claim.status.allocation is not None:
                if claim.status.allocation.node_selector is not None:
                    pinned.append(claim.status.allocation.node_selector)
                continue
            if _belongs_to_another(claim, pod):
                return None
            asked = read_parameters(claim, self.classes)
            if asked is not None:
                wanted.append((claim, asked))
        return PendingPod(key, pod, tuple(wanted), tuple(pinned)) if wanted else None

    def unrecorded_claims(self, pod: Pod) -> dict[str, str]:
        """All template claims of a pod, if its status names some of them and all exist.

        kube-controller-manager 1.36.4 may record the claims of a pod in turns and drop the others
        each time, for ever: https://github.com/kubernetes/kubernetes/issues/138407.
        """
        recorded = {one.name: one.resource_claim_name for one in pod.status.resource_claim_statuses}
        templates = {one.name for one in pod.spec.resource_claims if not one.resource_claim_name}
        missing = templates - recorded.keys()
        if not recorded or not missing:
            return {}
        owned = {
            claim.metadata.annotations.get(POD_CLAIM_NAME): claim.metadata.name
            for claim in self.claims.values()
            if not claim.metadata.deletion_timestamp and owning_pod(claim) == pod.metadata.uid
        }
        if not missing <= owned.keys():
            return {}
        return {name: claim for name, claim in recorded.items() if claim} | {
            name: owned[name] for name in sorted(missing)
        }

    def claims_of(self, pod: Pod) -> Iterator[ResourceClaim]:
        """The claims of a pod that exist."""
        for name in claim_keys(pod):
            if name is not None and name in self.claims:
                yield self.claims[name]

    def node(self, key: str) -> str | None:
        """The node of the devices that a pod has; None if it has none."""
        for claim in self.claims_of(self.pods[key]):
            if claim.status.allocation is not None:
                node = single_node(claim.status.allocation.node_selector)
                if node is not None:
                    return node
        return None

    def is_ours(self, claim: ResourceClaim) -> bool:
        """Whether slicewise allocates a claim."""
        return read_parameters(claim, self.classes) is not None


def single_node(selector: NodeSelector | None) -> str | None:
    """The node that a selector requires by name; None if there is no such node."""
    if selector is None or len(selector.node_selector_terms) != 1:
        return None
    for one in selector.node_selector_terms[0].match_fields:
        if one.key == "metadata.name" and one.operator == "In" and len(one.values) == 1:
            return one.values[0]
    return None


def claim_keys(pod: Pod) -> list[str | None]:
    """The claims of a pod; None for a claim that is not created from its template yet."""
    created: Mapping[str, str | None] = {
        status.name: status.resource_claim_name for status in pod.status.resource_claim_statuses
    }
    keys: list[str | None] = []
    for reference in pod.spec.resource_claims:
        name = reference.resource_claim_name
        if name is None:
            if reference.name in created and created[reference.name] is None:
                continue  # no claim is needed
            name = created.get(reference.name)
        keys.append(None if name is None else f"{pod.metadata.namespace}/{name}")
    return keys


def _belongs_to_another(claim: ResourceClaim, pod: Pod) -> bool:
    """Whether a claim was created for a deleted pod of the same name."""
    return owning_pod(claim) not in (None, pod.metadata.uid)


def owning_pod(claim: ResourceClaim) -> str | None:
    """The uid of the pod for which a claim was created from a template."""
    owners = [owner for owner in claim.metadata.owner_references if owner.controller]
    return owners[0].uid if owners and owners[0].kind == "Pod" else None
