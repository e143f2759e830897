"""Cool-down: freed slices that may still hold an instance, because the pod vanished.

The kubelet lets the driver remove a pod's instances before it reports the end of the pod. So a pod
that was seen to end needs no care. But if a bound pod is deleted by force, or with its node, its
instances may exist for some time. Its slices are not given out again until the pod is known to have
ended, the node has started again or is deleted, or the time is over; and the claim, if it still
exists, gets no devices, because the driver may still know it with the old ones.

The time begins when the kubelet can begin to clean up:

- after the grace period, if the pod was being deleted before: the kubelet lets it have the rest;
- when the kubelet was started, because then it does not know the pod any more: it removes what no
  pod uses a minute later;
- when the node is ready, and the driver has published its devices.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from slicewise.kubernetes.api import Node, Pod

SECONDS = 90.0
"""The default: a kubelet removes what no pod uses 60 seconds after its start, and then the driver
needs some more."""
LONGEST = 10
"""A cool-down lasts this many times as long at most: on a lost node, or after a failed prepare."""
_MOST_GONE = 10_000
_UNREADY = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_NODE = "node"
"""What is waited for, beside drivers."""


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
        self._bound: dict[str, float | None] = {}
        """By uid of a known pod that has not ended: when its grace period ends, or ``-inf``; None:
        it is not bound."""
        self._vanished: dict[str, float] = {}
        """By uid of the latest pods that vanished: the same."""
        self._ended: dict[str, None] = {}
        """The uids of the latest pods that ended without leaving anything behind."""
        self._failing: dict[str, None] = {}
        """The uids of the latest pods for which the driver could not prepare the devices; those of
        vanished pods stay, because their claims lose the devices only afterwards."""
        self._boots: dict[str, str] = {}
        self._starts: dict[str, float] = {}
        """By node: when its kubelet was started last."""
        self._awaited: defaultdict[str, set[str]] = defaultdict(set)
        """By node: what is away, so that nothing can be cleaned up."""

    def __contains__(self, claim: object) -> bool:
        return claim in self._cooling

    def __iter__(self) -> Iterator[str]:
        """The uids of the claims whose slices cool down."""
        return iter(self._cooling)

    def now(self) -> float:
        """The time of its clock."""
        return self._clock()

    @property
    def count(self) -> int:
        """The number of claims whose slices cool down."""
        return len(self._cooling)

    # Pods and nodes

    def pod_changed(self, pod: Pod) -> None:
        """Note a change of a pod with claims."""
        uid = pod.metadata.uid
        if not pod.over:
            self._bound[uid] = self._end_of_grace(pod) if pod.spec.node_name else None
            if not pod.spec.node_name:
                self._drop(uid, _number(pod.metadata.resource_version))
        elif _by_kubelet(pod):
            self._end(uid)
        else:
            self._vanish(pod)

    def pod_deleted(self, pod: Pod, last: bool) -> None:
        """Note that a pod is gone; ``last`` tells whether this is its last version."""
        if last and (not pod.spec.node_name or (pod.over and _by_kubelet(pod))):
            self._end(pod.metadata.uid)
        self._vanish(pod)

    def prepare_failed(self, pod: str) -> None:
        """Note that the driver could not prepare the devices of a pod, by its uid."""
        if pod in self._bound:
            self._failing[pod] = None
            _limit(self._failing)

    def prepared(self, pod: str) -> None:
        """Note that a pod has its devices after all."""
        self._failing.pop(pod, None)

    def node_changed(self, node: Node) -> None:
        """Note a change of a node: a restart ends all cool-downs there."""
        name, boot = node.metadata.name, node.status.node_info.boot_id
        if boot and self._boots.get(name, boot) != boot:
            self.node_deleted(name)
        self._boots[name] = boot
        if any(taint.key in _UNREADY for taint in node.spec.taints):
            self._awaited[name].add(_NODE)
        else:
            self._returned(name, _NODE)

    def node_deleted(self, name: str) -> None:
        """Note that a node is gone, and so are the instances on it."""
        self._awaited.pop(name, None)
        self._starts.pop(name, None)
        self._boots.pop(name, None)
        for one in self._cooling.values():
            if one.home == name:
                one.until = one.latest = self._clock()

    def kubelet_started(self, name: str, at: float) -> None:
        """Note when the kubelet of a node was started."""
        if self._starts.get(name, -math.inf) < at:
            self._starts[name] = at
            self._begin(name, at)

    def driver_changed(self, name: str, driver: str, there: bool) -> None:
        """Note whether a driver publishes the devices of a node."""
        if there:
            self._returned(name, driver)
        elif name in self._boots:
            self._awaited[name].add(driver)

    def _returned(self, name: str, what: str) -> None:
        awaited = self._awaited.get(name)
        if awaited is not None and what in awaited:
            awaited.discard(what)
            if not awaited:
                del self._awaited[name]
            self._begin(name, self._clock())

    def _begin(self, name: str, at: float) -> None:
        """Let the time begin again on a node."""
        for one in self._cooling.values():
            if one.home == name:
                one.until = max(one.until, at + self._seconds)

    def _vanish(self, pod: Pod) -> None:
        uid = pod.metadata.uid
        end = self._bound.pop(uid, None)
        if end is not None and end > self._clock():
            self._vanished[uid] = end
            _limit(self._vanished)

    def _end_of_grace(self, pod: Pod) -> float:
        """When the kubelet has ended a pod that is being deleted; a later call may say less."""
        known = self._bound.get(pod.metadata.uid)
        if known is not None and known > -math.inf:
            return known
        asked = pod.metadata.deletion_grace_period_seconds
        return self._clock() + asked if asked else -math.inf

    def _end(self, uid: str) -> None:
        self._bound.pop(uid, None)
        self._failing.pop(uid, None)
        self._ended[uid] = None
        _limit(self._ended)
        self._drop(uid, math.inf)

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
        unbound = {uid for uid in before if uid in self._bound and self._bound[uid] is None}
        return now | (set(before) - unbound)

    def start(self, claim: str, home: str, pods: Iterable[str], version: str) -> bool:
        """Begin to cool down what a claim had for these pods; returns whether that is needed.

        ``version`` is that of the claim without devices. A pod that is known as not bound may have
        been bound shortly before, unless its version is newer.
        """
        unknown = {uid for uid in pods if uid not in self._ended}
        if not unknown or not self._seconds:
            return False
        ends = (self._bound.get(uid, self._vanished.get(uid)) for uid in unknown)
        began = max(self._clock(), *(-math.inf if end is None else end for end in ends))
        latest = began + LONGEST * self._seconds
        until = latest if unknown & self._failing.keys() else began + self._seconds
        self._cooling[claim] = _Cooling(home, unknown, _number(version), until, latest)
        return True

    def resume(self, claim: str, home: str, until: float, latest: float) -> None:
        """Go on with a cool-down that another replica has begun."""
        if not self._seconds:
            until = latest = self._clock()
        begun = self._starts.get(home, -math.inf) + self._seconds
        self._cooling[claim] = _Cooling(home, set(), math.inf, max(until, begun), latest)

    def times(self, claim: str) -> tuple[float, float]:
        """When a cool-down ends, and when at the latest."""
        return self._cooling[claim].until, self._cooling[claim].latest

    def forget(self, claim: str) -> None:
        """Drop a claim whose slices are free or given out."""
        self._cooling.pop(claim, None)

    def over(self) -> list[str]:
        """The claims whose slices can be given out again."""
        now = self._clock()
        return [
            uid
            for uid, one in self._cooling.items()
            if one.latest <= now or (one.until <= now and one.home not in self._awaited)
        ]

    @property
    def next_time(self) -> float | None:
        """When the next cool-down may end."""
        ends = (
            one.latest if one.home in self._awaited else min(one.until, one.latest)
            for one in self._cooling.values()
        )
        return min(ends, default=None)


def _number(version: str) -> float:
    """A resource version as a number; they can be compared since Kubernetes 1.35."""
    return float(version) if version.isdecimal() else math.inf


def _limit(known: dict[str, Any]) -> None:
    """Forget the oldest if there are too many."""
    if len(known) > _MOST_GONE:
        del known[next(iter(known))]


def _by_kubelet(pod: Pod) -> bool:
    """Whether the kubelet has ended a pod, and not the garbage collection of a lost node."""
    return not any(
        one.type == "DisruptionTarget" and one.reason == "DeletionByPodGC"
        for one in pod.status.conditions
    )
