"""Preemption: which pods are evicted so that a pod of a higher priority gets a window.

Off by default: only pods of the named priority classes preempt. Victims always have a lower
priority, so pods never evict one another in turn. The window is reserved before the first of them
is evicted. A new leader counts pods that are ending already as gone, so it continues with the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from slicewise.core.request import Reason
from slicewise.core.states import ILLEGAL
from slicewise.engine.dispatcher import Dispatcher, Tenancy
from slicewise.engine.queue import Line, Ticket
from slicewise.engine.reservations import LineKey, Window
from slicewise.engine.victims import ClearedWindow, Victim, cleared_windows
from slicewise.journal.entries import Seconds
from slicewise.kubernetes.api import Pod, PodDisruptionBudget
from slicewise.kubernetes.api.common import parse_time
from slicewise.kubernetes.backoff import FIRST_SECONDS, MOST_SECONDS
from slicewise.kubernetes.cache import ClusterCache
from slicewise.kubernetes.node_rules import labels_match
from slicewise.kubernetes.pending_claims import PendingClaims
from slicewise.kubernetes.pod_placer import NoNode, PodPlacer
from slicewise.kubernetes.pod_request import PodRequest

RETRY_SECONDS = 5.0
"""The pause before a refused eviction is tried again."""
PATIENCE_SECONDS = 60.0
"""How long a window stays reserved after the victims' time to end is over."""
_GRACE_SECONDS = 30
"""Kubernetes' default of ``terminationGracePeriodSeconds``."""
_MOST_ATTEMPTS = 32
"""The most pods for which others are being evicted at a time."""
_MOST_RESTING = 1000
_FOR_ROOM = (Reason.CAPACITY, Reason.FRAGMENTED, Reason.RESERVED)


@dataclass(frozen=True, slots=True)
class PreemptionRules:
    """Which pods may preempt."""

    classes: frozenset[str] = frozenset()
    """The names of their priority classes."""


class Rank(NamedTuple):
    """How bad it is to take a window: the smallest is taken."""

    pods: int
    priority: int
    """The highest among the victims."""
    oldest: float
    """Since when the longest-running victim has run, negated."""
    slices: int
    waste: object
    gpu: int
    start: int


@dataclass(slots=True)
class Attempt:
    """A pod for which others are evicted, and the window that is reserved for it."""

    pod: Pod
    line: LineKey
    window: Window
    victims: tuple[Pod, ...]
    until: float
    evict_at: float = -math.inf
    evicted: set[str] = field(default_factory=set)
    """The uids of the victims whose eviction was accepted."""


class Preemption:
    """Chooses victims, and follows each attempt until its pod is placed or it has failed."""

    def __init__(
        self,
        cache: ClusterCache,
        pending: PendingClaims,
        placer: PodPlacer,
        dispatcher: Dispatcher,
        tenancy: Tenancy,
        pod_of: Callable[[int], Pod],
        ticket_of: Callable[[str], Ticket | None],
        rules: PreemptionRules,
        clock: Callable[[], float],
    ) -> None:
        """``pod_of`` gives the pod of a ticket, ``ticket_of`` the ticket of a pod that waits."""
        self._rules = rules
        self._cache = cache
        self._pending = pending
        self._placer = placer
        self._dispatcher = dispatcher
        self._queue = dispatcher.queue
        self._reservations = dispatcher.reservations
        self._tenancy = tenancy
        self._pod_of = pod_of
        self._ticket_of = ticket_of
        self._clock = clock
        self.attempts: dict[str, Attempt] = {}
        """By uid of the pod that preempts."""
        self._resting: dict[str, tuple[float, float]] = {}
        """By uid: until when a pod does not try again, and how long it rests."""

    @property
    def enabled(self) -> bool:
        """Whether any pod may preempt."""
        return bool(self._rules.classes)

    @property
    def next_time(self) -> float | None:
        """When an attempt continues or ends, or a pod tries again, although nothing changes."""
        now = self._clock()
        times = [one.until for one in self.attempts.values()]
        times += [one.evict_at for one in self.attempts.values() if one.evict_at > now]
        times += [until for until, _ in self._resting.values() if until > now]
        return min(times, default=None)

    # Choosing

    def next_pod(self) -> Pod | None:
        """The next pod, in fair order, that may preempt and would find victims."""
        if not self.enabled or len(self.attempts) >= _MOST_ATTEMPTS:
            return None
        lines = [line for line in self._queue.each_line() if self._ticket(line) is not None]
        for line in sorted(lines, key=self._queue.order_of):
            ticket = self._ticket(line)
            if ticket is None or self._tenancy.over_quota(ticket) is not None:
                continue
            pod = self._pod_of(ticket.number)
            if self._best(ticket, pod, None) is not None:
                return pod
            self._rest(pod.metadata.uid, FIRST_SECONDS)
        return None

    def choose(self, pod: Pod, budgets: Iterable[PodDisruptionBudget]) -> bool:
        """Choose the victims of a pod within these budgets, and reserve their window.

        Returns whether there are any. If not, the pod rests for a while.
        """
        ticket = self._waiting(pod)
        if ticket is None or ticket != self._next_of(ticket.line):
            return False
        found = self._best(ticket, pod, list(budgets))
        if found is None:
            self._rest(pod.metadata.uid, FIRST_SECONDS)
            return False
        uids = {victim.id for victim in found.victims}
        victims = tuple(one for one in self._pending.pods.values() if one.metadata.uid in uids)
        grace = float(max(map(_grace, victims)))
        window = Window(found.gpu, found.placement.number, self._cache.now() + grace)
        line = ticket.line
        self._tenancy.reserve(line, self._windows_with(line, window))
        until = self._clock() + grace + PATIENCE_SECONDS
        self.attempts[pod.metadata.uid] = Attempt(pod, line, window, victims, until)
        return True

    def _next_of(self, key: LineKey) -> Ticket | None:
        line = self._queue.line(key)
        return None if line is None else self._ticket(line)

    def _ticket(self, line: Line) -> Ticket | None:
        """The first pod of a line that may preempt and does not do so yet."""
        active = sum(one.line == line.key for one in self.attempts.values())
        number = line.at(active)
        if number is None:
            return None
        ticket, spec = self._queue.ticket(number), self._pod_of(number).spec
        uid = self._pod_of(number).metadata.uid
        may = (
            spec.priority_class_name in self._rules.classes
            and spec.preemption_policy != "Never"
            and uid not in self.attempts
            and self._resting.get(uid, (0.0, 0.0))[0] <= self._clock()
            and self._lacks_room(ticket)
        )
        return ticket if may else None

    def _waiting(self, pod: Pod) -> Ticket | None:
        """The ticket of a pod that still waits."""
        ticket = self._ticket_of(pod.metadata.key)
        same = ticket and self._pod_of(ticket.number).metadata.uid == pod.metadata.uid
        return ticket if same else None

    def _lacks_room(self, ticket: Ticket) -> bool:
        """Whether a pod with one device waits for nothing but slices."""
        request = ticket.request
        assert isinstance(request, PodRequest)
        if len(request.devices) != 1:
            return False
        refusal = self._dispatcher.refusal(request) or self._placer.no_room(request)
        return (
            refusal is not None and not isinstance(refusal, NoNode) and refusal.reason in _FOR_ROOM
        )

    def _best(
        self, ticket: Ticket, pod: Pod, budgets: list[PodDisruptionBudget] | None
    ) -> ClearedWindow | None:
        """The window with the fewest victims, of the lowest priority, the youngest."""
        request = ticket.request
        assert isinstance(request, PodRequest)
        assert request.rules is not None
        victims, leaving = self._victims(ticket, pod)
        pods = {one.metadata.uid: one for one in self._pending.pods.values()}
        cluster = self._cache.state.cluster
        best: tuple[Rank, ClearedWindow] | None = None
        with self._cache.pools.tolerating(request.rules.tolerations):
            gpus = sorted({one.gpu for victim in victims for one in victim.instances})
            usable = [gpu for gpu in gpus if self._may_use(gpu, ticket.line)]
            for found in cleared_windows(cluster, request, usable, victims):
                costly = [one for one in found.victims if one.id not in leaving]
                rank = Rank(
                    len(costly),
                    max((one.priority for one in costly), default=0),
                    -min((one.since for one in costly), default=0.0),
                    sum(one.slices for one in costly),
                    found.waste,
                    found.gpu,
                    found.placement.start,
                )
                if best is not None and best[0] <= rank:
                    continue
                ended = [one for victim in found.victims for one in victim.instances]
                if (
                    cluster.once_cleared(found.gpu, found.placement.number) != ILLEGAL
                    and self._guarantees_hold(ticket.tenant, costly)
                    and (budgets is None or _allow(budgets, [pods[one.id] for one in costly]))
                    and self._placer.suits(request, found.gpu, ended)
                ):
                    best = rank, found
        return None if best is None else best[1]

    def _may_use(self, gpu: int, line: LineKey) -> bool:
        held = self._reservations.on(gpu)
        taken = any(one.window.gpu == gpu for one in self.attempts.values())
        mine = held is None or (held[0] == line and not taken)
        return mine and self._cache.state.cluster.takes_instances(gpu)

    def _victims(self, ticket: Ticket, pod: Pod) -> tuple[list[Victim], set[str]]:
        """The pods that a pod may evict, with those that are ending already."""
        state = self._cache.state
        most = state.shares.entitlement(ticket.tenant).max_priority
        elsewhere = min(pod.spec.priority, most)
        victims: list[Victim] = []
        leaving: set[str] = set()
        for one in self._pending.pods.values():
            meta = one.metadata
            same = meta.namespace == pod.metadata.namespace
            below = one.spec.priority < (pod.spec.priority if same else elsewhere)
            ending = meta.deletion_timestamp is not None
            if not (below or ending):
                continue
            claims = [c for c in self._pending.claims_of(one) if c.status.allocation is not None]
            alone = all(
                self._pending.is_ours(claim)
                and self._pending.users(claim.metadata.key) == (meta.key,)
                for claim in claims
            )
            ids = [n for claim in claims for n in state.instances.get(claim.metadata.uid, ())]
            if not ids or not alone:
                continue
            since = parse_time(one.status.start_time or meta.creation_timestamp, 0.0)
            tenant = self._cache.tenant(meta.namespace).ref.id
            instances = tuple(map(state.cluster.instance, ids))
            victims.append(Victim(meta.uid, tenant, one.spec.priority, since, instances))
            if ending:
                leaving.add(meta.uid)
        return victims, leaving

    def _guarantees_hold(self, tenant: str, victims: Iterable[Victim]) -> bool:
        """Whether no other namespace falls below its guarantee without these pods."""
        shares = self._cache.state.shares
        lost: Counter[str] = Counter()
        for victim in victims:
            if victim.tenant != tenant:
                lost[victim.tenant] += victim.slices
        return all(
            shares.slices(other) - slices >= shares.entitlement(other).guarantee
            for other, slices in lost.items()
        )

    def _windows_with(self, line: LineKey, window: Window) -> tuple[Window, ...]:
        """The windows of a line with another; it replaces one if all pods have theirs."""
        pool = [one for one in self._reservations.of(line) if one.gpu != window.gpu]
        waiting = self._queue.line(line)
        fixed = {one.window.gpu for one in self.attempts.values()}
        if waiting is not None and len(pool) >= len(waiting):
            pool.remove([one for one in pool if one.gpu not in fixed][-1])
        return (*pool, window)

    # Attempts

    def to_evict(self) -> list[tuple[Attempt, list[Pod]]]:
        """The victims to evict now; those that were refused are returned again later."""
        due = []
        now = self._clock()
        for attempt in self.attempts.values():
            left = [one for one in attempt.victims if self._stays(one, attempt)]
            if left and attempt.evict_at <= now:
                attempt.evict_at = now + RETRY_SECONDS
                due.append((attempt, left))
        return due

    def _stays(self, victim: Pod, attempt: Attempt) -> bool:
        known = self._pending.pods.get(victim.metadata.key)
        return (
            known is not None
            and known.metadata.uid == victim.metadata.uid
            and known.metadata.deletion_timestamp is None
            and known.metadata.uid not in attempt.evicted
        )

    def check(self) -> None:
        """End the attempts whose pod waits no longer, or whose window is lost or not used."""
        for uid, attempt in list(self.attempts.items()):
            ticket = self._waiting(attempt.pod)
            if ticket is None or ticket.line != attempt.line:  # placed, deleted, or changed
                del self.attempts[uid]
            elif all(one.gpu != attempt.window.gpu for one in self._reservations.of(attempt.line)):
                self._fail(uid)
            elif attempt.until <= self._clock():
                self.abandon(uid)

    def abandon(self, uid: str) -> None:
        """Give up an attempt: release its window, and let the pod rest."""
        attempt = self.attempts.get(uid)
        if attempt is None:
            return
        pool = self._reservations.of(attempt.line)
        left = tuple(one for one in pool if one.gpu != attempt.window.gpu)
        self._fail(uid)
        self._tenancy.reserve(attempt.line, left)
        self._dispatcher.room_appeared()

    def _fail(self, uid: str) -> None:
        """Forget an attempt; the next one of its pod comes later each time."""
        del self.attempts[uid]
        span = self._resting.get(uid, (0.0, 0.0))[1]
        self._rest(uid, min(2 * span, MOST_SECONDS) if span else FIRST_SECONDS)

    def rest(self, pod: Pod) -> None:
        """Let a pod try again later."""
        self._rest(pod.metadata.uid, FIRST_SECONDS)

    def _rest(self, uid: str, seconds: float) -> None:
        if len(self._resting) >= _MOST_RESTING:  # most are of pods that are gone
            now = self._clock()
            self._resting = {one: rest for one, rest in self._resting.items() if rest[0] > now}
        self._resting[uid] = self._clock() + seconds, seconds

    def clear(self) -> None:
        """Forget everything: another replica leads now."""
        self.attempts.clear()
        self._resting.clear()


def _grace(pod: Pod) -> Seconds:
    """How long a pod may take to end."""
    grace = pod.spec.termination_grace_period_seconds
    return float(_GRACE_SECONDS if grace is None else grace)


def _allow(budgets: Iterable[PodDisruptionBudget], victims: Iterable[Pod]) -> bool:
    """Whether budgets allow the disruption of all these pods together."""
    victims = list(victims)
    for budget in budgets:
        selector = budget.spec.selector
        if selector is None:
            continue
        hit = sum(
            one.metadata.namespace == budget.metadata.namespace
            and labels_match(selector, one.metadata.labels)
            for one in victims
        )
        if hit > max(0, budget.status.disruptions_allowed):
            return False
    return True
