"""Places the devices of a pod on a node that can run it: the scheduler of the dispatcher."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from slicewise.control.policy_choices import PolicyChoices
from slicewise.core.cluster import Instance
from slicewise.core.request import Reason, Rejection, Request
from slicewise.engine.dispatcher import Outcome
from slicewise.engine.offers import Unfit
from slicewise.kubernetes.cache import ClusterCache
from slicewise.kubernetes.devices.pools import home_of
from slicewise.kubernetes.node_resources import NodeResources
from slicewise.kubernetes.node_rules import matches
from slicewise.kubernetes.pod_request import GangRequest, NodeRules, PodRequest


@dataclass(frozen=True, slots=True)
class NoNode(Rejection):
    """There is room, but only on nodes that cannot run the pod."""

    tried: bool
    """Whether the node in the sentence was tried and refused."""


class PodPlacer:
    """Places requests of pods; every other request is a mistake."""

    def __init__(
        self,
        cache: ClusterCache,
        node_resources: NodeResources,
        users: Callable[[Instance], Iterable[str]],
    ) -> None:
        """``users`` gives the uids of the pods that use an instance."""
        self.cluster = cache.state.cluster
        self.scans = False  # `Offers` has refused such policies
        self._scheduler = cache.state.scheduler
        self._offers = cache.offers
        self._tolerating = cache.pools.tolerating
        self._node_resources = node_resources
        self._users = users
        self._policies = PolicyChoices(cache)

    def has_room(self, request: Request) -> bool:
        """Whether each device alone might find a place."""
        pod = _pod(request)
        if isinstance(pod, GangRequest):
            return all(map(self.has_room, pod.members))
        with self._tolerating(_rules(pod).tolerations):
            return all(self._scheduler.has_room(device) for device in set(pod.devices))

    def fits_on(self, gpu: int, request: Request) -> bool:
        """Whether a pod with one device could be placed on a GPU now, reserved or not."""
        pod = _pod(request)
        if len(pod.devices) != 1:
            return False
        with self._tolerating(_rules(pod).tolerations):
            return (
                self._scheduler.fits_on(gpu, pod.devices[0])
                and self.cluster.takes_instances(gpu)
                and self._runs(pod, self.cluster.node_of(gpu).name)
            )

    def suits(self, request: Request, gpu: int, ended: Sequence[Instance]) -> bool:
        """Whether a GPU's node can run a pod with one device once these instances have ended."""
        pod = _pod(request)
        if len(pod.devices) != 1:
            return False
        without = [uid for instance in ended for uid in self._users(instance)]
        return self._runs(pod, self.cluster.node_of(gpu).name, without)

    def submit_all(
        self,
        want: Request,
        count: int,
        *,
        waits: bool = False,
        now: float = 0.0,
        ends: float = math.inf,
    ) -> Outcome:
        """Place all devices of a pod on the first node, in the policy's order, that can run it."""
        # Step 3 of the cycle: the offers score the nodes with room, and `_runs` filters them.
        pod = _pod(want)
        if isinstance(pod, GangRequest):
            return self._place_all(pod, now, ends)
        for device in pod.devices:
            self._policies.before(device)
        with self._tolerating(_rules(pod).tolerations):
            placed = self._offers.place(
                pod.devices, lambda node: self._runs(pod, node), now=now, ends=ends
            )
        if isinstance(placed, Unfit):
            return self._no_node(pod, placed)
        return placed

    def _place_all(self, gang: GangRequest, now: float, ends: float) -> Outcome:
        """Place the pods of a gang one after the other, or none of them."""
        placed: list[tuple[Instance, ...]] = []
        refusal: Rejection | None = None
        with self._node_resources.trial() as assume:
            for pod, member in zip(gang.pods, gang.members, strict=True):
                outcome = self.submit_all(member, 1, now=now, ends=ends)
                if isinstance(outcome, Rejection):
                    refusal = outcome
                    break
                placed.append(outcome)
                assume(pod, home_of(self.cluster.node_of(outcome[0].gpu).name))
        if refusal is None:
            return tuple(instance for one in placed for instance in one)
        for one in reversed(placed):
            for instance in reversed(one):
                self.cluster.undo_place(instance)
        text = f"{len(placed)} of {len(gang.members)} pods of the gang find room: {refusal.detail}"
        return Rejection(gang, refusal.reason, text)

    def reserved_node(self, request: PodRequest) -> str | None:
        """A node with room for all devices of a pod if nothing were reserved.

        The caller has lifted all reservations.
        """
        if isinstance(request, GangRequest):
            return None
        return next(
            (
                home_of(node)
                for node in self._offers.nodes(request.devices, _EVERY_NODE)
                if self._runs(request, node)
            ),
            None,
        )

    def no_room(self, request: PodRequest) -> Rejection | None:
        """Why a device of a pod finds no place on any node; None if each alone does."""
        if isinstance(request, GangRequest):
            return next(filter(None, map(self.no_room, request.members)), None)
        with self._tolerating(_rules(request).tolerations):
            for device in request.devices:
                if not self._scheduler.has_room(device):
                    return self._scheduler.reasons.for_cluster(device)
        return None

    def _runs(self, pod: PodRequest, node: str, without: Collection[str] = ()) -> bool:
        """Whether a node can run a pod, ignoring the pods in ``without``."""
        rules, home = _rules(pod), home_of(node)
        found = self._node_resources.nodes.get(home)
        return (
            found is not None
            and home not in rules.avoided
            and all(matches(selector, found) for selector in rules.pinned)
            and self._node_resources.misfit(rules.pod, home, without) is None
        )

    def _no_node(self, pod: PodRequest, unfit: Unfit) -> NoNode:
        rules = _rules(pod)
        count, first = len(unfit.nodes), home_of(unfit.nodes[0])
        why = self._node_resources.misfit(rules.pod, first, ())
        tried = why is None and first in rules.avoided
        if tried:
            why = "did not take the pod when it was tried"
        elif why is None:
            why = "is not where the pod's other claims are"
        nodes = "1 node has" if count == 1 else f"{count} nodes have"
        text = f"{nodes} room on its GPUs, but none can run the pod: {first} {why}"
        return NoNode(pod, Reason.CAPACITY, text, tried)


class _EveryNode:
    def __contains__(self, name: object) -> bool:
        return True


_EVERY_NODE = _EveryNode()


def _pod(request: Request) -> PodRequest:
    assert isinstance(request, PodRequest)
    return request


def _rules(request: PodRequest) -> NodeRules:
    assert request.rules is not None
    return request.rules
