"""Telling people why a pod waits: by a condition on the pod, and by an event."""

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
from slicewise.k8s.api import Pod
from slicewise.k8s.link import STRATEGIC, ConflictError, Link, MissingError
from slicewise.k8s.tally import Tally
from slicewise.k8s.times import now_precisely, now_text

CONDITION = "slicewise.dev/Placed"

log = logging.getLogger("slicewise.k8s")

WORDS = {
    Reason.CAPACITY: "Capacity",
    Reason.FRAGMENTED: "Fragmented",
    Reason.QUOTA: "Quota",
    Reason.UNKNOWN_PROFILE: "UnknownProfile",
}
"""Why a pod waits, as its condition says it."""
NO_NODE, INVALID, PLACED = "NoNode", "Invalid", "Placed"

UPDATE_SECONDS = 30.0
"""A reason that stays the same is told again so much later at the earliest, in its new words."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a pod should be told."""

    placed: bool
    reason: str
    text: str


class Teller:
    """Writes conditions and events, in threads of its own; nothing depends on its success."""

    def __init__(
        self,
        link: Link,
        instance: str,
        tally: Tally,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._instance = instance
        self._tally = tally
        self._clock = clock
        self._last: dict[str, tuple[Told, float]] = {}
        """By pod that waits: what it was told last, and when."""
        self._due: dict[str, tuple[Pod, Told]] = {}
        """By pod: what it is to be told next; a later word takes the place of an earlier one."""
        self._telling: set[str] = set()
        """The pods that a thread tells something, or is about to."""
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(2, "teller")

    def say(self, pod: Pod, told: Told) -> None:
        """Tell a pod, unless it knows; those who never had to wait are not told anything."""
        key = pod.metadata.key
        last = self._last.get(key)
        if told.placed:
            if last is None:
                return
            del self._last[key]
        else:
            if last is not None and (
                told == last[0]
                or (told.reason == last[0].reason and self._clock() < last[1] + UPDATE_SECONDS)
            ):
                return
            self._last[key] = told, self._clock()
        with self._lock:
            self._due[key] = pod, told
            if key in self._telling:
                return  # whoever tells it goes on with this
            self._telling.add(key)
        self._threads.submit(self._tell_all, key)

    def forget(self, pod: str) -> None:
        """A pod is gone."""
        self._last.pop(pod, None)

    def stop(self) -> None:
        """Say nothing more."""
        with self._lock:
            self._due.clear()
        self._threads.shutdown(cancel_futures=True)

    def _tell_all(self, key: str) -> None:
        """Tell a pod one thing after the other, so that the last word stands."""
        while True:
            with self._lock:
                if key not in self._due:
                    self._telling.discard(key)
                    return
                pod, told = self._due.pop(key)
            self._try(pod, told)

    def _try(self, pod: Pod, told: Told) -> None:
        try:
            self._tell(pod, told)
        except SlicewiseError as error:
            self._tally.untold += 1
            log.info("pod %s was not told why it waits: %s", pod.metadata.key, error)

    def _tell(self, pod: Pod, told: Told) -> None:
        """Set the pod's condition, and let an event say the same."""
        meta = pod.metadata
        path = f"/api/v1/namespaces/{meta.namespace}/pods/{meta.name}/status"
        condition = {
            "type": CONDITION,
            "status": "True" if told.placed else "False",
            "reason": told.reason,
            "message": told.text,
            "lastTransitionTime": now_text(),
        }
        body = {"metadata": {"uid": meta.uid}, "status": {"conditions": [condition]}}
        try:
            self._link.write("PATCH", path, body, STRATEGIC)
        except (ConflictError, MissingError):
            return  # it is gone, or another of its name is there
        body = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {
                "name": f"{meta.name[:200]}.{secrets.token_hex(8)}",
                "namespace": meta.namespace,
            },
            "eventTime": now_precisely(),
            "type": "Normal" if told.placed else "Warning",
            "reason": told.reason if told.placed else f"Waiting{told.reason}",
            "action": "Placing",
            "note": told.text[:1000],
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
        self._link.write("POST", path, body)
