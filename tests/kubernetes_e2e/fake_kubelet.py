"""A kubelet for one node, of which only the part that deals with claims is there.

It calls NVIDIA's driver as the kubelet does (pkg/kubelet/cm/dra): a pod that is bound to the node
runs once its claims are prepared; the claims of a pod that is deleted, or has vanished, are
unprepared when no other pod uses them. What it knows outlives a restart, as in the kubelet's
checkpoint. It starts no containers: ``stop_seconds`` is the time that stopping them would take.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
from tests.kubernetes_e2e.api import CORE, Api, ApiError, Json
from tests.kubernetes_e2e.cluster import claims_in, pods_in
from tests.kubernetes_e2e.nvidia_driver import KubeletClient, NvidiaDriver, PrepareError

_LOOK_SECONDS = 0.05
_RETRY_SECONDS = 1.0
_WORKERS = 8
RUNNING = {
    "phase": "Running",
    "conditions": [
        {"type": kind, "status": "True"} for kind in ("Initialized", "ContainersReady", "Ready")
    ],
}


@dataclass
class _Claim:
    """A claim that was or will be prepared, and the pods that use it."""

    reference: Json
    users: set[str] = field(default_factory=set)
    prepared: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class _Pod:
    """A pod of the node, as last seen."""

    found: Json
    gone: bool = False
    runs: bool = False
    claims: list[str] = field(default_factory=list)
    """The uids of its claims."""
    not_before: float = 0


class FakeKubelet:
    """One kubelet; ``refusals`` are what the driver said to calls that failed."""

    def __init__(
        self, api: Api, driver: NvidiaDriver, client: KubeletClient, stop_seconds: float = 0.0
    ) -> None:
        self.refusals: list[str] = []
        self.prepared = 0
        self.unprepared = 0
        self._api, self._driver, self._client = api, driver, client
        self._stop_seconds = stop_seconds
        self._claims: dict[str, _Claim] = {}
        self._pods: dict[str, _Pod] = {}
        self._busy: set[str] = set()
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Register the driver and begin to look after pods."""
        self._client.register()
        self._ending.clear()
        self._thread = threading.Thread(target=self._run, name="fake kubelet", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop looking after pods; what is under way ends."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join()

    def restart(self, pause: float = 0.0) -> None:
        """Stop, and start again after a pause."""
        self.stop()
        time.sleep(pause)
        self.start()

    def _run(self) -> None:
        selector = f"fieldSelector=spec.nodeName={self._driver.node}&resourceVersion=0"
        with ThreadPoolExecutor(_WORKERS) as pool:
            while not self._ending.wait(_LOOK_SECONDS):
                try:
                    found = self._api.items(f"{CORE}/pods?{selector}")
                except (ApiError, httpx.HTTPError):
                    continue
                for uid in self._due({one["metadata"]["uid"]: one for one in found}):
                    pool.submit(self._look_after, uid)

    def _due(self, found: dict[str, Json]) -> list[str]:
        """Note what has changed, and return the pods for which something is to be done."""
        now = time.monotonic()
        with self._lock:
            for uid, one in found.items():
                pod = self._pods.setdefault(uid, _Pod(one))
                pod.found = one
            for uid, pod in self._pods.items():
                pod.gone = uid not in found
            due = [
                uid
                for uid, pod in self._pods.items()
                if uid not in self._busy
                and now >= pod.not_before
                and (pod.gone or "deletionTimestamp" in pod.found["metadata"] or not pod.runs)
            ]
            self._busy |= set(due)
        return due

    def _look_after(self, uid: str) -> None:
        pod = self._pods[uid]
        try:
            if pod.gone or "deletionTimestamp" in pod.found["metadata"]:
                self._end(uid, pod)
            else:
                self._begin(uid, pod)
        except (PrepareError, ApiError, httpx.HTTPError) as error:
            if isinstance(error, PrepareError):
                self.refusals.append(str(error))
            pod.not_before = time.monotonic() + _RETRY_SECONDS
        finally:
            with self._lock:
                self._busy.discard(uid)

    def _begin(self, uid: str, pod: _Pod) -> None:
        """Prepare the claims of a pod, and let it run."""
        space, name = (pod.found["metadata"][key] for key in ("namespace", "name"))
        for wanted in self._claims_of(pod.found):
            claim = self._api.get(f"{claims_in(space)}/{wanted}")
            users = {one["uid"] for one in claim.get("status", {}).get("reservedFor", [])}
            if "allocation" not in claim.get("status", {}) or uid not in users:
                raise ApiError(409, f"{wanted} is not reserved for {name}")
            identity = claim["metadata"]["uid"]
            with self._lock:
                ours = self._claims.setdefault(identity, _Claim(claim))
                ours.users.add(uid)
            if identity not in pod.claims:
                pod.claims.append(identity)
            with ours.lock:
                if not ours.prepared:
                    self._client.prepare(claim)
                    ours.prepared = True
                    self.prepared += 1
        with suppress_not_found():
            self._api.patch(f"{pods_in(space)}/{name}/status", {"status": RUNNING})
        pod.runs = True

    def _end(self, uid: str, pod: _Pod) -> None:
        """Unprepare the claims that only this pod used, and let it go."""
        if pod.claims and self._stop_seconds:
            time.sleep(self._stop_seconds)
        for identity in list(pod.claims):
            ours = self._claims[identity]
            with ours.lock:
                with self._lock:
                    last = ours.users <= {uid}
                if last:
                    self._client.unprepare(ours.reference)
                    self.unprepared += 1
                with self._lock:
                    ours.users.discard(uid)
                    if last:
                        del self._claims[identity]
            pod.claims.remove(identity)
        if pod.gone:
            with self._lock:
                del self._pods[uid]
            return
        space, name = (pod.found["metadata"][key] for key in ("namespace", "name"))
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
        with suppress_not_found():
            self._api.call("DELETE", f"{pods_in(space)}/{name}", options)

    @staticmethod
    def _claims_of(pod: Json) -> list[str]:
        made = {
            one["name"]: one.get("resourceClaimName")
            for one in pod.get("status", {}).get("resourceClaimStatuses", [])
        }
        wanted = pod["spec"].get("resourceClaims", [])
        names = [one.get("resourceClaimName") or made.get(one["name"]) for one in wanted]
        return [name for name in names if name]


@contextmanager
def suppress_not_found() -> Iterator[None]:
    """Ignore that a pod is gone, or another one by now."""
    try:
        yield
    except ApiError as error:
        if error.status not in (404, 409):
            raise
