"""Leader election: one replica decides; the others watch and are ready to take over.

The lease is a Lease object. The holder measures its duration from before it sends a renewal, a
candidate from when it sees the renewal. So the lease expires for the holder first. Their clocks may
differ, as long as they run at about the same speed.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from slicewise.core.errors import SlicewiseError
from slicewise.kubernetes.api import Lease
from slicewise.kubernetes.api.common import now_precise
from slicewise.kubernetes.api_client import ApiClient, ConflictError, NotFoundError

SECONDS = 15.0
NOTE = "slicewise.dev/cooling"
"""The annotation of the lease with the note for the next leader."""
_MARGIN = 0.1
"""The share of the duration that a holder does not use, for clocks of different speed."""


def running_clock() -> float:
    """A clock that also runs while the process is stopped or the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaderElector:
    """Acquires and renews a lease in a background thread."""

    def __init__(
        self,
        api: ApiClient,
        namespace: str,
        name: str,
        identity: str,
        changed: Callable[[bool], None],
        seconds: float = SECONDS,
        clock: Callable[[], float] = running_clock,
    ) -> None:
        """``changed`` is called by the thread when this replica becomes or ceases to be leader."""
        self._api = api
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._namespace = namespace
        self._name = name
        self.identity = identity
        self._changed = changed
        self._seconds = seconds
        self._clock = clock
        self._until = 0.0
        self._seen: tuple[str, float] = "", 0.0
        """The last seen version of the lease, and when it was first seen."""
        self.leads = False
        self.term = 0
        """How often this replica has become the leader."""
        self.trouble = ""
        self.holder = ""
        """The last known holder of the lease."""
        self.note = ""
        """What the lease carries for the next leader: at first, what the former one left."""
        self._lock = threading.Lock()
        """Guards ``_until``: a renewal must not overlook a lapse that `valid` has reported."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def valid(self) -> bool:
        """Whether this replica holds the lease now, by its own clock."""
        with self._lock:
            return self.leads and self._clock() < self._until

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Release the lease: another replica can take over at once."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.beat()
            self._stop.wait(self._seconds / 5)
        if self.leads:
            self._turn(False)
            try:
                self._release()
            except SlicewiseError as error:
                self.trouble = str(error)

    def beat(self) -> None:
        """Renew the lease, or try to acquire it."""
        try:
            self._try()
            self.trouble = ""
        except Exception as error:  # the thread must not end
            self.trouble = str(error) or type(error).__name__
        if self._clock() >= self._until:
            self._turn(False)

    def _try(self) -> None:
        began = self._clock()
        try:
            lease = self._api.get(f"{self._path}/{self._name}", Lease)
        except NotFoundError:
            self._turn(False)
            self._write("POST", self._path, None)
            self._hold(began)
            return
        self.holder = lease.spec.holder_identity or ""
        mine = self.holder == self.identity
        if lease.metadata.resource_version != self._seen[0]:
            self._seen = lease.metadata.resource_version, began
        over = self._clock() >= self._seen[1] + (lease.spec.lease_duration_seconds or self._seconds)
        if not mine:
            self._turn(False)  # even if it is free now: another replica may have led meanwhile
        elif not self.leads:
            # A former process held it under the same name: wait until it expires.
            mine = over
        if not (mine or over or not self.holder):
            return
        if not self.leads:
            self.note = lease.metadata.annotations.get(NOTE, "")
        try:
            self._write("PUT", f"{self._path}/{self._name}", lease)
        except ConflictError:
            return  # another replica was faster
        self._hold(began)

    def _hold(self, began: float) -> None:
        with self._lock:
            if self._clock() >= self._until:
                self._turn(False)  # writes may have been skipped meanwhile: start a new term
            self._until = began + self._seconds * (1 - _MARGIN)
            self.holder = self.identity
            self._turn(True)

    def _turn(self, leads: bool) -> None:
        if leads != self.leads:
            self.term += leads
            self.leads = leads
            self._changed(leads)

    def _write(self, method: str, path: str, old: Lease | None, holder: str | None = None) -> None:
        now = now_precise()
        before = None if old is None else old.spec
        same = before is not None and before.holder_identity == self.identity
        transitions = 0 if before is None else (before.lease_transitions or 0) + (not same)
        acquired = before.acquire_time if same and before is not None else now
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name, "namespace": self._namespace}
            | ({"annotations": {NOTE: self.note}} if self.note else {})
            | ({} if old is None else {"resourceVersion": old.metadata.resource_version}),
            "spec": {
                "holderIdentity": self.identity if holder is None else holder,
                "leaseDurationSeconds": math.ceil(self._seconds),
                "acquireTime": acquired,
                "renewTime": now,
                "leaseTransitions": transitions,
            },
        }
        self._api.write(method, path, body)

    def _release(self) -> None:
        lease = self._api.get(f"{self._path}/{self._name}", Lease)
        if lease.spec.holder_identity == self.identity:
            self._write("PUT", f"{self._path}/{self._name}", lease, holder="")
