"""What waiting pods are told about why they wait, and which of them are told next.

After a pass, new pods and the first of each line get a message at once. The others follow in turn,
a few each second: every message is a write to the API, and in a long queue most are out of date
after the next pass.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime

from slicewise.core.request import Reason, Rejection
from slicewise.engine.dispatcher import Dispatcher
from slicewise.engine.queue import Ticket
from slicewise.engine.reservations import LineKey, Window
from slicewise.journal.entries import Seconds
from slicewise.kubernetes.claim_states import ClaimRecords, ClaimState
from slicewise.kubernetes.devices.pools import home_of
from slicewise.kubernetes.event_recorder import (
    COOLING,
    INVALID,
    NO_NODE,
    QUARANTINED,
    WORDS,
    PlacementMessage,
)
from slicewise.kubernetes.pending_claims import PendingPod
from slicewise.kubernetes.pod_placer import NoNode, PodPlacer
from slicewise.kubernetes.pod_request import PodRequest
from slicewise.kubernetes.quarantine import Quarantine

_EXACT = 10
_MORE_THAN = (10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 100_000)
"""The steps for longer lines: exact numbers would change every message when a line moves."""
EACH_SECOND = 20
"""The number of pods that get a message in turn, per second."""
_AT_ONCE = 256
"""The most new pods that get a message at a time."""


class WaitingReasons:
    """The reasons after one pass. The reason of a line is the same for all pods in it."""

    def __init__(self, dispatcher: Dispatcher, placer: PodPlacer, now: Seconds) -> None:
        self._dispatcher = dispatcher
        self._placer = placer
        self._now = now
        self._lines: dict[LineKey, tuple[str, str] | None] = {}

    def of(self, ticket: Ticket, over: Rejection | None, said: str) -> PlacementMessage | None:
        """Why a ticket waits; None if it has not been tried yet.

        ``over`` is how it exceeds the quota, ``said`` the message of kube-scheduler about the pod.
        """
        position = self._dispatcher.queue.position(ticket.number)
        if over is not None:
            return PlacementMessage(False, WORDS[Reason.QUOTA], over.detail + _ahead(position))
        own = self._dispatcher.windows_for(ticket)
        if own:
            text = self._reserved_for_it(own[0])
            return PlacementMessage(False, WORDS[Reason.OWN_RESERVATION], text + _ahead(position))
        line = ticket.line
        if line not in self._lines:
            self._lines[line] = self._of_line(ticket.request, said)
        found = self._lines[line]
        if found is None:
            return None
        word, text = found
        return PlacementMessage(False, word, text + _ahead(position))

    def _of_line(self, request: object, said: str) -> tuple[str, str] | None:
        assert isinstance(request, PodRequest)
        reserved = self._reserved(request)
        if reserved is not None:
            return WORDS[Reason.RESERVED], reserved
        refusal = self._dispatcher.refusal(request)
        if refusal is None:  # not tried, because the policy has no place for it
            refusal = self._placer.no_room(request)
        if refusal is None:
            return None
        if isinstance(refusal, NoNode):
            text = f"{refusal.detail} ({said})" if refusal.tried and said else refusal.detail
            return NO_NODE, text
        return WORDS[refusal.reason], refusal.detail

    def _reserved(self, request: PodRequest) -> str | None:
        """The message that the room for a request is reserved; None if it is not."""
        reservations = self._dispatcher.reservations
        windows = [window for _, pool in reservations for window in pool]
        if not windows:
            return None
        if len(request.devices) == 1:
            for window in windows:
                if self._placer.fits_on(window.gpu, request):
                    where = self._gpu(window)
                    return f"a window is open on {where}, reserved for a pod that has waited longer"
            return None
        with reservations.lifted(windows):
            node = self._placer.reserved_node(request)
        if node is None:
            return None
        return (
            f"node {node} has room for {request} together, but a window there is reserved for a "
            "pod that has waited longer"
        )

    def _reserved_for_it(self, window: Window) -> str:
        """Where a window is reserved for a pod, and when it opens."""
        geometry = self._placer.cluster.state(window.gpu).geometry
        start = geometry.placements[window.placement].start
        where = f"reserved on {self._gpu(window)} from slice {start}"
        if window.opens is not None and window.opens > self._now:
            opens = datetime.fromtimestamp(window.opens, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            return f"{where}; it opens at {opens} at the latest"
        blockers = len(self._dispatcher.reservations.blockers(window))
        instances = "1 instance ends" if blockers == 1 else f"{blockers} instances end"
        return f"{where}; it opens when {instances}, at a time that is not known"

    def _gpu(self, window: Window) -> str:
        node = self._placer.cluster.node_of(window.gpu)
        return f"GPU {window.gpu - node.gpus.start} of node {home_of(node.name)}"


def not_ready(
    pending_pod: PendingPod, records: ClaimRecords, quarantine: Quarantine
) -> PlacementMessage | None:
    """Why a pod is in no line; None if that changes by itself at once."""
    if pending_pod.problem:
        return PlacementMessage(False, INVALID, pending_pod.problem)
    for claim, _ in pending_pod.claims:
        uid, name = claim.metadata.uid, claim.metadata.name
        if why := quarantine.why(uid):
            text = f"claim {name!r} cannot be allocated: {why}"
            return PlacementMessage(False, QUARANTINED, text)
        record = records.get(uid)
        if record is not None and record.state is ClaimState.COOLING:
            text = (
                f"the former devices of claim {name!r} may still be in use, because a pod vanished "
                "without an end"
            )
            return PlacementMessage(False, COOLING, text)
    return None


class MessageSchedule:
    """Chooses the pods that get a message next."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._new: dict[int, None] = {}
        self._round: list[int] = []
        """The pods that still get a message in this round, the last first."""
        self._again = False
        """Whether another round follows this one."""
        self._first_due = False
        self._due = 0.0
        self._repeat: float | None = None
        """When the next round begins although nothing has changed."""

    def add(self, number: int) -> None:
        """Add a pod that is new or has changed."""
        self._new[number] = None

    def forget(self, number: int) -> None:
        """Remove a pod that no longer waits."""
        self._new.pop(number, None)

    def start(self, others: bool) -> None:
        """Update the first pod of each line, because the reasons may have changed.

        With ``others``, a round of all other pods follows.
        """
        self._first_due = True
        if others and not self._again:
            self._again = True
            if not self._round:
                self._due = self._clock() + 1.0

    def repeat(self, seconds: float) -> None:
        """Start another round after this many seconds."""
        if self._repeat is None:
            self._repeat = self._clock() + seconds

    @property
    def next_time(self) -> float | None:
        """When the next messages are due."""
        if self._new:
            return self._clock()
        return self._due if self._round or self._again else self._repeat

    def due(self, first: Callable[[], Iterator[int]], waiting: Iterable[int]) -> list[int]:
        """The pods that get a message now; ``first`` gives the first of each line."""
        if self._repeat is not None and self._clock() >= self._repeat:
            self._repeat = None
            self.start(True)
        chosen = dict.fromkeys(list(self._new)[:_AT_ONCE])
        for number in chosen:
            del self._new[number]
        if self._first_due:
            self._first_due = False
            chosen.update(dict.fromkeys(first()))
        now = self._clock()
        if now >= self._due and (self._round or self._again):
            if not self._round:
                self._round, self._again = list(waiting), False
                self._round.reverse()
            self._due = now + 1.0
            chosen.update(dict.fromkeys(self._round[-EACH_SECOND:]))
            del self._round[-EACH_SECOND:]
        return list(chosen)


def _ahead(position: int) -> str:
    """How many pods of the line are ahead."""
    if position == 0:
        return ""
    if position == 1:
        return "; 1 pod of this namespace that asks for the same is ahead"
    if position <= _EXACT:
        many = f"{position}"
    else:
        many = f"more than {_MORE_THAN[bisect_right(_MORE_THAN, position - 1) - 1]:,}"
    return f"; {many} pods of this namespace that ask for the same are ahead"
