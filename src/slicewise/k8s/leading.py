"""Leadership: of several replicas, one decides; the others watch and are ready to take over.

The lease is a Lease object. Whoever holds it counts its time from before the moment it asked to
renew; whoever wants it counts from the moment it saw the last renewal. So the holder's time is
always over first, whatever their clocks say, as long as these run at about the same speed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from slicewise.core.errors import SlicewiseError
from slicewise.k8s.api import Lease
from slicewise.k8s.link import ConflictError, Link, MissingError
from slicewise.k8s.times import now_precisely

SECONDS = 15.0
_MARGIN = 0.1
"""The share of its time that a holder does without, for clocks that run a little differently."""


def running_clock() -> float:
    """Seconds that go on while the process is stopped, and while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Leadership:
    """Holds a lease as long as it can, in a thread of its own."""

    def __init__(
        self,
        link: Link,
        namespace: str,
        name: str,
        identity: str,
        changed: Callable[[bool], None],
        seconds: float = SECONDS,
        clock: Callable[[], float] = running_clock,
    ) -> None:
        """``changed`` is called from the thread when this replica begins or ceases to lead."""
        self._link = link
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._namespace = namespace
        self._name = name
        self.identity = identity
        self._changed = changed
        self._seconds = seconds
        self._clock = clock
        self._until = 0.0
        self._seen: tuple[str, float] = "", 0.0
        """The version of the lease that was seen last, and when it was new."""
        self.leads = False
        self.term = 0
        """How often this replica has begun to lead."""
        self.trouble = ""
        self.holder = ""
        """Who leads, as far as is known."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def valid(self) -> bool:
        """Whether the lease runs at this moment, by this process's own clock."""
        return self.leads and self._clock() < self._until

    def start(self) -> None:
        """Begin to try."""
        self._thread.start()

    def stop(self) -> None:
        """Give the lease up, so that another takes over at once."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.beat()
            self._stop.wait(self._seconds / 5)
        if self.leads:
            self._turn(False)
            try:
                self._give_up()
            except SlicewiseError as error:
                self.trouble = str(error)

    def beat(self) -> None:
        """Renew the lease, or look whether it can be had."""
        try:
            self._try()
            self.trouble = ""
        except Exception as error:  # whatever it is, the thread has to go on
            self.trouble = str(error) or type(error).__name__
        if self._clock() >= self._until:
            self._turn(False)

    def _try(self) -> None:
        began = self._clock()
        try:
            lease = self._link.get(f"{self._path}/{self._name}", Lease)
        except MissingError:
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
            self._turn(False)  # even if it can be had: what somebody else did has to be learnt
        elif not self.leads:
            # Held under this name by a process that is gone; its time has to pass like anybody's.
            mine = over
        if not (mine or over or not self.holder):
            return
        try:
            self._write("PUT", f"{self._path}/{self._name}", lease)
        except ConflictError:
            return  # somebody else was faster
        self._hold(began)

    def _hold(self, began: float) -> None:
        if self._clock() >= self._until:
            self._turn(False)  # it was over for a moment: what was not written then is not known
        self._until = began + self._seconds * (1 - _MARGIN)
        self.holder = self.identity
        self._turn(True)

    def _turn(self, leads: bool) -> None:
        if leads != self.leads:
            self.term += leads
            self.leads = leads
            self._changed(leads)

    def _write(self, method: str, path: str, old: Lease | None, holder: str | None = None) -> None:
        now = now_precisely()
        before = None if old is None else old.spec
        same = before is not None and before.holder_identity == self.identity
        transitions = 0 if before is None else (before.lease_transitions or 0) + (not same)
        acquired = before.acquire_time if same and before is not None else now
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name, "namespace": self._namespace}
            | ({} if old is None else {"resourceVersion": old.metadata.resource_version}),
            "spec": {
                "holderIdentity": self.identity if holder is None else holder,
                "leaseDurationSeconds": max(1, round(self._seconds)),
                "acquireTime": acquired,
                "renewTime": now,
                "leaseTransitions": transitions,
            },
        }
        self._link.write(method, path, body)

    def _give_up(self) -> None:
        lease = self._link.get(f"{self._path}/{self._name}", Lease)
        if lease.spec.holder_identity == self.identity:
            self._write("PUT", f"{self._path}/{self._name}", lease, holder="")
