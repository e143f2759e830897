"""Whether a pod can run on a node: free resources, taints, selectors and affinity.

The rules are those of kube-scheduler's plugins NodeName, NodeUnschedulable, TaintToleration,
NodeAffinity and NodeResourcesFit. As there, amounts are integers: CPUs in thousandths, all else in
units. Ports, spreading and pod affinity are left to kube-scheduler, which binds the pod.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from slicewise.core.errors import SlicewiseError
from slicewise.kubernetes.api import (
    Container,
    Node,
    Pod,
    Taint,
)
from slicewise.kubernetes.api.quantities import Amount, amount
from slicewise.kubernetes.node_rules import excluded
from slicewise.kubernetes.volumes import Volumes

_CPU, _MEMORY, _PODS = "cpu", "memory", "pods"
_BY_CLASS = "deviceclass.resource.kubernetes.io/"
"""The prefix of extended resources that are devices: allocated, not counted."""
_MAX_DEMANDS = 1 << 17
_MAX_KINDS = 1 << 8
"""The number of combinations of tolerations, selector and affinity with cached verdicts."""
_EXCLUDING = ("NoSchedule", "NoExecute")

Amounts = dict[str, int]
"""Integer amounts by resource; CPU in thousandths."""


@dataclass(frozen=True, slots=True)
class _Demand:
    """The requests of a pod, computed once."""

    pod: Pod
    requests: Amounts
    trouble: str | None
    """Why the requests are invalid."""
    verdicts: dict[str, str | None]
    """By node: why the pod may not run there whatever is free. Equal pods share them."""


@dataclass(frozen=True, slots=True)
class _Supply:
    """The capacity of a node, computed once."""

    taints: tuple[Taint, ...]
    """The taints that keep pods away."""
    has: Amounts


@dataclass(slots=True)
class _Usage:
    """The number of pods on a node and their requests."""

    pods: int
    amounts: Amounts


class NodeResources:
    """The nodes, and the resources that bound and assumed pods take of them."""

    def __init__(self, volumes: Volumes | None = None) -> None:
        """``volumes`` are those of the cluster; without them, volumes are left to the scheduler."""
        self.nodes: dict[str, Node] = {}
        self.volumes = volumes
        self.pods: dict[str, str] = {}
        """The uid of each known pod, by namespace and name."""
        self._devices: frozenset[str] = frozenset()
        """Extended resources that device classes provide."""
        self._version = 0
        self._supplies: dict[str, _Supply] = {}
        self._usage: dict[str, _Usage] = {}
        self._counted: dict[str, tuple[str, Amounts]] = {}
        """By uid of a pod: the node on which it is counted, and the amounts."""
        self._assumed: set[str] = set()
        """The pods that are counted on a node and not bound yet."""
        self._demands: dict[str, _Demand] = {}
        self._verdicts: dict[object, dict[str, str | None]] = {}
        """By tolerations, node selector and affinity: the verdicts on nodes."""

    @property
    def version(self) -> int:
        """Grows with every change that may make a pod fit."""
        return self._version + (self.volumes.version if self.volumes else 0)

    def set_by_devices(self, resources: frozenset[str]) -> None:
        """Set the extended resources that device classes provide: nodes need not list them."""
        if not resources <= self._devices:
            self._version += 1
        self._devices = resources

    def node_changed(self, node: Node) -> None:
        """Add or update a node."""
        name = node.metadata.name
        supply = _Supply(
            tuple(taint for taint in node.spec.taints if taint.effect in _EXCLUDING),
            _allocatable(node),
        )
        before, old = self.nodes.get(name), self._supplies.get(name)
        self.nodes[name], self._supplies[name] = node, supply
        if before is None or old is None:
            self._version += 1
            return
        relabelled = before.metadata.labels != node.metadata.labels
        if relabelled or before.spec != node.spec:
            self._forget_verdicts(name)
        if (
            relabelled
            or (before.spec.unschedulable and not node.spec.unschedulable)
            or not set(old.taints) <= set(supply.taints)
            or any(much > old.has.get(resource, 0) for resource, much in supply.has.items())
        ):
            self._version += 1

    def node_deleted(self, name: str) -> None:
        """Remove a node; pods may still be bound to it."""
        self.nodes.pop(name, None)
        self._supplies.pop(name, None)
        self._forget_verdicts(name)

    def pod_changed(self, pod: Pod) -> None:
        """Add or update a pod."""
        uid, key = pod.metadata.uid, pod.metadata.key
        known = self.pods.get(key)
        if known is not None and known != uid:
            self.pod_deleted(key)  # replaced by another pod of the same name
        self.pods[key] = uid
        if pod.over:
            self._uncount(uid)
        elif pod.spec.node_name:
            self._assumed.discard(uid)
            self._demands.pop(uid, None)
            self._count(uid, pod.spec.node_name, _readable_requests(pod))
        elif uid in self._assumed:
            self._count(uid, self._counted[uid][0], _readable_requests(pod))

    def pod_deleted(self, key: str) -> None:
        """Remove a pod."""
        uid = self.pods.pop(key, None)
        if uid is not None:
            self._uncount(uid)

    def assume(self, pod: Pod, node_name: str) -> None:
        """Count a pod on the node chosen for it, until it is bound or forgotten."""
        uid = pod.metadata.uid
        if pod.over or pod.spec.node_name or (uid in self._counted and uid not in self._assumed):
            return  # it has ended or is bound
        self.pods.setdefault(pod.metadata.key, uid)
        self._assumed.add(uid)
        if self.volumes and pod.spec.volumes and node_name in self.nodes:
            self.volumes.assume(pod, self.nodes[node_name])
        self._count(uid, node_name, self._demand(pod).requests)

    def forget(self, uid: str) -> None:
        """Stop counting an assumed pod; bound pods stay counted."""
        if uid in self._assumed:
            if self.volumes:
                self.volumes.forget(uid)
            self._uncount(uid)

    @contextmanager
    def trial(self) -> Iterator[Callable[[Pod, str], None]]:
        """Count pods on nodes for a while; afterwards everything is as before."""
        version, volumes = self._version, self.volumes.version if self.volumes else 0
        counted: list[str] = []

        def assume(pod: Pod, node_name: str) -> None:
            if pod.metadata.uid not in self._counted:
                counted.append(pod.metadata.uid)
                self.assume(pod, node_name)

        try:
            yield assume
        finally:
            for uid in counted:
                self.forget(uid)
            self._version = version
            if self.volumes:
                self.volumes.version = volumes

    def kind(self, pod: Pod) -> tuple[object, ...]:
        """Equal for pods that fit the same nodes."""
        demand, spec = self._demand(pod), pod.spec
        amounts = tuple(sorted(demand.requests.items()))
        selector = tuple(sorted(spec.node_selector.items()))
        rules = spec.tolerations, selector, spec.affinity, amounts, demand.trouble
        return (*rules, self.volumes.kind(pod)) if self.volumes and spec.volumes else rules

    def misfit(
        self, pod: Pod, node_name: str, without: Collection[str] | None = None
    ) -> str | None:
        """Why a pod cannot run on a node, as a predicate of the node's name; None if it can.

        ``without`` are the uids of pods on the node that are left out of account; by default the
        pod itself.
        """
        node = self.nodes.get(node_name)
        if node is None:
            return "is unknown"
        if pod.spec.node_name and pod.spec.node_name != node_name:
            return f"is not the pod's node, {pod.spec.node_name}"
        without = (pod.metadata.uid,) if without is None else without
        return (
            self._verdict(pod, node)
            or self._shortage(self._demand(pod), node_name, without)
            or (self.volumes.misfit(pod, node) if self.volumes and pod.spec.volumes else None)
        )

    def excluded(self, pod: Pod, node_name: str) -> bool:
        """Whether taints, selectors or affinity exclude a pod from a node, whatever is free."""
        node = self.nodes.get(node_name)
        return node is not None and self._verdict(pod, node) is not None

    def _verdict(self, pod: Pod, node: Node) -> str | None:
        """Why taints, selectors or affinity exclude a pod from a node; None if they do not."""
        name, verdicts = node.metadata.name, self._demand(pod).verdicts
        if name not in verdicts:
            verdicts[name] = excluded(pod, node, self._supplies[name].taints)
        return verdicts[name]

    def _forget_verdicts(self, node_name: str) -> None:
        for verdicts in self._verdicts.values():
            verdicts.pop(node_name, None)

    def _shortage(self, demand: _Demand, node_name: str, without: Iterable[str]) -> str | None:
        """The resource of which a node has too little; None if it has enough."""
        has = self._supplies[node_name].has
        if demand.trouble is not None:
            return f"cannot be compared with what the pod asks for: {demand.trouble}"
        usage = self._usage.get(node_name)
        used, pods = (usage.amounts, usage.pods) if usage is not None else ({}, 0)
        counted = [self._counted[uid] for uid in without if uid in self._counted]
        left_out = [amounts for node, amounts in counted if node == node_name]
        if pods - len(left_out) >= has.get(_PODS, 0):
            return "has no room for another pod"
        for resource, asked in demand.requests.items():
            there = has.get(resource, 0)
            free = there - used.get(resource, 0)
            free += sum(amounts.get(resource, 0) for amounts in left_out)
            if asked > free and not (there <= 0 and self._by_devices(resource)):
                return _too_little(resource, there, max(0, free), asked)
        return None

    def _by_devices(self, resource: str) -> bool:
        return resource in self._devices or resource.startswith(_BY_CLASS)

    def _demand(self, pod: Pod) -> _Demand:
        """The requests of a pod, cached by its version."""
        uid, version = pod.metadata.uid, pod.metadata.resource_version
        demand = self._demands.get(uid)
        if demand is not None and (
            demand.pod is pod or (version and demand.pod.metadata.resource_version == version)
        ):
            return demand
        if len(self._demands) >= _MAX_DEMANDS or len(self._verdicts) >= _MAX_KINDS:
            self._demands.clear()
            self._verdicts.clear()
        spec = pod.spec
        kind = (spec.tolerations, tuple(spec.node_selector.items()), spec.affinity)
        verdicts = self._verdicts.setdefault(kind, {})
        try:
            demand = _Demand(pod, requests(pod), None, verdicts)
        except SlicewiseError as error:
            demand = _Demand(pod, {}, str(error), verdicts)
        self._demands[uid] = demand
        return demand

    def _count(self, uid: str, node_name: str, amounts: Amounts) -> None:
        """Count a pod on one node."""
        before = self._counted.get(uid)
        if before == (node_name, amounts):
            return
        if before is not None:
            self._give_back(*before)
            if before[0] != node_name or any(
                much > amounts.get(resource, 0) for resource, much in before[1].items()
            ):
                self._version += 1
        self._counted[uid] = node_name, amounts
        usage = self._usage.setdefault(node_name, _Usage(0, {}))
        usage.pods += 1
        for resource, much in amounts.items():
            usage.amounts[resource] = usage.amounts.get(resource, 0) + much

    def _uncount(self, uid: str) -> None:
        """Count a pod on no node."""
        self._assumed.discard(uid)
        self._demands.pop(uid, None)
        counted = self._counted.pop(uid, None)
        if counted is not None:
            self._give_back(*counted)
            self._version += 1

    def _give_back(self, node_name: str, amounts: Amounts) -> None:
        usage = self._usage[node_name]
        usage.pods -= 1
        if not usage.pods:
            del self._usage[node_name]
            return
        for resource, much in amounts.items():
            usage.amounts[resource] -= much


def requests(pod: Pod) -> Amounts:
    """The total requests of a pod, by the rule of kube-scheduler.

    Containers and sidecars run together; before that, each init container runs beside the sidecars
    started before it. The larger of both counts, plus the overhead.
    """
    together: dict[str, Amount] = {}
    sidecars: dict[str, Amount] = {}
    most: dict[str, Amount] = {}
    for container in pod.spec.containers:
        _add(together, _container_requests(container))
    for container in pod.spec.init_containers:
        asked = _container_requests(container)
        if container.restart_policy == "Always":
            _add(together, asked)
            _add(sidecars, asked)
            asked = sidecars
        else:
            _add(asked, sidecars)
        for resource, much in asked.items():
            most[resource] = max(most.get(resource, 0), much)
    for resource, much in most.items():
        together[resource] = max(together.get(resource, 0), much)
    if pod.spec.resources is not None:
        for resource, text in pod.spec.resources.requests.items():
            if resource in (_CPU, _MEMORY) or resource.startswith("hugepages-"):
                together[resource] = amount(text)
    _add(together, {resource: amount(text) for resource, text in pod.spec.overhead.items()})
    return {name: _counted(name, much) for name, much in together.items() if much and name != _PODS}


def _readable_requests(pod: Pod) -> Amounts:
    """The requests of a pod; none if they are invalid."""
    try:
        return requests(pod)
    except SlicewiseError:
        return {}


def _container_requests(container: Container) -> dict[str, Amount]:
    return {name: amount(text) for name, text in container.resources.requests.items()}


def _add(sums: dict[str, Amount], more: Mapping[str, Amount]) -> None:
    for resource, much in more.items():
        sums[resource] = sums.get(resource, 0) + much


def _counted(resource: str, much: Amount) -> int:
    """An amount as an integer, rounded up."""
    return math.ceil(much * 1000 if resource == _CPU else much)


def _allocatable(node: Node) -> Amounts:
    """The allocatable resources of a node, except invalid ones."""
    found = {}
    for resource, text in node.status.allocatable.items():
        try:
            found[resource] = _counted(resource, amount(text))
        except SlicewiseError:
            continue
    return found


# Messages


def _too_little(resource: str, there: int, free: int, asked: int) -> str:
    """A message on the free and the requested amount of a resource."""
    if resource == _CPU:
        return f"has {free / 1000:g} of {there / 1000:g} CPUs free, {asked / 1000:g} are asked for"
    if resource == _MEMORY or resource == "ephemeral-storage" or resource.startswith("hugepages-"):
        sizes = f"{_size(free)} of {_size(there)} {resource} free, {_size(asked)} are asked for"
        return f"has {sizes}"
    return f"has {free} of {there} {resource} free, {asked} are asked for"


def _size(count: int) -> str:
    """Bytes in the largest unit with a number of at least one: 1.5Gi."""
    number: float = count
    for unit in ("", "Ki", "Mi", "Gi"):
        if number < 1024:
            return f"{number:.4g}{unit}"
        number /= 1024
    return f"{number:.4g}Ti"
