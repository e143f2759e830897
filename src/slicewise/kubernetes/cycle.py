"""The scheduling cycle: which pod is placed next, and which devices its claims get.

Pods wait in lines by namespace and by what they ask for, and the lines are served in fair order by
the engine's queue and dispatcher. A pass over the queue starts when something changed that may help
a pod: devices were freed, a pod arrived, a node changed. Refusals are remembered until then, and
concern a whole line, so a pass over a long queue is cheap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from slicewise.core.cluster import Instance
from slicewise.core.request import Reason, Rejection
from slicewise.engine.dispatcher import Dispatcher
from slicewise.engine.queue import Queue, Ticket
from slicewise.engine.reservation_rules import ReservationRules
from slicewise.engine.reservations import LineKey, Reservations, Window
from slicewise.journal.entries import Seconds
from slicewise.kubernetes.api import Pod, ResourceClaim
from slicewise.kubernetes.api.common import parse_time
from slicewise.kubernetes.backoff import NodeBackoff
from slicewise.kubernetes.cache import ClusterCache
from slicewise.kubernetes.claim_client import Decision, Grant
from slicewise.kubernetes.claim_states import ClaimState
from slicewise.kubernetes.conflicts import Conflicts
from slicewise.kubernetes.devices.pools import home_of
from slicewise.kubernetes.event_recorder import (
    PLACED,
    UPDATE_SECONDS,
    PendingView,
    PlacementMessage,
)
from slicewise.kubernetes.gangs import Gangs
from slicewise.kubernetes.job_deadlines import JobDeadlines
from slicewise.kubernetes.namespace_quota import NamespaceQuota
from slicewise.kubernetes.node_resources import NodeResources
from slicewise.kubernetes.pending_claims import PendingClaims, PendingPod
from slicewise.kubernetes.pod_lifetimes import PodLifetimes, UnreadableHints
from slicewise.kubernetes.pod_placer import PodPlacer
from slicewise.kubernetes.pod_request import PodRequest, PodRequests
from slicewise.kubernetes.preemption import Preemption, PreemptionRules
from slicewise.kubernetes.quarantine import Quarantine
from slicewise.kubernetes.stats import Stats
from slicewise.kubernetes.unbound_pods import UnboundPods, unschedulable
from slicewise.kubernetes.waiting_messages import MessageSchedule, WaitingReasons, not_ready


class Cycle:
    """The queue of pending pods, and the choice of devices for them."""

    def __init__(
        self,
        cache: ClusterCache,
        pending: PendingClaims,
        node_resources: NodeResources,
        conflicts: Conflicts,
        quarantine: Quarantine,
        stats: Stats,
        rules: ReservationRules,
        clock: Callable[[], float] = time.monotonic,
        preemption: PreemptionRules | None = None,
    ) -> None:
        self.clock = clock
        self.standby = True
        """Whether another replica schedules: then the reasons in the pods' conditions are shown."""
        self._cache = cache
        self._pending = pending
        self._node_resources = node_resources
        self._conflicts = conflicts
        self._quarantine = quarantine
        self._stats = stats
        self._changed: dict[str, None] = {}
        """Pods to be queued, updated or removed by `update_queue`."""
        state = cache.state
        self._quota = NamespaceQuota(cache)
        self.jobs = JobDeadlines()
        self._lifetimes = PodLifetimes(cache, pending, self.jobs)
        self._requests = PodRequests(node_resources, state.canonical, state.shares.size)
        self._placer = PodPlacer(cache, node_resources, self._lifetimes.users)
        self._queue = Queue(state.shares)
        self.reservations = Reservations(state.cluster, self._placer.suits)
        self._dispatcher = Dispatcher(self._placer, self._queue, self.reservations, self, rules)
        self.preemption = Preemption(
            cache,
            pending,
            self._placer,
            self._dispatcher,
            self,
            lambda number: self._waiting[number].pod,
            self._ticket_of,
            preemption or PreemptionRules(),
            lambda: self.clock(),
        )
        cache.on_freed, cache.on_removal = self._dispatcher.freed, self._removed
        self._numbers: dict[str, int] = {}
        """The ticket number of each pod that waits or is being written."""
        self._waiting: dict[int, PendingPod] = {}
        """By ticket number: what the pod needs, as of the last change of the pod or its claims."""
        self._since: dict[int, Seconds] = {}
        """By ticket number: when this replica first saw the pod wait."""
        self._parked: set[int] = set()
        """The numbers of pods that cannot be tried before one of their claims changes."""
        self._pinned: set[int] = set()
        """The numbers of waiting pods that have a part of their devices."""
        self._last_number = 0
        self._writing: dict[str, Decision] = {}
        """By pod: the decision that is being written."""
        self.gangs = Gangs(pending, lambda key: key in self._writing, lambda: self.clock())
        self._backoff = NodeBackoff(lambda: self.clock())
        self.unbound = UnboundPods(
            pending, node_resources, self._backoff, stats, lambda: self.clock(), self.requeue
        )
        self._given_up: dict[str, ResourceClaim] = {}
        self._messages: dict[str, PlacementMessage] = {}
        self.unreadable = UnreadableHints()
        self._message_schedule = MessageSchedule(lambda: self.clock())
        self._view = PendingView(cache, self._lifetimes.expected)
        self._snapshot: object = None
        """The versions of free devices and nodes at the last pass."""
        self._tenants: dict[str, str] = {}
        """By namespace with waiting pods: the tenant of their tickets."""
        self._models = 0
        """The number of GPU models at the last pass."""
        self._queue_changed = False
        self._decisions: list[Decision] = []
        """The decisions of the current pass."""

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
        changed.update(dict.fromkeys(self.gangs.take_changed()))
        for key in list(changed):
            changed.update(dict.fromkeys(self.gangs.companions(key)))
        self.gangs.forget_units()
        for key in sorted(changed, key=created) if len(changed) > 1 else changed:
            if key not in self._writing:  # `finished` requeues it
                self._update_entry(key)

    def _update_entry(self, key: str) -> None:
        pending_pod = self._pending.pending_pod(key)
        if pending_pod is None:
            self._dequeue(key)
            self.unbound.track(key)
            return
        self.unbound.waits(key, pending_pod.pod)
        number = self._numbers.get(key)
        if number is None:
            self._last_number += 1
            number = self._numbers[key] = self._last_number
            self._since[number] = self._cache.now()
        self._waiting[number] = pending_pod
        self._enter(number)
        if self.standby:
            self._view.show_condition(pending_pod)

    def _enter(self, number: int) -> None:
        """Put a pod into its line, or park it."""
        pending_pod = self._waiting[number]
        self._message_schedule.add(number)
        unit = self.gangs.unit(pending_pod)
        members = (pending_pod,) if unit is None else unit.members
        leads = unit is None or unit.led_by(pending_pod.key)
        if not leads or not all(map(self._may_be_tried, members)):
            self._leave(number)
            self._parked.add(number)
            return
        self.gangs.stand(number, unit)
        ticket = self._ticket(number, pending_pod)
        if number in self._queue:
            if self._queue.ticket(number) == ticket:
                return
            self._leave(number)
            self.gangs.stand(number, unit)
        self._parked.discard(number)
        self._queue.enter(ticket)
        if any(one.pinned for one in members):
            self._pinned.add(number)
        self._queue_changed = True

    def _ticket(self, number: int, pending_pod: PendingPod) -> Ticket:
        pod, key = pending_pod.pod, pending_pod.key
        namespace = pod.metadata.namespace
        unit = self.gangs.standing.get(number)
        request: PodRequest
        if unit is None:
            request = self._requests.of(pending_pod, self._backoff.avoided(key))
        else:
            request = self._requests.of_gang(unit.members, self._backoff.avoided)
        self.unreadable.look(pod)
        tenant = self._tenants[namespace] = self._cache.tenant(namespace).ref.id
        return Ticket(
            number,
            request,
            tenant=tenant,
            priority=pod.spec.priority,
            # Windows are reserved for single devices: other pods never have waited long enough.
            entered=self._since[number] if len(request.devices) == 1 else float("inf"),
            # The pods of a gang may end at different times.
            lease=self._lifetimes.lease(pending_pod) if unit is None else None,
            expected=self._lifetimes.hint(pending_pod) if unit is None else None,
            until=self._lifetimes.until(pending_pod) if unit is None else None,
        )

    def _ticket_of(self, key: str) -> Ticket | None:
        """The ticket of a pod in a line."""
        number = self._numbers.get(key)
        return self._queue.ticket(number) if number is not None and number in self._queue else None

    def _leave(self, number: int) -> None:
        """Take a pod out of its line, if it is in one."""
        self._parked.discard(number)
        self._pinned.discard(number)
        self.gangs.stand(number, None)
        if number in self._queue:
            position = self._queue.position(number)
            self._dispatcher.ticket_left(self._queue.withdraw(number), position)

    def _may_be_tried(self, pending_pod: PendingPod) -> bool:
        """Whether a pod is ready; if not, the change that makes it so requeues it."""
        records = (self._cache.records.get(one.metadata.uid) for one, _ in pending_pod.claims)
        return not pending_pod.problem and all(
            one is None or one.state is ClaimState.PENDING for one in records
        )

    def _removed(self, gpus: set[int]) -> None:
        """End the reservations on GPUs that are about to be removed."""
        self._dispatcher.removed(gpus)
        self._queue_changed = True

    def drop_reservations(self) -> None:
        """End all reservations: another replica leads now, and reserves windows itself."""
        for line, _ in self.reservations:
            self.reserve(line, ())
        self.preemption.clear()
        self.gangs.clear()
        self._dispatcher.room_appeared()

    def _dequeue(self, key: str) -> None:
        number = self._numbers.pop(key, None)
        if number is not None:
            self._leave(number)
            self._message_schedule.forget(number)
            del self._waiting[number], self._since[number]
        self._view.hide(key)
        self._messages.pop(key, None)
        self.unreadable.forget(key)
        pod = self._pending.pods.get(key)
        if pod is None or pod.spec.node_name:
            self.unbound.forget(key)

    @property
    def next_time(self) -> float | None:
        """When the next pass is due although nothing changes before."""
        times = [self._backoff.next_time, self.unbound.next_time, self._message_schedule.next_time]
        times += [self.preemption.next_time, self.gangs.next_time]
        due = self._dispatcher.next_due
        if due is not None:
            times.append(self.clock() + due - self._cache.now())
        return min((time for time in times if time is not None), default=None)

    @property
    def waiting(self) -> int:
        """The number of pods in the queue."""
        return len(self._queue) + len(self._parked)

    # Scheduling

    def schedule(self) -> list[Decision]:
        """Choose devices for the pods that can be placed, in fair order."""
        began = time.perf_counter()
        for key in self._backoff.expire():
            if key in self._numbers and key not in self._writing:
                self._update_entry(key)
        # 1. Snapshot: if nothing has changed since the last cycle, no pod can be placed.
        snapshot = self._cache.freed, self._node_resources.version
        if snapshot != self._snapshot:
            self._snapshot = snapshot
            self._enter_again()
            self._dispatcher.room_appeared()
            self._queue_changed = True
        now = self._cache.now()
        self._decisions = []
        if self._queue_changed:
            # 2. Nominate: the queue offers pods in fair order, and steps 3 to 5 try each of them.
            self._serve(now)
            self._reserve_windows(now)
        elif (due := self._dispatcher.next_due) is not None and now >= due:
            self._reserve_windows(now)
        self._stats.deciding_seconds += time.perf_counter() - began
        self._stats.decided += len(self._decisions)
        self._stats.lines = self._queue.line_count
        self._stats.reservations = len(self.reservations)
        # 6. Show which pods wait, and why.
        for decision in self._decisions:
            self._view.hide(decision.pod)
        self._write_messages(now)
        for key, message in self._messages.items():
            self._view.show(self._waiting[self._numbers[key]], message)
        return self._decisions

    def _reserve_windows(self, now: Seconds) -> None:
        while self._dispatcher.grant(now):
            self._schedule_messages()
        self._queue_changed = False  # less room does not help any pod

    def _serve(self, now: Seconds) -> None:
        """Place what can be placed."""
        while self._queue_changed:  # a pod that turned out not to be ready held up its line
            self._queue_changed = False
            self._dispatcher.serve(now)
        for number in sorted(self._pinned):
            if self._least_excess(self._queue.ticket(number)) is None:
                for one in self.gangs.placed_with(number, self._waiting):
                    self._give_up_rest(one)
        self._schedule_messages()

    def _enter_again(self) -> None:
        """Renew tickets after namespaces were replaced or GPU models added."""
        state = self._cache.state
        known = state.tenants_by_name
        same = all(name in known and known[name].ref.id == i for name, i in self._tenants.items())
        if same and len(state.geometries) == self._models:
            return
        self._models = len(state.geometries)
        self._tenants.clear()
        for key, number in self._numbers.items():
            if key not in self._writing:
                self._enter(number)

    def _schedule_messages(self) -> None:
        self._message_schedule.start(len(self._queue) > self._queue.line_count)

    def _write_messages(self, now: Seconds) -> None:
        """Write why pods wait: for new ones, the first of each line, and the others in turn."""
        reasons = WaitingReasons(self._dispatcher, self._placer, now)
        for number in self._message_schedule.due(
            self._first_ones, (one.number for one in self._queue)
        ):
            pending_pod = self._waiting.get(number)
            if pending_pod is None or pending_pod.key in self._writing:
                continue
            message: PlacementMessage | None = None
            if number in self._queue:
                ticket = self._queue.ticket(number)
                said = unschedulable(pending_pod.pod)
                message = reasons.of(ticket, self._least_excess(ticket), said)
            else:
                message = not_ready(
                    pending_pod, self._cache.records, self._quarantine
                ) or self.gangs.message(pending_pod)
            if message is not None:
                self._messages[pending_pod.key] = message

    def _first_ones(self) -> Iterator[int]:
        return (line.head for line in self._queue.each_line() if line.head is not None)

    def finished(self, decision: Decision) -> None:
        """Note that the write of a decision has returned, with any outcome."""
        del self._writing[decision.pod]
        for grant in decision.grants:
            record = self._cache.records.get(grant.claim.metadata.uid)
            if record is not None:
                self._cache.records.conclude(record)
        self.requeue(decision.pod)

    # Callbacks of the dispatcher

    def over_quota(self, ticket: Ticket) -> Rejection | None:
        """Why a namespace may not have what a pod asks for, wherever it is placed."""
        if not all(map(self._may_be_tried, self.gangs.placed_with(ticket.number, self._waiting))):
            self._enter(ticket.number)  # parks it
            self._queue_changed = True
            return Rejection(ticket.request, Reason.QUOTA, "it is not ready")
        return self._least_excess(ticket)

    def _least_excess(self, ticket: Ticket) -> Rejection | None:
        request = ticket.request
        assert isinstance(request, PodRequest)
        namespace = self._waiting[ticket.number].pod.metadata.namespace
        return self._quota.least_excess(namespace, request)

    def accept(self, ticket: Ticket, instances: tuple[Instance, ...]) -> Rejection | None:
        """Give the devices to the pod; or refuse them, because they exceed the quota."""
        # 4. Check the quota of the namespace.
        pending_pod = self._waiting[ticket.number]
        parts = self._cache.state.parts(instances)
        over = self._quota.excess(pending_pod.pod.metadata.namespace, ticket.request, parts)
        if over is not None:
            return over
        # 5. Assume: the devices count as allocated until the write returns.
        self._pinned.discard(ticket.number)
        members, rest = self.gangs.placed_with(ticket.number, self._waiting), list(instances)
        self.gangs.stand(ticket.number, None)
        for one in members:
            count = len(one.requests)
            self._decisions.append(self._assume(one, tuple(rest[:count])))
            rest = rest[count:]
        for instance in instances:
            geometry = self._cache.state.cluster.node_of(instance.gpu).geometry
            self._queue.placed(geometry, self._since[ticket.number])
        for claim, _ in [claim for one in members for claim in one.claims]:
            for user in self._pending.users(claim.metadata.key):
                number = self._numbers.get(user)
                if number is not None and number != ticket.number and user not in self._writing:
                    self._enter(number)  # parks it: one of its claims is being written
        return None

    def reserve(self, line: LineKey, windows: tuple[Window, ...]) -> None:
        """Set the reserved windows of a line."""
        self.reservations.set(line, windows)
        self._queue_changed = True

    def lifetime_changed(self, pod: Pod) -> None:
        """Note a pod that may end at another time than was known."""
        for claim in self._pending.claims_of(pod):
            self._lifetimes.set_ends(claim)

    def ends(self, instance: Instance) -> Seconds | None:
        """When an instance ends; None if that is unknown."""
        return self._lifetimes.of(instance)

    def _assume(self, pending_pod: PendingPod, instances: tuple[Instance, ...]) -> Decision:
        node = home_of(self._cache.state.cluster.node_of(instances[0].gpu).name)
        pod, key = pending_pod.pod, pending_pod.key
        grants = []
        rest = list(instances)
        for claim, parameters in pending_pod.claims:
            count = len(parameters.devices)
            devices = self._cache.assume(claim, tuple(rest[:count]), {"pod": pod.metadata.name})
            rest = rest[count:]
            self._lifetimes.set_ends(claim)
            requests = tuple(device.request for device in parameters.devices)
            grants.append(Grant(claim, requests, devices))
        decision = Decision(
            key,
            node,
            tuple(grants),
            self._conflicts.expected(self.clock(), node) or self._pending.gang_key(pod) is not None,
            dict(self._pending.classes),
        )
        self._writing[key] = decision
        self.unbound.given(key, pod, node)
        names = ", ".join(device.device for grant in grants for device in grant.devices)
        self._messages[key] = PlacementMessage(True, PLACED, f"given {names} of node {node}")
        return decision

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

    def report_again(self) -> None:
        """Note that a message could not be reported yet, because another was a moment ago."""
        self._message_schedule.repeat(UPDATE_SECONDS)

    def take_messages(self) -> list[tuple[str, PlacementMessage]]:
        """The messages to pods since the last call."""
        messages, self._messages = self._messages, {}
        return list(messages.items())
