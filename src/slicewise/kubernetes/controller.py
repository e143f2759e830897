"""The controller: watches the API, updates the cache, and allocates devices to claims.

One thread makes all decisions; watches and writer threads post to its queue. All state comes from
the API, so the process may be killed at any step: it continues after a restart, or another replica
does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue

from slicewise.engine.queue import Discipline
from slicewise.journal.entries import Seconds
from slicewise.kubernetes.allocation_writer import AllocationWriter, Done
from slicewise.kubernetes.api_client import ApiClient
from slicewise.kubernetes.cache import ClusterCache
from slicewise.kubernetes.claim_client import ClaimClient
from slicewise.kubernetes.conflicts import Conflicts, When
from slicewise.kubernetes.cycle import Cycle
from slicewise.kubernetes.event_handlers import EventHandlers
from slicewise.kubernetes.event_recorder import EventRecorder
from slicewise.kubernetes.informer import KINDS, Watch, WatchNotification
from slicewise.kubernetes.leader_election import LeaderElector
from slicewise.kubernetes.node_resources import NodeResources
from slicewise.kubernetes.pending_claims import PendingClaims
from slicewise.kubernetes.stats import Stats

log = logging.getLogger("slicewise.kubernetes")

_BATCH = 1000
"""The most queue items handled before a scheduling cycle."""
_RETRY_SECONDS = 0.5
"""The interval of retries while a leader cannot decide yet."""
_SHORTEST_SECONDS = 0.05
"""The shortest wait, for work that is due and blocked."""


@dataclass(frozen=True, slots=True)
class Options:
    """The settings of a controller."""

    policy: str = "default"
    namespace: str = "slicewise"
    """The namespace of the lease."""
    lease: str = "slicewise"
    identity: str = "slicewise-0"
    lease_seconds: float = 15.0
    discipline: Discipline = field(default_factory=lambda: Discipline(256, 1024))
    settle_seconds: float = 5.0
    """How long a pod is held back while claims of other classes compete for its GPU."""
    hold_back: When = "always"
    """When pods are held back until no other claim can have the same slices."""


@dataclass(frozen=True, slots=True)
class Leads:
    """This replica has become the leader, or has lost the lease."""

    leads: bool


class Controller:
    """One replica of the controller."""

    def __init__(
        self,
        api: ApiClient,
        options: Options,
        clock: Callable[[], Seconds] = time.time,
        address: Callable[[], str] = lambda: "",
    ) -> None:
        self.options = options
        self.server = api.server
        self.stats = Stats()
        self.pending = PendingClaims()
        self.node_resources = NodeResources()
        self.cache = ClusterCache(options.policy, clock, address)
        self.conflicts = Conflicts(
            options.settle_seconds, options.hold_back, records=self.cache.records
        )
        self._inbox: SimpleQueue[WatchNotification | Done | Leads | None] = SimpleQueue()
        self.elector = LeaderElector(
            api,
            options.namespace,
            options.lease,
            options.identity,
            lambda leads: self._inbox.put(Leads(leads)),
            options.lease_seconds,
        )
        self._recorder = EventRecorder(api, options.identity, self.stats)
        self._cycle = Cycle(
            self.cache,
            self.pending,
            self.node_resources,
            self.conflicts,
            self.stats,
            options.discipline,
        )
        self._writer = AllocationWriter(
            ClaimClient(api, self.elector.valid),
            self.cache,
            self.pending,
            self._cycle,
            self.conflicts,
            self.stats,
            self._inbox.put,
            lambda claim: self._handlers.claim_read(claim),
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
        )
        self._watches = [Watch(api, kind, self._inbox.put) for kind in KINDS]
        self._fenced = 0
        """The last term in which this replica has fenced all former leaders."""
        self._fence_at = 0.0
        """The earliest time at which fencing is tried again."""
        self._decided = False
        """Whether the last step could decide."""
        self._stopping = False
        self.cache.journal.trouble = self._handlers.problem

    # Read from other threads

    @property
    def leads(self) -> bool:
        """Whether this replica is the leader."""
        return self.elector.leads

    @property
    def problem(self) -> str:
        """Why the cache may be out of date or leader election fails; empty if neither is so."""
        return self.cache.journal.trouble or self.elector.trouble

    @property
    def waiting(self) -> int:
        """The number of pods that wait for devices."""
        return self._cycle.waiting

    @property
    def watches_down(self) -> int:
        """The number of failing watches."""
        return len(self._handlers.watch_errors)

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
        if not self._decided:  # a renewal of the lease posts no message
            return _RETRY_SECONDS if self.elector.leads else None
        due = [t for t in (self.conflicts.next_time, self._cycle.next_time) if t is not None]
        return max(_SHORTEST_SECONDS, min(due) - self._cycle.clock()) if due else None

    def step(self, seconds: float | None) -> None:
        """Handle the queue, waiting up to ``seconds`` for its first item, then run a cycle."""
        try:
            self._handle(self._inbox.get(timeout=seconds))
            for _ in range(_BATCH):
                self._handle(self._inbox.get_nowait())
        except Empty:
            pass
        self._handlers.read_pools()
        deciding = self._decided = self.deciding
        if deciding and self._cycle.standby:
            self._writer.resume()
        self._cycle.standby = not deciding
        self._cycle.update_queue()
        self.cache.journal.trouble = self._handlers.problem
        if deciding:
            self._schedule()
        elif self.ready and self.elector.leads and self._fenced != self.elector.term:
            self._fence()

    def _handle(self, message: WatchNotification | Done | Leads | None) -> None:
        match message:
            case Done(call, result, error):
                call(result, error)
            case Leads(leads):
                self._lead(leads)
            case None:  # posted by `stop` to end the wait
                pass
            case _:
                self._handlers.handle(message)

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
        # 5. Revoke allocations that their pod cannot use.
        for claim in (*self._cycle.take_given_up(), *self._cycle.take_stuck()):
            self._writer.revoke(claim)
        # 6. Report to each pod why it waits, or that it was placed.
        for key, message in self._cycle.take_messages():
            if key in self.pending.pods:
                self._recorder.report(self.pending.pods[key], message)

    # Leading

    def _lead(self, leads: bool) -> None:
        self._fence_at = 0.0
        self.stats.elections += leads
        if not leads:
            log.info("lost the lease of the leader")

    def _fence(self) -> None:
        """Fence former leaders; a failed attempt is repeated after a pause."""
        now = self._cycle.clock()
        if not self._writer.fencing and now >= self._fence_at:
            self._fence_at = now + _RETRY_SECONDS
            self._writer.fence(self.options.identity, partial(self._fenced_now, self.elector.term))

    def _fenced_now(self, term: int, done: bool) -> None:
        if done and term == self.elector.term:
            self._fenced = term
            # A former leader may have seen rivals.
            self.conflicts.last_seen = self._cycle.clock()
            log.info("leading as %s", self.options.identity)
