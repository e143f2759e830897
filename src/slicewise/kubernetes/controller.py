"""The controller: watches the API, updates the cache, and allocates devices to claims.

One thread makes all decisions; watches and writer threads post to its queue. All state comes from
the API, so the process may be killed at any step: it continues after a restart, or another replica
does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol

from slicewise.control.answers import RefusedError
from slicewise.control.commands import ChoosePolicy
from slicewise.control.policy_choices import PolicyChoices
from slicewise.engine.rehearsal import Rehearsal
from slicewise.engine.reservation_rules import ReservationRules
from slicewise.journal.entries import Seconds
from slicewise.kubernetes import cool_down, cooling_notes
from slicewise.kubernetes.allocation_writer import AllocationWriter, Done
from slicewise.kubernetes.api import Pod, ResourceClaim
from slicewise.kubernetes.api_client import ApiClient
from slicewise.kubernetes.cache import ClusterCache
from slicewise.kubernetes.claim_client import ClaimClient
from slicewise.kubernetes.conflicts import Conflicts, When
from slicewise.kubernetes.cool_down import CoolDown
from slicewise.kubernetes.cycle import Cycle
from slicewise.kubernetes.event_handlers import EventHandlers
from slicewise.kubernetes.event_recorder import (
    TEMPLATE,
    UNREADABLE,
    EventRecorder,
    PlacementMessage,
)
from slicewise.kubernetes.event_series import Regarding
from slicewise.kubernetes.evictions import EvictionClient, Evictions
from slicewise.kubernetes.informer import KINDS, Listed, Watch, WatchNotification
from slicewise.kubernetes.leader_election import LeaderElector
from slicewise.kubernetes.namespace_annotations import Unreadable
from slicewise.kubernetes.node_resources import NodeResources
from slicewise.kubernetes.pending_claims import PendingClaims, owning_pod
from slicewise.kubernetes.preemption import PreemptionRules
from slicewise.kubernetes.quarantine import Quarantine
from slicewise.kubernetes.stats import Stats
from slicewise.kubernetes.volumes import Volumes

log = logging.getLogger("slicewise.kubernetes")

_BATCH = 1000
"""The most queue items handled before a scheduling cycle."""
_RETRY_SECONDS = 0.5
"""The interval of retries while a leader cannot decide yet."""
_SHORTEST_SECONDS = 0.05
"""The shortest wait, for work that is due and blocked."""


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """The settings of a controller."""

    policy: str = "default"
    namespace: str = "slicewise"
    """The namespace of the lease."""
    lease: str = "slicewise"
    identity: str = "slicewise-0"
    lease_seconds: float = 15.0
    reservations: ReservationRules = field(default_factory=ReservationRules)
    settle_seconds: float = 5.0
    """How long a pod is held back while claims of other classes compete for its GPU."""
    unreadable_quota: Unreadable = "last"
    """The limit of a namespace in place of one that cannot be read."""
    hold_back: When = "auto"
    """When pods are held back until no other claim can have the same slices."""
    preemption: PreemptionRules = field(default_factory=PreemptionRules)
    cool_down: float = cool_down.SECONDS
    """How long slices are not given out again after a pod vanished; 0: not at all."""


class _Timed(Protocol):
    """A part of the controller with something to do at a time."""

    @property
    def next_time(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class Leads:
    """This replica has become the leader, or has lost the lease."""

    leads: bool


@dataclass(frozen=True, slots=True)
class Choose:
    """A rehearsal has ended; `told` gets why its winner is not used, or nothing."""

    rehearsal: Rehearsal
    told: Callable[[str], None]


class Controller:
    """One replica of the controller."""

    def __init__(
        self,
        api: ApiClient,
        options: ControllerOptions,
        clock: Callable[[], Seconds] = time.time,
        address: Callable[[], str] = lambda: "",
    ) -> None:
        self.options = options
        self.server = api.server
        self.stats = Stats()
        self.pending = PendingClaims()
        self.node_resources = NodeResources(Volumes())
        self.cool_down = CoolDown(options.cool_down, lambda: self._cycle.clock())
        self.cache = ClusterCache(options.policy, clock, address, self.cool_down)
        self.conflicts = Conflicts(
            options.settle_seconds,
            options.hold_back,
            records=self.cache.records,
            may_run=self._may_run,
        )
        self._inbox: SimpleQueue[WatchNotification | Done | Leads | Choose | None] = SimpleQueue()
        self.elector = LeaderElector(
            api,
            options.namespace,
            options.lease,
            options.identity,
            lambda leads: self._inbox.put(Leads(leads)),
            options.lease_seconds,
        )
        self._recorder = EventRecorder(api, options.identity, self.stats)
        self.quarantine = Quarantine(self.cache.records, lambda: self._cycle.clock())
        self._cycle = Cycle(
            self.cache,
            self.pending,
            self.node_resources,
            self.conflicts,
            self.quarantine,
            self.stats,
            options.reservations,
            preemption=options.preemption,
        )
        self._writer = AllocationWriter(
            ClaimClient(api, self.elector.valid),
            self.cache,
            self.pending,
            self._cycle,
            self.conflicts,
            self.quarantine,
            self.stats,
            self._inbox.put,
            lambda claim: self._handlers.claim_read(claim),
            lambda pod, text: self._tell(pod, text),
        )
        self._evictions = Evictions(
            EvictionClient(api, self.elector.valid),
            self._cycle.preemption,
            self._writer.in_background,
            self._recorder,
            self.stats,
        )
        self._handlers = EventHandlers(
            self.cache,
            self.pending,
            self.node_resources,
            self.conflicts,
            self._cycle,
            self._writer,
            self._recorder,
            self.stats,
            lambda: self.deciding,
            options.unreadable_quota,
        )
        self._watches = [Watch(api, kind, self._inbox.put) for kind in KINDS]
        self._fenced = 0
        """The last term in which this replica has fenced all former leaders."""
        self._fence_at = 0.0
        """The earliest time at which fencing is tried again."""
        self._decided = False
        """Whether the last step could decide."""
        self._stopping = False
        self.warnings: tuple[str, ...] = ()
        """What an operator should know although pods are served; replaced as a whole."""
        self.cache.journal.trouble = self._handlers.problem

    # Read from other threads

    @property
    def leads(self) -> bool:
        """Whether this replica is the leader."""
        return self.elector.leads

    @property
    def problem(self) -> str:
        """Why this replica could not serve as the leader, or as a leader does not; else empty."""
        if self.cache.journal.trouble or self.elector.trouble:
            return self.cache.journal.trouble or self.elector.trouble
        if not self.elector.leads:
            return ""
        if not self.deciding:
            why = (
                self._writer.fencing.problem or "writes of former leaders are being made impossible"
            )
            return f"this replica leads, but does not allocate yet: {why}"
        why = self._writer.missing_right
        return f"this replica leads, but may not allocate: {why}" if why else ""

    @property
    def waiting(self) -> int:
        """The number of pods that wait for devices."""
        return self._cycle.waiting

    @property
    def watches_down(self) -> int:
        """The number of failing watches."""
        return len(self._handlers.watch_errors)

    def _may_run(self, claim: ResourceClaim, node: str) -> bool:
        """Whether a pod with a claim might run on a node, by what does not change soon."""
        pods = [self.pending.pods[key] for key in self.pending.users(claim.metadata.key)]
        if owning_pod(claim) is None or not pods:
            return True  # any pod may come
        return any(not self.node_resources.excluded(pod, node) for pod in pods)

    # Running

    @property
    def ready(self) -> bool:
        """Whether every kind has been listed and all watches work."""
        return not self._handlers.problem

    @property
    def deciding(self) -> bool:
        """Whether this replica allocates devices now."""
        # In this order: the term must be the one with the valid lease.
        return self.ready and self.elector.valid() and self._fenced == self.elector.term

    def run(self) -> None:
        """Run until stopped."""
        for watch in self._watches:
            watch.start()
        self.elector.start()
        try:
            while not self._stopping:
                self.step(self._timeout())
        finally:
            for watch in self._watches:
                watch.stop()
            self._writer.stop()
            self._recorder.stop()
            self.elector.stop()
            self.cache.journal.close()

    def stop(self) -> None:
        """Finish writes in flight and release the lease; callable from any thread."""
        self._stopping = True
        self._inbox.put(None)

    def _timeout(self) -> float | None:
        """How long to wait for the queue; None: indefinitely."""
        owners: list[_Timed] = [self.cool_down]
        if self._decided:
            owners += [self.conflicts, self._cycle, self.quarantine, self._writer]
        due = [time for owner in owners if (time := owner.next_time) is not None]
        wait = max(_SHORTEST_SECONDS, min(due) - self._cycle.clock()) if due else None
        if not self._decided and self.elector.leads:  # a renewal of the lease posts no message
            return _RETRY_SECONDS if wait is None else min(wait, _RETRY_SECONDS)
        return wait

    def show(self, pages: Iterable[Listed]) -> None:
        """Apply lists of objects, for a look at the cluster; nothing is decided."""
        for page in pages:
            self._handle(page)
        self._handlers.read_pools()
        self._cycle.update_queue()

    def step(self, seconds: float | None) -> None:
        """Handle the queue, waiting up to ``seconds`` for its first item, then run a cycle."""
        try:
            self._handle(self._inbox.get(timeout=seconds))
            for _ in range(_BATCH):
                self._handle(self._inbox.get_nowait())
        except Empty:
            pass
        for claim in self.cache.take_cooled():
            for pod in self.pending.users(claim):
                self._cycle.requeue(pod)
        self._handlers.read_pools()
        deciding = self._decided = self.deciding
        if deciding and self._cycle.standby:
            self._writer.resume()
        self._cycle.standby = not deciding
        self._cycle.update_queue()
        self.cache.journal.trouble = self._handlers.problem
        if deciding:
            self.elector.note = cooling_notes.encode(self.cache.cooling())
            self._schedule()
        elif self.ready and self.elector.leads and self._fenced != self.elector.term:
            self._fence()
        self._update_warnings()

    def _update_warnings(self) -> None:
        """Note what an operator should know although pods are served."""
        self.stats.quarantined = len(self.quarantine.records())
        self.stats.cooling = self.cool_down.count
        sources = (
            self.quarantine.summary(),
            self._handlers.prepare_failures.summary(),
            self._handlers.degraded,
            self._writer.templates.summary(),
            self._evictions.problem,
        )
        self.warnings = tuple(filter(None, sources))

    def _handle(self, message: WatchNotification | Done | Leads | Choose | None) -> None:
        match message:
            case Done(call, result, error):
                call(result, error)
            case Leads(leads):
                self._lead(leads)
            case Choose(rehearsal, told):
                told(self._use(rehearsal))
            case None:  # posted by `stop` to end the wait
                pass
            case _:
                self._handlers.handle(message)

    def _tell(self, pod: Pod, text: str) -> None:
        """Tell a pod why it has no claim."""
        self._recorder.report(pod, PlacementMessage(False, TEMPLATE, text))

    def choose(self, rehearsal: Rehearsal, told: Callable[[str], None]) -> None:
        """Use the winner of a rehearsal; callable from any thread."""
        self._inbox.put(Choose(rehearsal, told))

    def _use(self, rehearsal: Rehearsal) -> str:
        """Use the winner of a rehearsal, or return why not."""
        try:
            PolicyChoices(self.cache).choose(ChoosePolicy(rehearsal))
        except RefusedError as refusal:
            return str(refusal)
        return ""

    def _schedule(self) -> None:
        """Run one scheduling cycle; writer threads post the outcome of its writes."""
        # 1. Resolve conflicts: give up allocations that contradict those of other claims.
        self._writer.resolve_conflicts()
        # 2. Confirm tentative allocations that no other claim can conflict with any more.
        self._writer.confirm_settled()
        # 3. Snapshot, nominate, filter and score, assume: see `Cycle.schedule`.
        decisions = self._cycle.schedule()
        # 4. Write the allocations of the pods that were placed.
        for decision in decisions:
            self._writer.write(decision)
        # 5. Evict pods for others of a higher priority, if the operator allows that.
        self._evictions.step()
        # 6. Revoke allocations that their pod cannot use.
        for claim in (*self._cycle.take_given_up(), *self._cycle.unbound.take_stuck()):
            self._writer.revoke(claim)
        for claim in self._cycle.gangs.take_stuck():
            self._writer.give_up(claim, "other pods of its gang cannot be placed")
        # 7. Repeat writes that the API refused a while ago; try quarantined claims again.
        self._writer.retry()
        self._writer.fencing.retry()
        # 8. Report to each pod why it waits, or that it was placed.
        for key, message in self._cycle.take_messages():
            if key in self.pending.pods and not self._recorder.report(
                self.pending.pods[key], message
            ):
                self._cycle.report_again()
        for key, text in self._cycle.unreadable.take().items():
            if key in self.pending.pods:
                meta = self.pending.pods[key].metadata
                about = Regarding("Pod", meta.name, meta.uid, meta.namespace)
                self._recorder.report_event(about, UNREADABLE, "Reading", text)

    # Leading

    def _lead(self, leads: bool) -> None:
        self._fence_at = 0.0
        self.stats.elections += leads
        if not leads:
            self._cycle.drop_reservations()
            self.quarantine.clear()
            self._writer.templates.clear()
            self._evictions.clear()
            log.info("lost the lease of the leader")

    def _fence(self) -> None:
        """Fence former leaders; a failed attempt is repeated after a pause."""
        now = self._cycle.clock()
        if not self._writer.fencing.running and now >= self._fence_at:
            self._fence_at = now + _RETRY_SECONDS
            self._writer.fencing.start(partial(self._fenced_now, self.elector.term))

    def _fenced_now(self, term: int, done: bool) -> None:
        if done and term == self.elector.term:
            for note in cooling_notes.decode(self.elector.note):
                self.cache.resume_cooling(note)
            self._fenced = term
            log.info(
                "leading as %s; the slices of %d claims cool down",
                self.options.identity,
                self.cool_down.count,
            )
