"""Events of the API: repeated ones become a series, and all together are limited.

As in the official clients, events about the same object with the same type, reason and action are
one Event with a count, which is updated at most every 30 seconds. After ten minutes, a new Event
is created with the text of then.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slicewise.kubernetes.api.common import now_precise
from slicewise.kubernetes.api_client import MERGE, ApiClient, NotFoundError

UPDATE_SECONDS = 30.0
"""The shortest time between two updates of a series."""
RENEW_SECONDS = 600.0
"""How long an Event is updated before a new one is created."""
_MOST_SERIES = 20_000


@dataclass(frozen=True, slots=True)
class Regarding:
    """The object that an event is about."""

    kind: str
    name: str
    uid: str
    namespace: str = ""
    api_version: str = "v1"


@dataclass(slots=True)
class _Series:
    path: str
    begun: float
    written: float
    count: int = 1


class EventSeries:
    """Writes events; its methods block and are thread-safe."""

    def __init__(self, api: ApiClient, instance: str, clock: Callable[[], float]) -> None:
        self._api = api
        self._instance = instance
        self._clock = clock
        self._lock = threading.Lock()
        self._series: dict[tuple[str, str, str], _Series] = {}
        """By uid of the object, type and reason; the longest unused first."""

    def record(self, about: Regarding, warning: bool, reason: str, action: str, note: str) -> None:
        """Create an event, or count it in a series."""
        key = about.uid, "Warning" if warning else "Normal", reason
        with self._lock:
            now = self._clock()
            one = self._series.pop(key, None)
            if one is not None and now < one.begun + RENEW_SECONDS:
                self._series[key] = one
                one.count += 1
                if now < one.written + UPDATE_SECONDS:
                    return  # the next update counts it
                one.written = now
                count, path = one.count, one.path
            else:
                count, path = 1, ""
        if path:
            series = {"count": count, "lastObservedTime": now_precise()}
            try:
                self._api.write("PATCH", path, {"series": series}, MERGE)
                return
            except NotFoundError:  # the API deletes events after an hour
                pass
        path = self._create(about, key[1], reason, action, note)
        with self._lock:
            self._series[key] = _Series(path, now, now)
            while len(self._series) > _MOST_SERIES:
                del self._series[next(iter(self._series))]

    def _create(self, about: Regarding, kind: str, reason: str, action: str, note: str) -> str:
        # Events about objects without a namespace belong into the default namespace.
        namespace = about.namespace or "default"
        name = f"{about.name[:200]}.{secrets.token_hex(8)}"
        regarding: dict[str, Any] = {
            "apiVersion": about.api_version,
            "kind": about.kind,
            "name": about.name,
            "uid": about.uid,
        }
        if about.namespace:
            regarding["namespace"] = about.namespace
        body = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "eventTime": now_precise(),
            "type": kind,
            "reason": reason,
            "action": action,
            "note": note[:1000],
            "regarding": regarding,
            "reportingController": "slicewise.dev/controller",
            "reportingInstance": self._instance,
        }
        path = f"/apis/events.k8s.io/v1/namespaces/{namespace}/events"
        self._api.write("POST", path, body)
        return f"{path}/{name}"
