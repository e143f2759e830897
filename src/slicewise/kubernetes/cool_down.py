"""Cool-down: freed slices that may still hold an instance, because the pod vanished.

The kubelet lets the driver remove a pod's instances before it reports the end of the pod. So a pod
that was seen to end needs no care. But if a bound pod is deleted by force, or with its node, its
instances may exist for some time. Its slices are not given out again until the pod is known to have
ended, the node has started again or is deleted, or the time is over; and the claim, if it still
exists, gets no devices, because the driver may still know it with the old ones. Nodes that are not
ready do nothing: there, the time begins when the node is ready again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from slicewise.kubernetes.api import Node, Pod

SECONDS = 90.0
"""The default: a restarted kubelet removes what no pod uses within 60 seconds, and then the driver
needs some more."""
LONGEST = 10
"""A cool-down lasts this many times as long at most: on a lost node, or after a failed prepare."""
_MOST_ENDED = 10_000
_UNREADY = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


@dataclass(slots=True)
class _Cooling:
    """The freed slices of one claim."""

    home: str
    """The Kubernetes node."""
    pods: set[str]
    """The uids of the pods that may still use them."""
    version: float
    """The resource version at which they were freed."""
    until: float
    latest: float


class CoolDown:
    """Decides how long freed slices are not given out."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._cooling: dict[str, _Cooling] = {}
        """By uid of a claim."""
        self._bound: dict[str, bool] = {}
        """By uid of a known pod that has not ended: whether it is bound."""
        self._ended: dict[str, None] = {}
        """The uids of the latest pods that ended without leaving anything behind."""
        self._failing: set[str] = set()
        """The uids of pods for which the driver could not prepare the devices."""
        self._boots: dict[str, str] = {}
        self._unready: set[str] = set()

    def __contains__(self, claim: object) -> bool:
        return claim in self._cooling

    @property
    def count(self) -> int:
        """The number of claims whose slices cool down."""
        return len(self._cooling)

    # Pods and nodes

    def pod_changed(self, pod: Pod) -> None:
        """Note a change of a pod with claims."""
        uid = pod.metadata.uid
        if not pod.over:
            self._bound[uid] = bool(pod.spec.node_name)
            if not pod.spec.node_name:
                self._drop(uid, _number(pod.metadata.resource_version))
        elif _by_kubelet(pod):
            self._end(uid)
        else:
            self._bound.pop(uid, None)

    def pod_deleted(self, pod: Pod, last: bool) -> None:
        """Note that a pod is gone; ``last`` tells whether this is its last version."""
        if last and (not pod.spec.node_name or (pod.over and _by_kubelet(pod))):
            self._end(pod.metadata.uid)
        self._bound.pop(pod.metadata.uid, None)
        self._failing.discard(pod.metadata.uid)

    def prepare_failed(self, pod: str) -> None:
        """Note that the driver could not prepare the devices of a pod, by its uid."""
        if pod in self._bound:
            self._failing.add(pod)

    def node_changed(self, node: Node) -> None:
        """Note a change of a node: a restart ends all cool-downs there."""
        name, boot = node.metadata.name, node.status.node_info.boot_id
        if boot and self._boots.get(name, boot) != boot:
            self.node_deleted(name)
        self._boots[name] = boot
        if any(taint.key in _UNREADY for taint in node.spec.taints):
            self._unready.add(name)
        elif name in self._unready:
            self._unready.discard(name)
            for one in self._cooling.values():
                if one.home == name:
                    one.until = max(one.until, self._clock() + self._seconds)

    def node_deleted(self, name: str) -> None:
        """Note that a node is gone, and so are the instances on it."""
        self._unready.discard(name)
        self._boots.pop(name, None)
        for one in self._cooling.values():
            if one.home == name:
                one.until = one.latest = self._clock()

    def _end(self, uid: str) -> None:
        self._bound.pop(uid, None)
        self._failing.discard(uid)
        self._ended[uid] = None
        if len(self._ended) > _MOST_ENDED:
            del self._ended[next(iter(self._ended))]
        self._drop(uid, float("inf"))

    def _drop(self, uid: str, version: float) -> None:
        """End what waits for a pod alone that was not bound, or no longer, at this version."""
        for one in self._cooling.values():
            if uid in one.pods and one.version < version:
                one.pods.discard(uid)
                if not one.pods:
                    one.until = one.latest = self._clock()

    # Claims

    def users(self, before: Iterable[str], reserved: Iterable[str]) -> set[str]:
        """The uids of the pods that may use a claim: it is, or was before, reserved for them."""
        now = set(reserved)
        return now | {uid for uid in before if uid in now or self._bound.get(uid, True)}

    def start(self, claim: str, home: str, pods: Iterable[str], version: str) -> bool:
        """Begin to cool down what a claim had for these pods; returns whether that is needed.

        ``version`` is that of the claim without devices. A pod that is known as not bound may have
        been bound shortly before, unless its version is newer.
        """
        unknown = {uid for uid in pods if uid not in self._ended}
        if not unknown or not self._seconds:
            return False
        now = self._clock()
        latest = now + LONGEST * self._seconds
        until = now + self._seconds if unknown.isdisjoint(self._failing) else latest
        self._cooling[claim] = _Cooling(home, unknown, _number(version), until, latest)
        return True

    def forget(self, claim: str) -> None:
        """Drop a claim whose slices are free or given out."""
        self._cooling.pop(claim, None)

    def over(self) -> list[str]:
        """The claims whose slices can be given out again."""
        now = self._clock()
        return [
            uid
            for uid, one in self._cooling.items()
            if one.latest <= now or (one.until <= now and one.home not in self._unready)
        ]

    @property
    def next_time(self) -> float | None:
        """When the next cool-down may end."""
        ends = (
            one.latest if one.home in self._unready else min(one.until, one.latest)
            for one in self._cooling.values()
        )
        return min(ends, default=None)


def _number(version: str) -> float:
    """A resource version as a number; they can be compared since Kubernetes 1.35."""
    return float(version) if version.isdecimal() else float("inf")


def _by_kubelet(pod: Pod) -> bool:
    """Whether the kubelet has ended a pod, and not the garbage collection of a lost node."""
    return not any(
        one.type == "DisruptionTarget" and one.reason == "DeletionByPodGC"
        for one in pod.status.conditions
    )
