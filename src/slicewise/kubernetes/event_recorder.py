"""Reports why a pod waits: as a condition and an event of the pod, and on the dashboard."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from slicewise.core.errors import SlicewiseError
from slicewise.core.request import Reason
from slicewise.kubernetes.api import Pod
from slicewise.kubernetes.api.common import now_precise, now_text
from slicewise.kubernetes.api_client import STRATEGIC, ApiClient, ConflictError, NotFoundError
from slicewise.kubernetes.cache import ClusterCache
from slicewise.kubernetes.pending_claims import PendingPod
from slicewise.kubernetes.stats import Stats

CONDITION = "slicewise.dev/Placed"

log = logging.getLogger("slicewise.kubernetes")

WORDS = {
    Reason.CAPACITY: "Capacity",
    Reason.FRAGMENTED: "Fragmented",
    Reason.QUOTA: "Quota",
    Reason.UNKNOWN_PROFILE: "UnknownProfile",
}
"""The reason in the condition of a waiting pod."""
NO_NODE, INVALID, PLACED = "NoNode", "Invalid", "Placed"

UPDATE_SECONDS = 30.0
"""The shortest time between two messages with the same reason and different text."""


@dataclass(frozen=True, slots=True)
class PlacementMessage:
    """Whether a pod was given devices, or why it waits."""

    placed: bool
    reason: str
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
        self._instance = instance
        self._stats = stats
        self._clock = clock
        self._last: dict[str, tuple[PlacementMessage, float]] = {}
        """By waiting pod: the last message and its time."""
        self._due: dict[str, tuple[Pod, PlacementMessage]] = {}
        """By pod: the message to write next; a newer one replaces it."""
        self._writing: set[str] = set()
        """The pods with a message that is being written or queued in a thread."""
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(2, "recorder")

    def report(self, pod: Pod, message: PlacementMessage) -> None:
        """Report a message unless it is known; a pod that never waited gets none."""
        key = pod.metadata.key
        last = self._last.get(key)
        if message.placed:
            if last is None:
                return
            del self._last[key]
        else:
            if last is not None and (
                message == last[0]
                or (message.reason == last[0].reason and self._clock() < last[1] + UPDATE_SECONDS)
            ):
                return
            self._last[key] = message, self._clock()
        with self._lock:
            self._due[key] = pod, message
            if key in self._writing:
                return  # the thread that writes to this pod continues with this message
            self._writing.add(key)
        self._threads.submit(self._write_all, key)

    def forget(self, pod: str) -> None:
        """Drop what is known of a pod that was deleted or has ended."""
        self._last.pop(pod, None)

    def stop(self) -> None:
        """Write no more messages."""
        with self._lock:
            self._due.clear()
        self._threads.shutdown(cancel_futures=True)

    def _write_all(self, key: str) -> None:
        """Write the messages to a pod in order: the newest must be the last."""
        while True:
            with self._lock:
                if key not in self._due:
                    self._writing.discard(key)
                    return
                pod, message = self._due.pop(key)
            self._try(pod, message)

    def _try(self, pod: Pod, message: PlacementMessage) -> None:
        try:
            self._write(pod, message)
        except SlicewiseError as error:
            self._stats.messages_lost += 1
            log.info("cannot report to pod %s why it waits: %s", pod.metadata.key, error)

    def _write(self, pod: Pod, message: PlacementMessage) -> None:
        """Set the condition of a pod and create an event with the same text."""
        meta = pod.metadata
        path = f"/api/v1/namespaces/{meta.namespace}/pods/{meta.name}/status"
        condition = {
            "type": CONDITION,
            "status": "True" if message.placed else "False",
            "reason": message.reason,
            "message": message.text,
            "lastTransitionTime": now_text(),
        }
        body = {"metadata": {"uid": meta.uid}, "status": {"conditions": [condition]}}
        try:
            self._api.write("PATCH", path, body, STRATEGIC)
        except (ConflictError, NotFoundError):
            return  # the pod was deleted, or replaced by another of the same name
        body = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {
                "name": f"{meta.name[:200]}.{secrets.token_hex(8)}",
                "namespace": meta.namespace,
            },
            "eventTime": now_precise(),
            "type": "Normal" if message.placed else "Warning",
            "reason": message.reason if message.placed else f"Waiting{message.reason}",
            "action": "Placing",
            "note": message.text[:1000],
            "regarding": {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": meta.name,
                "namespace": meta.namespace,
                "uid": meta.uid,
            },
            "reportingController": "slicewise.dev/controller",
            "reportingInstance": self._instance,
        }
        path = f"/apis/events.k8s.io/v1/namespaces/{meta.namespace}/events"
        self._api.write("POST", path, body)


class PendingView:
    """Shows waiting claims on the dashboard; scheduling does not depend on it."""

    def __init__(self, cache: ClusterCache) -> None:
        self._cache = cache
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
