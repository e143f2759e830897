"""Whether a pod can run on a node, as far as that can be known from outside kube-scheduler.

The rules are those of its plugins NodeName, NodeUnschedulable, TaintToleration, NodeAffinity and
NodeResourcesFit. Amounts are whole numbers, as they are there: CPUs in thousandths, all else in
units. What is not known here (volumes, ports, spreading, other pods' affinity) is left to the
scheduler, which has the last word.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from slicewise.core.errors import SlicewiseError
from slicewise.k8s.api import Container, Node, Pod, Taint
from slicewise.k8s.quantities import Amount, amount
from slicewise.k8s.terms import keeps_away, why_not

_CPU, _MEMORY, _PODS = "cpu", "memory", "pods"
_BY_CLASS = "deviceclass.resource.kubernetes.io/"
"""Extended resources of this prefix are devices, which are allocated and not counted."""
_MAX_ASKS = 1 << 17
_MAX_KINDS = 1 << 8
"""Kinds of pods, by where they may be, for which verdicts on nodes are remembered."""

Amounts = dict[str, int]
"""How much of each resource; thousandths where it is CPU."""


@dataclass(frozen=True, slots=True)
class _Ask:
    """What is needed of a pod to judge nodes, worked out once."""

    pod: Pod
    requests: Amounts
    trouble: str | None
    """Why its requests cannot be read."""
    verdicts: dict[str, str | None]
    """By node: what rules it out whatever is free there. Pods that are alike share them."""


@dataclass(frozen=True, slots=True)
class _Site:
    """What is needed of a node to judge pods, worked out once."""

    taints: tuple[Taint, ...]
    """Those that keep pods away."""
    has: Amounts


@dataclass(slots=True)
class _Usage:
    """What the pods of a node take."""

    pods: int
    amounts: Amounts


class Estate:
    """The nodes, and what their pods and those to come take of them."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.pods: dict[str, str] = {}
        """The uid of each pod that is known, by its namespace and name."""
        self._devices: frozenset[str] = frozenset()
        """Extended resources that classes of devices stand for."""
        self.version = 0
        """Grows whenever a pod might fit that did not."""
        self._sites: dict[str, _Site] = {}
        self._usage: dict[str, _Usage] = {}
        self._seats: dict[str, tuple[str, Amounts]] = {}
        """By the pod's uid: the node it counts on, and with what."""
        self._assumed: set[str] = set()
        """The pods that count on a node they are not bound to yet."""
        self._asks: dict[str, _Ask] = {}
        self._verdicts: dict[object, dict[str, str | None]] = {}
        """By what pods say about where they may be: the verdicts on nodes."""

    def set_by_devices(self, resources: frozenset[str]) -> None:
        """Classes of devices stand for these extended resources: who has none is not ruled out."""
        if not resources <= self._devices:
            self.version += 1
        self._devices = resources

    def node_changed(self, node: Node) -> None:
        """A node is there, or is no longer as it was."""
        name = node.metadata.name
        site = _Site(
            tuple(filter(keeps_away, node.spec.taints)),
            _allocatable(node),
        )
        before, old = self.nodes.get(name), self._sites.get(name)
        self.nodes[name], self._sites[name] = node, site
        if before is None or old is None:
            self.version += 1
            return
        relabelled = before.metadata.labels != node.metadata.labels
        if relabelled or before.spec != node.spec:
            self._judge_anew(name)
        if (
            relabelled
            or (before.spec.unschedulable and not node.spec.unschedulable)
            or not set(old.taints) <= set(site.taints)
            or any(much > old.has.get(resource, 0) for resource, much in site.has.items())
        ):
            self.version += 1

    def node_gone(self, name: str) -> None:
        """A node is no longer there; pods may still say that they are on it."""
        self.nodes.pop(name, None)
        self._sites.pop(name, None)
        self._judge_anew(name)

    def pod_changed(self, pod: Pod) -> None:
        """A pod is there, or is no longer as it was."""
        uid, key = pod.metadata.uid, pod.metadata.key
        known = self.pods.get(key)
        if known is not None and known != uid:
            self.pod_gone(key)  # Another pod of the same name; the end of the first was not seen.
        self.pods[key] = uid
        if pod.over:
            self._leave(uid)
        elif pod.spec.node_name:
            self._assumed.discard(uid)
            self._asks.pop(uid, None)
            self._sit(uid, pod.spec.node_name, _counts_with(pod))
        elif uid in self._assumed:
            self._sit(uid, self._seats[uid][0], _counts_with(pod))

    def pod_gone(self, key: str) -> None:
        """A pod is no longer there."""
        uid = self.pods.pop(key, None)
        if uid is not None:
            self._leave(uid)

    def assume(self, pod: Pod, node_name: str) -> None:
        """A node was chosen for a pod: it counts there until it is bound, or forgotten."""
        uid = pod.metadata.uid
        if pod.over or pod.spec.node_name or (uid in self._seats and uid not in self._assumed):
            return  # It needs nothing any more, or it is somewhere already.
        self.pods.setdefault(pod.metadata.key, uid)
        self._assumed.add(uid)
        self._sit(uid, node_name, self._ask(pod).requests)

    def forget(self, uid: str) -> None:
        """The pod does not go where a node was chosen for it; if it is bound, nothing changes."""
        if uid in self._assumed:
            self._leave(uid)

    def misfit(self, pod: Pod, node_name: str) -> str | None:
        """Why the pod cannot run there, to be read after the node's name; None: it can."""
        node = self.nodes.get(node_name)
        if node is None:
            return "is not known"
        if pod.spec.node_name and pod.spec.node_name != node_name:
            return f"is not the pod's node, {pod.spec.node_name}"
        ask = self._ask(pod)
        if node_name in ask.verdicts:
            verdict = ask.verdicts[node_name]
        else:
            verdict = ask.verdicts[node_name] = why_not(pod, node, self._sites[node_name].taints)
        return verdict or self._lack(ask, node_name)

    def _judge_anew(self, node_name: str) -> None:
        for verdicts in self._verdicts.values():
            verdicts.pop(node_name, None)

    def _lack(self, ask: _Ask, node_name: str) -> str | None:
        """What there is too little of on the node."""
        has = self._sites[node_name].has
        if ask.trouble is not None:
            return f"cannot be compared with what the pod asks for: {ask.trouble}"
        usage = self._usage.get(node_name)
        used, pods = (usage.amounts, usage.pods) if usage is not None else ({}, 0)
        # It may count there already, and does not stand in its own way.
        seat = self._seats.get(ask.pod.metadata.uid)
        own = seat[1] if seat is not None and seat[0] == node_name else None
        if pods - (own is not None) >= has.get(_PODS, 0):
            return "has no room for another pod"
        for resource, asked in ask.requests.items():
            there = has.get(resource, 0)
            free = there - used.get(resource, 0) + (own.get(resource, 0) if own else 0)
            if asked > free and not (there <= 0 and self._by_devices(resource)):
                return _too_little(resource, there, max(0, free), asked)
        return None

    def _by_devices(self, resource: str) -> bool:
        return resource in self._devices or resource.startswith(_BY_CLASS)

    def _ask(self, pod: Pod) -> _Ask:
        """What the pod asks for; looked up while the pod is as it was."""
        uid, version = pod.metadata.uid, pod.metadata.resource_version
        ask = self._asks.get(uid)
        if ask is not None and (
            ask.pod is pod or (version and ask.pod.metadata.resource_version == version)
        ):
            return ask
        if len(self._asks) >= _MAX_ASKS or len(self._verdicts) >= _MAX_KINDS:
            self._asks.clear()
            self._verdicts.clear()
        spec = pod.spec
        kind = (spec.tolerations, tuple(spec.node_selector.items()), spec.affinity)
        verdicts = self._verdicts.setdefault(kind, {})
        try:
            ask = _Ask(pod, requests(pod), None, verdicts)
        except SlicewiseError as error:
            ask = _Ask(pod, {}, str(error), verdicts)
        self._asks[uid] = ask
        return ask

    def _sit(self, uid: str, node_name: str, amounts: Amounts) -> None:
        """The pod counts on that node with these amounts, and nowhere else."""
        before = self._seats.get(uid)
        if before == (node_name, amounts):
            return
        if before is not None:
            self._give_back(*before)
            if before[0] != node_name or any(
                much > amounts.get(resource, 0) for resource, much in before[1].items()
            ):
                self.version += 1
        self._seats[uid] = node_name, amounts
        usage = self._usage.setdefault(node_name, _Usage(0, {}))
        usage.pods += 1
        for resource, much in amounts.items():
            usage.amounts[resource] = usage.amounts.get(resource, 0) + much

    def _leave(self, uid: str) -> None:
        """The pod counts nowhere any more."""
        self._assumed.discard(uid)
        self._asks.pop(uid, None)
        seat = self._seats.pop(uid, None)
        if seat is not None:
            self._give_back(*seat)
            self.version += 1

    def _give_back(self, node_name: str, amounts: Amounts) -> None:
        usage = self._usage[node_name]
        usage.pods -= 1
        if not usage.pods:
            del self._usage[node_name]
            return
        for resource, much in amounts.items():
            usage.amounts[resource] -= much


def requests(pod: Pod) -> Amounts:
    """What a pod asks for in all, by kube-scheduler's rule.

    Its containers and its sidecars run together; before that, each init container runs beside
    the sidecars that were started earlier. The larger of both counts, and the overhead with it.
    """
    together: dict[str, Amount] = {}
    sidecars: dict[str, Amount] = {}
    most: dict[str, Amount] = {}
    for container in pod.spec.containers:
        _add(together, _asked(container))
    for container in pod.spec.init_containers:
        asked = _asked(container)
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


def _counts_with(pod: Pod) -> Amounts:
    """What a pod takes of its node; nothing if that cannot be read."""
    try:
        return requests(pod)
    except SlicewiseError:
        return {}


def _asked(container: Container) -> dict[str, Amount]:
    return {name: amount(text) for name, text in container.resources.requests.items()}


def _add(sums: dict[str, Amount], more: Mapping[str, Amount]) -> None:
    for resource, much in more.items():
        sums[resource] = sums.get(resource, 0) + much


def _counted(resource: str, much: Amount) -> int:
    """An amount as it is counted: rounded up."""
    return math.ceil(much * 1000 if resource == _CPU else much)


def _allocatable(node: Node) -> Amounts:
    """What a node has for pods; nothing of what cannot be read."""
    found = {}
    for resource, text in node.status.allocatable.items():
        try:
            found[resource] = _counted(resource, amount(text))
        except SlicewiseError:
            continue
    return found


# In words


def _too_little(resource: str, there: int, free: int, asked: int) -> str:
    """How much is free of a resource, and how much is asked for."""
    if resource == _CPU:
        return f"has {free / 1000:g} of {there / 1000:g} CPUs free, {asked / 1000:g} are asked for"
    if resource == _MEMORY or resource == "ephemeral-storage" or resource.startswith("hugepages-"):
        sizes = f"{_size(free)} of {_size(there)} {resource} free, {_size(asked)} are asked for"
        return f"has {sizes}"
    return f"has {free} of {there} {resource} free, {asked} are asked for"


def _size(count: int) -> str:
    """Bytes in the largest unit that leaves a number of at least one: 1.5Gi."""
    number: float = count
    for unit in ("", "Ki", "Mi", "Gi"):
        if number < 1024:
            return f"{number:.4g}{unit}"
        number /= 1024
    return f"{number:.4g}Ti"
