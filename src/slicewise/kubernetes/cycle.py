"""The scheduling cycle: which pod is placed next, and which devices its claims get.

Pods wait in order of priority and age. A pass over the queue starts when something changed that may
help a pod: devices were freed, a pod arrived, a node changed. Refusals are remembered until then,
so a pass over a long queue is cheap.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from slicewise.control.quota import excess, has_limits
from slicewise.core.cluster import Instance
from slicewise.core.request import Reason, Rejection, Request
from slicewise.engine.offers import Unfit
from slicewise.engine.queue import Discipline, Ticket, WaitingRoom
from slicewise.kubernetes.api import Pod, ResourceClaim
from slicewise.kubernetes.api.common import parse_time
from slicewise.kubernetes.cache import ClusterCache
from slicewise.kubernetes.claim_client import Decision, Grant
from slicewise.kubernetes.claim_states import ClaimState
from slicewise.kubernetes.conflicts import Conflicts
from slicewise.kubernetes.devices.pools import home_of
from slicewise.kubernetes.event_recorder import (
    INVALID,
    NO_NODE,
    PLACED,
    WORDS,
    PendingView,
    PlacementMessage,
)
from slicewise.kubernetes.node_resources import NodeResources, matches
from slicewise.kubernetes.pending_claims import PendingClaims, PendingPod, single_node
from slicewise.kubernetes.stats import Stats

STUCK_SECONDS = 15.0
"""How long a pod keeps devices after kube-scheduler has reported that it cannot bind the pod."""
FIRST_SECONDS, MOST_SECONDS = 10.0, 300.0
"""The first and the longest backoff of a pod from a node."""
EVERYWHERE = ""
"""Stands for every node in a backoff."""

_NO_REQUEST = Request("none")
_EXPIRED = 0.0


class Backoff:
    """The nodes that are not tried for a pod for a while, because an attempt there failed.

    The time doubles with each failure in a row, until the pod is bound or deleted.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[str, dict[str, tuple[float, float]]] = {}
        """By pod and node: the end of the backoff and its length."""

    def add(self, pod: str, node: str) -> None:
        """Start a backoff, twice as long as the last one."""
        nodes = self._until.setdefault(pod, {})
        span = min(2 * nodes[node][1], MOST_SECONDS) if node in nodes else FIRST_SECONDS
        nodes[node] = self._clock() + span, span

    def holds(self, pod: str, node: str) -> bool:
        """Whether a pod must not be tried on a node now."""
        return self._until.get(pod, {}).get(node, (_EXPIRED, 0.0))[0] > self._clock()

    def forget(self, pod: str) -> None:
        """Drop the backoffs of a pod that was bound or deleted."""
        self._until.pop(pod, None)

    def expire(self) -> bool:
        """Whether a backoff has ended since the last call."""
        now = self._clock()
        expired = False
        for nodes in self._until.values():
            for node, (until, span) in nodes.items():
                if _EXPIRED < until <= now:
                    nodes[node] = _EXPIRED, span
                    expired = True
        return expired

    @property
    def next_time(self) -> float | None:
        """When the next backoff ends."""
        times = [until for nodes in self._until.values() for until, _ in nodes.values()]
        return min((until for until in times if until > _EXPIRED), default=None)


class Cycle:
    """The queue of pending pods, and the choice of devices for them."""

    def __init__(
        self,
        cache: ClusterCache,
        pending: PendingClaims,
        node_resources: NodeResources,
        conflicts: Conflicts,
        stats: Stats,
        discipline: Discipline,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.standby = True
        """Whether another replica schedules: then the reasons in the pods' conditions are shown."""
        self._cache = cache
        self._pending = pending
        self._node_resources = node_resources
        self._conflicts = conflicts
        self._stats = stats
        self._changed: dict[str, None] = {}
        """Pods to be queued, updated or removed by `update_queue`."""
        self._queue = WaitingRoom(discipline)
        self._numbers: dict[str, int] = {}
        """The ticket number of each pod that waits or is being written."""
        self._waiting: dict[int, PendingPod] = {}
        """By ticket number: what the pod needs, as of the last change of the pod or its claims."""
        self._last_number = 0
        self._writing: dict[str, Decision] = {}
        """By pod: the decision that is being written."""
        self._backoff = Backoff(clock)
        self._scheduler_said: dict[str, str] = {}
        """By pod that was given devices: what kube-scheduler had reported about it before."""
        self._stuck: dict[str, float] = {}
        """By pod that has devices and cannot be bound: when they are revoked."""
        self._given_up: dict[str, ResourceClaim] = {}
        self._refused: dict[tuple[Request, ...], Rejection] = {}
        """By requests: why no GPU has room for them."""
        self._unfit: dict[str, tuple[object, Rejection]] = {}
        """By pod: the state in which it was tried last, and why it fits no node."""
        self._messages: dict[str, PlacementMessage] = {}
        self._view = PendingView(cache)
        self._snapshot: object = None
        """The versions of free devices and nodes at the last pass."""
        self._queue_changed = False

    # The queue

    def requeue(self, pod: str) -> None:
        """Note that a pod or one of its claims has changed."""
        self._changed[pod] = None

    def requeue_all(self) -> None:
        """Note a change that may concern every pod."""
        self._changed.update(dict.fromkeys(self._pending.pods))

    def remove(self, pod: str) -> None:
        """Remove a pod that was deleted or has ended; a new pod of the same name starts over."""
        self._dequeue(pod)

    def update_queue(self) -> None:
        """Queue, update or remove the pods that have changed, oldest first."""
        pods = self._pending.pods

        def created(key: str) -> float:
            # Timestamps have whole seconds; within one, the order of arrival counts.
            pod = pods.get(key)
            return 0.0 if pod is None else parse_time(pod.metadata.creation_timestamp, 0.0)

        changed, self._changed = self._changed, {}
        for key in sorted(changed, key=created) if len(changed) > 1 else changed:
            if key not in self._writing:  # `finished` requeues it
                self._update_entry(key)

    def _update_entry(self, key: str) -> None:
        pending_pod = self._pending.pending_pod(key)
        if pending_pod is None:
            self._dequeue(key)
            self._track_unbound(key)
            return
        pod = pending_pod.pod
        self._node_resources.forget(pod.metadata.uid)
        self._stuck.pop(key, None)
        number = self._numbers.get(key)
        if number is None:
            self._last_number += 1
            number = self._numbers[key] = self._last_number
        self._waiting[number] = pending_pod
        if number not in self._queue:  # new, or its allocation could not be written
            self._queue.enter(
                Ticket(
                    number,
                    _NO_REQUEST,
                    tenant=pod.metadata.uid,  # pods of a namespace may overtake each other
                    priority=pod.spec.priority,
                )
            )
        self._queue_changed = True
        if self.standby:
            self._view.show_condition(pending_pod)

    def _track_unbound(self, key: str) -> None:
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
        if said and said != self._scheduler_said.setdefault(key, said):
            # kube-scheduler tried the pod with its devices and failed.
            self._stuck.setdefault(key, self.clock() + STUCK_SECONDS)

    def _dequeue(self, key: str) -> None:
        number = self._numbers.pop(key, None)
        if number is not None:
            del self._waiting[number]
            if number in self._queue:
                self._queue.withdraw(number)
                self._queue_changed = True  # it may have held back those behind it
        self._view.hide(key)
        self._unfit.pop(key, None)
        self._messages.pop(key, None)
        pod = self._pending.pods.get(key)
        if pod is None or pod.spec.node_name:
            self._scheduler_said.pop(key, None)
            self._stuck.pop(key, None)
            self._backoff.forget(key)

    def take_stuck(self) -> list[ResourceClaim]:
        """Claims to revoke: kube-scheduler cannot bind their pod, for an unknown reason."""
        now = self.clock()
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

    def back_off_refused(self, decision: Decision, why: str) -> None:
        """Stop trying a pod for a while: the API refused its allocation."""
        if decision.pod in self._numbers:
            self._backoff.add(decision.pod, EVERYWHERE)
            self._messages[decision.pod] = PlacementMessage(
                False, INVALID, f"its devices cannot be written: {why}"
            )

    @property
    def next_time(self) -> float | None:
        """When the next backoff ends or the next stuck pod loses its devices."""
        times = [self._backoff.next_time, *self._stuck.values()]
        return min((time for time in times if time is not None), default=None)

    @property
    def waiting(self) -> int:
        """The number of pods in the queue."""
        return len(self._queue)

    # Scheduling

    def schedule(self) -> list[Decision]:
        """Choose devices for the pods that can be placed, in order of priority and age."""
        # 1. Snapshot: if nothing has changed since the last cycle, no pod can be placed.
        expired = self._backoff.expire()
        snapshot = self._cache.freed, self._node_resources.version
        if snapshot == self._snapshot and not self._queue_changed and not expired:
            return []
        if snapshot != self._snapshot:
            self._refused.clear()
        if expired:
            self._unfit.clear()
        self._snapshot, self._queue_changed = snapshot, False
        # 2. Nominate: the queue offers pods in order, and `_place` tries each of them.
        began = time.perf_counter()
        decisions = [decision for _, decision in self._queue.serve(self._place)]
        self._stats.deciding_seconds += time.perf_counter() - began
        self._stats.decided += len(decisions)
        # 6. Show which pods wait, and why.
        for decision in decisions:
            self._view.hide(decision.pod)
        for key, message in self._messages.items():
            self._view.show(self._waiting[self._numbers[key]], message)
        return decisions

    def finished(self, decision: Decision) -> None:
        """Note that the write of a decision has returned, with any outcome."""
        del self._writing[decision.pod]
        for grant in decision.grants:
            record = self._cache.records.get(grant.claim.metadata.uid)
            if record is not None:
                self._cache.records.conclude(record)
        self.requeue(decision.pod)

    def _place(self, ticket: Ticket) -> Decision | Rejection:
        pending_pod = self._waiting[ticket.number]
        key = pending_pod.key
        records = (self._cache.records.get(one.metadata.uid) for one, _ in pending_pod.claims)
        if any(one is not None and one.state is not ClaimState.PENDING for one in records):
            # The change that ends this state requeues the pods of the claim.
            return _skip("a write to one of its claims has not been seen yet")
        if pending_pod.problem:
            return self._refuse(key, INVALID, pending_pod.problem, _skip(pending_pod.problem))
        if self._backoff.holds(key, EVERYWHERE):
            return _skip("the API refused its allocation")
        requests = tuple(pending_pod.requests)
        refused = self._refused.get(requests)
        if refused is None:
            tried = self._snapshot, requests, pending_pod.pinned, pending_pod.pod.spec
            known = self._unfit.get(key)
            if known is not None and known[0] == tried:
                return known[1]
            # 3. Filter and score: the first node, in the order of the policy, that fits the pod.
            placed = self._cache.offers.place(requests, lambda node: self._fits(pending_pod, node))
            if isinstance(placed, tuple):
                # 4. Check the quota of the namespace.
                over = self._over_quota(pending_pod, placed)
                if over is None:
                    # 5. Assume: the devices count as allocated until the write returns.
                    return self._assume(pending_pod, placed)
                for instance in reversed(placed):
                    self._cache.state.cluster.undo_place(instance)
                return self._refuse(key, WORDS[Reason.QUOTA], over, _skip(over))
            if isinstance(placed, Unfit):
                text = self._why_unfit(pending_pod, placed)
                rejection = _skip(text)
                self._unfit[key] = tried, rejection
                self._give_up_rest(pending_pod)
                return self._refuse(key, NO_NODE, text, rejection)
            refused = self._refused[requests] = placed
        self._give_up_rest(pending_pod)
        if refused.reason is Reason.UNKNOWN_PROFILE:  # it must not block the queue
            return self._refuse(key, WORDS[refused.reason], refused.detail, _skip(refused.detail))
        return self._refuse(key, WORDS[refused.reason], refused.detail, refused)

    def _fits(self, pending_pod: PendingPod, node: str) -> bool:
        home = home_of(node)
        found = self._node_resources.nodes.get(home)
        return (
            found is not None
            and not self._backoff.holds(pending_pod.key, home)
            and all(matches(selector, found) for selector in pending_pod.pinned)
            and self._node_resources.misfit(pending_pod.pod, home) is None
        )

    def _over_quota(self, pending_pod: PendingPod, instances: tuple[Instance, ...]) -> str | None:
        tenant = self._cache.tenant(pending_pod.pod.metadata.namespace)
        if not has_limits(tenant):
            return None
        text = excess(tenant, self._cache.state.parts(instances))
        return None if text is None else text.replace("tenant", "namespace", 1)

    def _assume(self, pending_pod: PendingPod, instances: tuple[Instance, ...]) -> Decision:
        node = home_of(self._cache.state.cluster.node_of(instances[0].gpu).name)
        pod, key = pending_pod.pod, pending_pod.key
        grants = []
        rest = list(instances)
        for claim, parameters in pending_pod.claims:
            count = len(parameters.devices)
            devices = self._cache.assume(claim, tuple(rest[:count]), {"pod": pod.metadata.name})
            rest = rest[count:]
            requests = tuple(device.request for device in parameters.devices)
            grants.append(Grant(claim, requests, devices))
        decision = Decision(
            key,
            node,
            tuple(grants),
            self._conflicts.expected(self.clock()),
            dict(self._pending.classes),
        )
        self._writing[key] = decision
        self._scheduler_said[key] = unschedulable(pod)
        self._node_resources.assume(pod, node)
        names = ", ".join(device.device for grant in grants for device in grant.devices)
        self._messages[key] = PlacementMessage(True, PLACED, f"given {names} of node {node}")
        return decision

    def _refuse(self, key: str, reason: str, text: str, rejection: Rejection) -> Rejection:
        self._messages[key] = PlacementMessage(False, reason, text)
        return rejection

    def _why_unfit(self, pending_pod: PendingPod, unfit: Unfit) -> str:
        count = len(unfit.nodes)
        first = home_of(unfit.nodes[0])
        why = self._node_resources.misfit(pending_pod.pod, first)
        if why is None:
            said = unschedulable(pending_pod.pod)
            why = (
                "did not take the pod when it was tried" + (f" ({said})" if said else "")
                if self._backoff.holds(pending_pod.key, first)
                else "is not where the pod's other claims are"
            )
        nodes = "1 node has" if count == 1 else f"{count} nodes have"
        return f"{nodes} room on its GPUs, but none can run the pod: {first} {why}"

    def _give_up_rest(self, pending_pod: PendingPod) -> None:
        """Give up the devices of a pod that cannot get the rest of them on the same node."""
        if not pending_pod.pinned:
            return
        for claim in self._pending.claims_of(pending_pod.pod):
            if (
                claim.status.allocation is not None
                and not claim.status.reserved_for
                and self._pending.is_ours(claim)
                and len(self._pending.users(claim.metadata.key)) == 1
            ):
                self._given_up[claim.metadata.uid] = claim

    def take_given_up(self) -> list[ResourceClaim]:
        """Claims to revoke: their pod cannot get its other devices on the same node."""
        given_up, self._given_up = self._given_up, {}
        return list(given_up.values())

    def take_messages(self) -> list[tuple[str, PlacementMessage]]:
        """The messages to pods since the last call."""
        messages, self._messages = self._messages, {}
        return list(messages.items())


def unschedulable(pod: Pod) -> str:
    """The message of kube-scheduler on a pod that it cannot bind; empty if there is none."""
    for condition in pod.status.conditions:
        if condition.type == "PodScheduled" and condition.reason == "Unschedulable":
            return condition.message
    return ""


def _skip(text: str) -> Rejection:
    """A rejection that concerns one pod and does not block the queue."""
    return Rejection(_NO_REQUEST, Reason.QUOTA, text)
