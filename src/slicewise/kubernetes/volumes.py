"""Whether the volumes of a pod let it run on a node, by the rules of kube-scheduler.

A bound volume may be tied to nodes: by its node affinity (local volumes) or by its zone. A claim
that waits for its first consumer may be bound to a free volume that a node can reach, or be
provisioned where its class allows it. Whether a provisioner has room left is not known here; then
kube-scheduler refuses the node, and another one is tried.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from slicewise.core.errors import SlicewiseError
from slicewise.kubernetes.api import (
    Node,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    StorageClass,
)
from slicewise.kubernetes.api.quantities import amount
from slicewise.kubernetes.node_rules import labels_match, matches

SELECTED_NODE = "volume.kubernetes.io/selected-node"
"""The annotation of a claim for which kube-scheduler has chosen a node to provision for."""
NO_PROVISIONER = "kubernetes.io/no-provisioner"
_ZONES = (
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region",
)
_BETWEEN_ZONES = "__"


class Volumes:
    """The volumes, claims and classes of a cluster."""

    def __init__(self) -> None:
        self.volumes: dict[str, PersistentVolume] = {}
        self.claims: dict[str, PersistentVolumeClaim] = {}
        self.classes: dict[str, StorageClass] = {}
        self._users: defaultdict[str, set[str]] = defaultdict(set)
        """By claim: the pods with it that need devices."""
        self._assumed: dict[str, set[str]] = {}
        """By uid of a pod that was given a node: the free volumes that it will take."""
        self.version = 0
        """Grows with every change that may make a pod fit."""

    # Changes

    def put(self, thing: PersistentVolume | PersistentVolumeClaim | StorageClass) -> list[str]:
        """Add or update an object; returns the pods that it may concern."""
        self.version += 1
        match thing:
            case PersistentVolume():
                self.volumes[thing.metadata.name] = thing
                reference = thing.spec.claim_ref
                return [] if reference is None else self._using(reference.key)
            case PersistentVolumeClaim():
                self.claims[thing.metadata.key] = thing
                return self._using(thing.metadata.key)
            case StorageClass():
                self.classes[thing.metadata.name] = thing
                return [pod for pods in self._users.values() for pod in pods]

    def drop(self, kind: dict[str, object], key: str) -> list[str]:
        """Remove a deleted object from one of the collections; returns the pods concerned."""
        kind.pop(key, None)
        self.version += 1
        return self._using(key)

    def use(self, pod: Pod) -> None:
        """Note that a pod uses its claims."""
        for claim in claims_of(pod):
            self._users[claim].add(pod.metadata.key)

    def leave(self, pod: Pod) -> None:
        """Note that a pod is gone or has ended."""
        self._assumed.pop(pod.metadata.uid, None)
        for claim in claims_of(pod):
            users = self._users.get(claim)
            if users is not None:
                users.discard(pod.metadata.key)
                if not users:
                    del self._users[claim]

    def _using(self, claim: str) -> list[str]:
        return sorted(self._users.get(claim, ()))

    # Pods on nodes

    def kind(self, pod: Pod) -> tuple[object, ...]:
        """Equal for pods whose volumes let them run on the same nodes."""
        found: list[object] = []
        for key in claims_of(pod):
            claim = self.claims.get(key)
            volume = None if claim is None else self.volumes.get(claim.spec.volume_name)
            if volume is not None:
                found.append((volume.spec.node_affinity, _zones(volume)))
            else:
                found.append((key, "" if claim is None else claim.metadata.resource_version))
        return tuple(found)

    def misfit(self, pod: Pod, node: Node) -> str | None:
        """Why its volumes keep a pod from a node, as a predicate of its name; None if not."""
        taken: set[str] = set()
        for key in claims_of(pod):
            why = self._misfit(key, node, pod.metadata.uid, taken)
            if why is not None:
                return f"{why} (volume claim {key.partition('/')[2]!r})"
        return None

    def assume(self, pod: Pod, node: Node) -> None:
        """Note which free volumes a pod takes on the node chosen for it, until it is bound."""
        self._assumed.pop(pod.metadata.uid, None)
        taken: set[str] = set()
        for key in claims_of(pod):
            self._misfit(key, node, pod.metadata.uid, taken)
        if taken:
            self._assumed[pod.metadata.uid] = taken

    def forget(self, uid: str) -> None:
        """Note that a pod is bound, or was not placed after all."""
        if self._assumed.pop(uid, None):
            self.version += 1

    def _misfit(self, key: str, node: Node, pod: str, taken: set[str]) -> str | None:
        claim = self.claims.get(key)
        if claim is None or claim.metadata.deletion_timestamp:
            return "cannot be used: a volume claim does not exist, or is being deleted"
        if claim.spec.volume_name:
            volume = self.volumes.get(claim.spec.volume_name)
            if volume is None:
                return "cannot be used: a volume does not exist"
            return None if _reachable(volume, node) else "cannot reach a volume of the pod"
        storage = self.classes.get(claim.spec.storage_class_name or "")
        if storage is None or storage.volume_binding_mode != "WaitForFirstConsumer":
            return "cannot be used yet: a volume claim is not bound"
        selected = _selected(claim)
        if selected:
            return (
                None if selected == node.metadata.name else "is not where a volume is provisioned"
            )
        volume = self._free_volume(claim, node, pod, taken)
        if volume is not None:
            taken.add(volume.metadata.name)
            return None
        if storage.provisioner == NO_PROVISIONER:
            return "has no free volume for the pod"
        if not _provisions(storage, node):
            return "is not where the storage class provisions volumes"
        return None

    def _free_volume(
        self, claim: PersistentVolumeClaim, node: Node, pod: str, taken: set[str]
    ) -> PersistentVolume | None:
        """The smallest free volume for a claim on a node."""
        gone = taken.union(*(names for uid, names in self._assumed.items() if uid != pod))
        fitting = [
            volume
            for name, volume in self.volumes.items()
            if name not in gone and _suits(volume, claim) and _reachable(volume, node)
        ]
        return min(
            fitting, key=lambda one: (_size(one.spec.capacity), one.metadata.name), default=None
        )


def claims_of(pod: Pod) -> Iterator[str]:
    """The volume claims of a pod, by namespace and name."""
    for volume in pod.spec.volumes:
        if volume.persistent_volume_claim is not None:
            yield f"{pod.metadata.namespace}/{volume.persistent_volume_claim.claim_name}"
        elif volume.ephemeral is not None:
            yield f"{pod.metadata.namespace}/{pod.metadata.name}-{volume.name}"


def _selected(claim: PersistentVolumeClaim | None) -> str:
    return "" if claim is None else claim.metadata.annotations.get(SELECTED_NODE, "")


def _zones(volume: PersistentVolume) -> tuple[tuple[str, str], ...]:
    labels = volume.metadata.labels
    return tuple((label, labels[label]) for label in _ZONES if label in labels)


def _reachable(volume: PersistentVolume, node: Node) -> bool:
    affinity = volume.spec.node_affinity
    if affinity is not None and affinity.required and not matches(affinity.required, node):
        return False
    labels = node.metadata.labels
    return all(
        label not in labels or labels[label] in zones.split(_BETWEEN_ZONES)
        for label, zones in _zones(volume)
    )


def _provisions(storage: StorageClass, node: Node) -> bool:
    """Whether a class provisions volumes for a node."""
    labels, topologies = node.metadata.labels, storage.allowed_topologies
    return not topologies or any(
        all(labels.get(one.key) in one.values for one in term.match_label_expressions)
        for term in topologies
    )


def _suits(volume: PersistentVolume, claim: PersistentVolumeClaim) -> bool:
    """Whether a volume is free and is what a claim asks for."""
    spec, wanted, reference = volume.spec, claim.spec, volume.spec.claim_ref
    if reference is not None:
        return reference.key == claim.metadata.key and reference.uid in ("", claim.metadata.uid)
    return (
        volume.status.phase in ("", "Available")
        and not volume.metadata.deletion_timestamp
        and spec.storage_class_name == (wanted.storage_class_name or "")
        and spec.volume_mode == wanted.volume_mode
        and set(wanted.access_modes) <= set(spec.access_modes)
        and _size(spec.capacity) >= _size(wanted.resources.requests)
        and (wanted.selector is None or labels_match(wanted.selector, volume.metadata.labels))
    )


def _size(amounts: dict[str, str]) -> float:
    try:
        return float(amount(amounts.get("storage", "0")))
    except SlicewiseError:
        return 0.0
