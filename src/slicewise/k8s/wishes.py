"""Wishes: which pods want devices from slicewise, through which claims.

A pod names claims, or templates from which claims are made for it. A claim may be shared by
several pods. A pod has a wish when everything it needs is there except devices that slicewise
gives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from slicewise.core.request import Request
from slicewise.k8s.api import DeviceClass, NodeSelector, Pod, ResourceClaim
from slicewise.k8s.asks import Ask, read_ask


@dataclass(frozen=True, slots=True)
class Wish:
    """What a pod wants: devices for these claims, on a node that its other claims allow."""

    pod: Pod
    claims: tuple[tuple[ResourceClaim, Ask], ...]
    pinned: tuple[NodeSelector, ...]

    @property
    def requests(self) -> list[Request]:
        """All devices, claim by claim."""
        return [asked.want for _, ask in self.claims for asked in ask.devices]

    @property
    def problem(self) -> str:
        """What is wrong with one of the claims, if anything."""
        for claim, ask in self.claims:
            if ask.problem:
                return f"claim {claim.metadata.name!r}: {ask.problem}"
        return ""


class Wishes:
    """Pods and claims by name, and who needs whom."""

    def __init__(self) -> None:
        self.pods: dict[str, Pod] = {}
        """Those with claims that are not over."""
        self.claims: dict[str, ResourceClaim] = {}
        self.classes: dict[str, DeviceClass] = {}
        self._users: defaultdict[str, dict[str, None]] = defaultdict(dict)
        """By claim: the pods that name it, in the order in which they were heard of."""

    def set_pod(self, pod: Pod) -> None:
        """A pod is like this now."""
        key = pod.metadata.key
        self.drop_pod(key)
        if pod.spec.resource_claims and not pod.over:
            self.pods[key] = pod
            for claim in claim_keys(pod):
                if claim is not None:
                    self._users[claim][key] = None

    def drop_pod(self, key: str) -> Pod | None:
        """A pod is gone."""
        pod = self.pods.pop(key, None)
        if pod is not None:
            for claim in claim_keys(pod):
                if claim is not None:
                    self._users[claim].pop(key, None)
                    if not self._users[claim]:
                        del self._users[claim]
        return pod

    def users(self, claim: str) -> tuple[str, ...]:
        """The pods that name a claim."""
        return tuple(self._users.get(claim, ()))

    def wish(self, key: str) -> Wish | None:
        """What a pod wants from slicewise now; None if nothing, or if it cannot be given yet."""
        pod = self.pods.get(key)
        if (
            pod is None
            or pod.spec.node_name
            or pod.spec.scheduling_gates
            or pod.metadata.deletion_timestamp
        ):
            return None
        wanted: list[tuple[ResourceClaim, Ask]] = []
        pinned: list[NodeSelector] = []
        for name in claim_keys(pod):
            claim = None if name is None else self.claims.get(name)
            if claim is None or claim.metadata.deletion_timestamp:
                return None  # it has yet to be made
            if claim.status.allocation is not None:
                if claim.status.allocation.node_selector is not None:
                    pinned.append(claim.status.allocation.node_selector)
                continue
            if _made_for_another(claim, pod):
                return None
            ask = read_ask(claim, self.classes)
            if ask is not None:
                wanted.append((claim, ask))
        return Wish(pod, tuple(wanted), tuple(pinned)) if wanted else None

    def claims_of(self, pod: Pod) -> Iterator[ResourceClaim]:
        """The claims of a pod that are there."""
        for name in claim_keys(pod):
            if name is not None and name in self.claims:
                yield self.claims[name]

    def node(self, key: str) -> str | None:
        """The node on which a pod has been given devices."""
        for claim in self.claims_of(self.pods[key]):
            if claim.status.allocation is not None:
                node = single_node(claim.status.allocation.node_selector)
                if node is not None:
                    return node
        return None

    def is_ours(self, claim: ResourceClaim) -> bool:
        """Whether slicewise gives a claim its devices."""
        return read_ask(claim, self.classes) is not None


def single_node(selector: NodeSelector | None) -> str | None:
    """The node that a selector names, if it names one."""
    if selector is None or len(selector.node_selector_terms) != 1:
        return None
    for one in selector.node_selector_terms[0].match_fields:
        if one.key == "metadata.name" and one.operator == "In" and len(one.values) == 1:
            return one.values[0]
    return None


def claim_keys(pod: Pod) -> list[str | None]:
    """The claims of a pod; None for one that has yet to be made from its template."""
    made: Mapping[str, str | None] = {
        status.name: status.resource_claim_name for status in pod.status.resource_claim_statuses
    }
    keys: list[str | None] = []
    for reference in pod.spec.resource_claims:
        name = reference.resource_claim_name
        if name is None:
            if reference.name in made and made[reference.name] is None:
                continue  # the template asked for nothing
            name = made.get(reference.name)
        keys.append(None if name is None else f"{pod.metadata.namespace}/{name}")
    return keys


def _made_for_another(claim: ResourceClaim, pod: Pod) -> bool:
    """Whether a claim was made from a template for a pod of the same name that is gone."""
    owners = [owner for owner in claim.metadata.owner_references if owner.controller]
    return bool(owners) and owners[0].kind == "Pod" and owners[0].uid != pod.metadata.uid
