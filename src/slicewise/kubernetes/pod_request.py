"""What a pod asks for: all its devices together, and what restricts the nodes for it.

Pods that ask for the same are interchangeable: if one of them finds no room, neither does another.
So they wait in one line for each namespace, and only the first is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from weakref import WeakValueDictionary

from slicewise.core.geometry import Geometry, Profile
from slicewise.core.request import Request
from slicewise.kubernetes.api import NodeSelector, Pod
from slicewise.kubernetes.devices.device_taints import Tolerations
from slicewise.kubernetes.node_resources import NodeResources
from slicewise.kubernetes.pending_claims import PendingPod


class NodeRules:
    """What restricts the nodes of a pod. Equal rules are one object, compared by identity."""

    __slots__ = ("__weakref__", "avoided", "pinned", "pod", "tolerations")

    def __init__(
        self,
        pod: Pod,
        pinned: tuple[NodeSelector, ...],
        avoided: frozenset[str],
        tolerations: frozenset[Tolerations] = frozenset({()}),
    ) -> None:
        self.pod = pod
        """One of the pods with these rules."""
        self.pinned = pinned
        """The nodes of allocated claims."""
        self.avoided = avoided
        """The nodes on which a recent attempt failed."""
        self.tolerations = tolerations
        """Of device taints, for each requested device."""


@dataclass(frozen=True, slots=True)
class PodRequest(Request):
    """The devices of a pod as one request; ``want`` and ``models`` are those of the largest."""

    devices: tuple[Request, ...] = ()
    rules: NodeRules | None = None

    def candidates(self, geometry: Geometry) -> tuple[tuple[Fraction, Profile], ...]:
        """The profiles for the largest device, on a model that has all of them."""
        if not all(device.candidates(geometry) for device in self.devices):
            return ()
        return Request(self.want, self.models).candidates(geometry)

    def least_size(self, geometry: Geometry) -> int:
        """The memory slices of all devices."""
        return sum(device.least_size(geometry) for device in self.devices)

    def __str__(self) -> str:
        return " and ".join(map(str, self.devices))


@dataclass(frozen=True, slots=True)
class GangRequest(PodRequest):
    """The devices of several pods, which are placed together; each pod on a node of its own."""

    members: tuple[PodRequest, ...] = ()
    pods: tuple[Pod, ...] = field(default=(), compare=False)

    def candidates(self, geometry: Geometry) -> tuple[tuple[Fraction, Profile], ...]:
        """The profiles for the largest device; the others may be on other models."""
        return Request(self.want, self.models).candidates(geometry)

    def __str__(self) -> str:
        return f"a gang of {len(self.members)} pods"


class PodRequests:
    """Makes the requests of pods."""

    def __init__(
        self,
        node_resources: NodeResources,
        canonical: Callable[[Request], Request],
        size: Callable[[Request], int],
    ) -> None:
        self._node_resources = node_resources
        self._canonical = canonical
        self._size = size
        self._rules: WeakValueDictionary[tuple[object, ...], NodeRules] = WeakValueDictionary()

    def of(self, pending_pod: PendingPod, avoided: frozenset[str]) -> PodRequest:
        """The request of a pod that needs devices."""
        devices = tuple(self._canonical(request) for request in pending_pod.requests)
        largest = max(devices, key=self._size)
        return PodRequest(
            largest.want, largest.models, devices, self._rules_of(pending_pod, avoided)
        )

    def of_gang(
        self, members: Sequence[PendingPod], avoided: Callable[[str], frozenset[str]]
    ) -> GangRequest:
        """The request of pods that are placed together."""
        requests = tuple(self.of(one, avoided(one.key)) for one in members)
        devices = tuple(device for request in requests for device in request.devices)
        largest = max(devices, key=self._size)
        pods = tuple(one.pod for one in members)
        return GangRequest(largest.want, largest.models, devices, None, requests, pods)

    def _rules_of(self, pending_pod: PendingPod, avoided: frozenset[str]) -> NodeRules:
        pod, pinned = pending_pod.pod, pending_pod.pinned
        # A pod with a part of its devices has a line of its own: it may have to give them up.
        own = pod.metadata.uid if pinned else ""
        tolerations = pending_pod.tolerations
        key = (self._node_resources.kind(pod), pinned, own, avoided, tolerations)
        rules = self._rules.get(key)
        if rules is None:
            rules = self._rules[key] = NodeRules(pod, pinned, avoided, tolerations)
        return rules
