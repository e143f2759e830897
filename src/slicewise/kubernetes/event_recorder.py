"""Reports why a pod waits: as a condition and an event of the pod, and on the dashboard."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from slicewise.core.errors import SlicewiseError
from slicewise.core.request import Reason
from slicewise.journal.entries import Seconds
from slicewise.kubernetes.api import Pod
from slicewise.kubernetes.api.common import now_text
from slicewise.kubernetes.api_client import STRATEGIC, ApiClient, ConflictError, NotFoundError
from slicewise.kubernetes.cache import ClusterCache
from slicewise.kubernetes.event_series import EventSeries, Regarding
from slicewise.kubernetes.pending_claims import PendingPod
from slicewise.kubernetes.prepare_failures import CONDITION as PREPARE_CONDITION
from slicewise.kubernetes.prepare_failures import FAILED, PREPARED, PrepareMessage
from slicewise.kubernetes.stats import Stats

CONDITION = "slicewise.dev/Placed"

log = logging.getLogger("slicewise.kubernetes")

WORDS = {
    Reason.CAPACITY: "Capacity",
    Reason.FRAGMENTED: "Fragmented",
    Reason.RESERVED: "Reserved",
    Reason.OWN_RESERVATION: "OwnReservation",
    Reason.QUOTA: "Quota",
    Reason.UNKNOWN_PROFILE: "UnknownProfile",
}
"""The reason in the condition of a waiting pod."""
NO_NODE, PLACED = "NoNode", "Placed"
INVALID, QUARANTINED, COOLING = "Invalid", "Quarantined", "CoolingDown"
TEMPLATE = "ClaimTemplate"

UNREADABLE = "AnnotationUnreadable"
UPDATE_SECONDS = 30.0
"""The shortest time between two messages with the same reason and different text."""
_AT_ONCE = 3
"""The most messages with different reasons in that time."""


@dataclass(frozen=True, slots=True)
class PlacementMessage:
    """Whether a pod was given devices, or why it waits."""

    placed: bool
    reason: str
    text: str


@dataclass(frozen=True, slots=True)
class _Message:
    """A condition of a pod, and an event with the same text."""

    condition: str
    positive: bool
    reason: str
    event: str
    action: str
    text: str


class EventRecorder:
    """Writes conditions and events in background threads; scheduling does not depend on them."""

    def __init__(
        self,
        api: ApiClient,
        instance: str,
        stats: Stats,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._stats = stats
        self._clock = clock
        self._events = EventSeries(api, instance, lambda: self._clock())
        self._last: dict[str, PlacementMessage] = {}
        """By waiting pod: the last message."""
        self._times: dict[str, deque[float]] = {}
        """By pod: when its last messages were written."""
        self._due: dict[tuple[str, str], tuple[Pod, _Message]] = {}
        """By pod and condition: the message to write next; a newer one replaces it."""
        self._writing: set[tuple[str, str]] = set()
        """The pods and conditions with a message that is being written or queued in a thread."""
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(2, "recorder")

    def report(self, pod: Pod, message: PlacementMessage) -> bool:
        """Report a message unless it is known; a pod that never waited gets none.

        Returns False if it must be reported again later: others were written too shortly ago.
        """
        key = pod.metadata.key
        last = self._last.get(key)
        if message.placed:
            if last is None:
                return True
            del self._last[key]
        elif message == last:
            return True
        elif not self._may_write(key, last is not None and message.reason == last.reason):
            return False
        else:
            self._last[key] = message
        reason = message.reason
        event = reason if message.placed else f"Waiting{reason}"
        self._write_later(
            pod, _Message(CONDITION, message.placed, reason, event, "Placing", message.text)
        )
        return True

    def _may_write(self, key: str, same: bool) -> bool:
        """Whether a pod may get a message now: a few at once, if they have different reasons."""
        times, now = self._times.setdefault(key, deque(maxlen=_AT_ONCE)), self._clock()
        recent = [time for time in times if now < time + UPDATE_SECONDS]
        if len(recent) >= (1 if same else _AT_ONCE):
            return False
        times.append(now)
        return True

    def report_prepare(self, pod: Pod, message: PrepareMessage) -> None:
        """Report whether the driver could prepare the devices of a pod."""
        reason = PREPARED if message.prepared else FAILED
        self._write_later(
            pod,
            _Message(
                PREPARE_CONDITION, message.prepared, reason, reason, "Preparing", message.text
            ),
        )

    def report_event(self, about: Regarding, reason: str, action: str, text: str) -> None:
        """Report a warning about an object, without a condition."""

        def write() -> None:
            try:
                self._events.record(about, True, reason, action, text)
            except SlicewiseError as error:
                self._stats.messages_lost += 1
                log.info("cannot report about %s %s: %s", about.kind, about.name, error)

        self._threads.submit(write)

    def _write_later(self, pod: Pod, message: _Message) -> None:
        key = pod.metadata.key, message.condition
        with self._lock:
            self._due[key] = pod, message
            if key in self._writing:
                return  # the thread that writes to this pod continues with this message
            self._writing.add(key)
        self._threads.submit(self._write_all, key)

    def forget(self, pod: str) -> None:
        """Drop what is known of a pod that was deleted or has ended."""
        self._last.pop(pod, None)
        self._times.pop(pod, None)

    def stop(self) -> None:
        """Write no more messages."""
        with self._lock:
            self._due.clear()
        self._threads.shutdown(cancel_futures=True)

    def _write_all(self, key: tuple[str, str]) -> None:
        """Write the messages to a pod in order: the newest must be the last."""
        while True:
            with self._lock:
                if key not in self._due:
                    self._writing.discard(key)
                    return
                pod, message = self._due.pop(key)
            self._try(pod, message)

    def _try(self, pod: Pod, message: _Message) -> None:
        try:
            self._write(pod, message)
        except SlicewiseError as error:
            self._stats.messages_lost += 1
            log.info("cannot report to pod %s: %s", pod.metadata.key, error)

    def _write(self, pod: Pod, message: _Message) -> None:
        """Set the condition of a pod, and record an event with the same text."""
        meta = pod.metadata
        path = f"/api/v1/namespaces/{meta.namespace}/pods/{meta.name}/status"
        condition = {
            "type": message.condition,
            "status": "True" if message.positive else "False",
            "reason": message.reason,
            "message": message.text,
            "lastTransitionTime": now_text(),
        }
        body = {"metadata": {"uid": meta.uid}, "status": {"conditions": [condition]}}
        try:
            self._api.write("PATCH", path, body, STRATEGIC)
        except (ConflictError, NotFoundError):
            return  # the pod was deleted, or replaced by another of the same name
        about = Regarding("Pod", meta.name, meta.uid, meta.namespace)
        self._events.record(
            about, not message.positive, message.event, message.action, message.text
        )


class PendingView:
    """Shows waiting claims on the dashboard; scheduling does not depend on it."""

    def __init__(
        self, cache: ClusterCache, expected: Callable[[PendingPod], Seconds | None]
    ) -> None:
        """``expected`` tells how long a pod will keep its devices, if that is known."""
        self._cache = cache
        self._expected = expected
        self._shown: dict[str, tuple[str, tuple[str, ...]]] = {}
        """By pod: the reason that is shown, and the uids of the claims."""

    def show(self, pending_pod: PendingPod, message: PlacementMessage) -> None:
        """Show the claims of a pod as waiting for a reason."""
        key = pending_pod.key
        shown = message.reason, tuple(claim.metadata.uid for claim, _ in pending_pod.claims)
        if message.placed or pending_pod.problem or self._shown.get(key) == shown:
            return
        self.hide(key)
        pod = pending_pod.pod
        for claim, parameters in pending_pod.claims:
            self._cache.wait(
                claim,
                [device.want for device in parameters.devices],
                pod.spec.priority,
                {"pod": pod.metadata.name},
                message.reason.lower(),
                message.text,
                self._expected(pending_pod),
            )
        self._shown[key] = shown

    def show_condition(self, pending_pod: PendingPod) -> None:
        """Show the reason that the leader wrote into the condition of a pod."""
        for condition in pending_pod.pod.status.conditions:
            if condition.type == CONDITION and condition.status == "False":
                message = PlacementMessage(False, condition.reason, condition.message)
                self.show(pending_pod, message)

    def hide(self, key: str) -> None:
        """Show the claims of a pod as waiting no longer; allocated ones stay in the cache."""
        for uid in self._shown.pop(key, ("", ()))[1]:
            self._cache.stop_waiting(uid)
