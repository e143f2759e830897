"""Pods that have devices and are not bound yet: kube-scheduler may not be able to use the node."""

from __future__ import annotations

from collections.abc import Callable

from slicewise.kubernetes.api import Pod, ResourceClaim
from slicewise.kubernetes.backoff import NodeBackoff
from slicewise.kubernetes.node_resources import NodeResources
from slicewise.kubernetes.pending_claims import PendingClaims, single_node
from slicewise.kubernetes.stats import Stats

STUCK_SECONDS = 15.0
"""How long a pod keeps devices after kube-scheduler has reported that it cannot bind the pod."""


class UnboundPods:
    """Reserves node resources for these pods, and finds those that are stuck."""

    def __init__(
        self,
        pending: PendingClaims,
        node_resources: NodeResources,
        backoff: NodeBackoff,
        stats: Stats,
        clock: Callable[[], float],
        requeue: Callable[[str], None],
    ) -> None:
        self._pending = pending
        self._node_resources = node_resources
        self._backoff = backoff
        self._stats = stats
        self._clock = clock
        self._requeue = requeue
        self._said: dict[str, str] = {}
        """By pod that was given devices: what kube-scheduler had reported about it before."""
        self._stuck: dict[str, float] = {}
        """By pod that has devices and cannot be bound: when they are revoked."""

    def given(self, key: str, pod: Pod, node: str) -> None:
        """Note that a pod was given devices on a node."""
        self._said[key] = unschedulable(pod)
        self._node_resources.assume(pod, node)

    def track(self, key: str) -> None:
        """Reserve node resources for a pod that has its devices and is not bound yet."""
        pod = self._pending.pods.get(key)
        if pod is None or pod.spec.node_name:
            return
        node = self._pending.node(key)
        if node is None:
            self._node_resources.forget(pod.metadata.uid)
            return
        self._node_resources.assume(pod, node)
        said = unschedulable(pod)
        if said and said != self._said.setdefault(key, said):
            # kube-scheduler tried the pod with its devices and failed.
            self._stuck.setdefault(key, self._clock() + STUCK_SECONDS)

    def waits(self, key: str, pod: Pod) -> None:
        """Note that a pod needs devices, perhaps again."""
        self._node_resources.forget(pod.metadata.uid)
        self._stuck.pop(key, None)

    def forget(self, key: str) -> None:
        """Drop what is known of a pod that was bound or deleted."""
        self._said.pop(key, None)
        self._stuck.pop(key, None)
        self._backoff.forget(key)

    @property
    def next_time(self) -> float | None:
        """When the next stuck pod loses its devices."""
        return min(self._stuck.values(), default=None)

    def take_stuck(self) -> list[ResourceClaim]:
        """Claims to revoke: kube-scheduler cannot bind their pod, for an unknown reason."""
        now = self._clock()
        claims: list[ResourceClaim] = []
        for key in [key for key, until in self._stuck.items() if until <= now]:
            del self._stuck[key]
            unused = [
                claim
                for claim in self._pending.claims_of(self._pending.pods[key])
                if claim.status.allocation is not None
                and not claim.status.reserved_for
                and self._pending.is_ours(claim)
            ]
            for claim in unused:
                self.back_off(claim)
            claims += unused
        return claims

    def back_off(self, claim: ResourceClaim) -> None:
        """Avoid the node of an allocation that kube-scheduler could not use."""
        allocation = claim.status.allocation
        node = None if allocation is None else single_node(allocation.node_selector)
        if node is None:
            return
        reserved = {consumer.uid for consumer in claim.status.reserved_for}
        for key in self._pending.users(claim.metadata.key):
            pod = self._pending.pods[key]
            if reserved and pod.metadata.uid not in reserved:
                continue  # another pod used the claim and has ended
            self._stats.returned += 1
            self._backoff.add(key, node)
            self._requeue(key)


def unschedulable(pod: Pod) -> str:
    """The message of kube-scheduler on a pod that it cannot bind; empty if there is none."""
    for condition in pod.status.conditions:
        if condition.type == "PodScheduled" and condition.reason == "Unschedulable":
            return condition.message
    return ""
