"""The benchmarks' view of a Kubernetes cluster under load: pods, claims, occupied slices.

It comes from watches on pods and claims, the same for every allocator. Allocations are entered into
a slicewise cluster, which refuses overlaps, so every run also checks that no two claims ever hold
the same slices.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.kube_plan import GIB_PER_CPU
from tests.kubernetes_e2e.cluster import device_request, pod, pods_in, template, templates_in
from tests.kubernetes_e2e.nvidia import devices_at
from tests.kubernetes_e2e.replica import OUR_CLASS, wants

from slicewise.core.cluster import Cluster, Instance
from slicewise.core.errors import SlicewiseError
from slicewise.core.fragmentation import Reading, score_table
from slicewise.core.geometry import Geometry
from slicewise.core.states import ILLEGAL
from slicewise.kubernetes.api import Pod, ResourceClaim
from slicewise.kubernetes.api_client import ApiClient, NotFoundError
from slicewise.kubernetes.informer import (
    CLAIMS,
    PODS,
    Changed,
    Deleted,
    Listed,
    Watch,
    WatchNotification,
)

_WRITERS = 8
STUCK_SECONDS = 10.0
"""A pod that waits longer while enough slices are free is stuck."""


@dataclass(slots=True)
class PodHistory:
    """The history of a pod; all times are those of the benchmark's clock."""

    name: str
    profile: str
    size: int
    created: float
    roomy: bool
    """Whether some GPU had room for it when it was created."""
    running: float | None = None
    gone: float | None = None
    gave_up: float | None = None
    """When its user gave up and deleted it."""
    lost_to: str | None = None
    """Which pod took the last placement that was open for it on arrival: an older or a younger one.
    """

    @property
    def pending(self) -> bool:
        """Whether the pod is waiting."""
        return self.running is None and self.gone is None


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of the cluster at one moment."""

    at: float
    running: int
    slices: int
    """Slices in use, by allocation."""
    pending: int
    stuck: int
    """Pods waiting for long although enough slices are free in the cluster."""
    stranded: int
    """Stuck pods for which one GPU has enough free slices, but no open window."""
    fragmentation: float
    usable: int
    """Free slices that some profile of the mix could use now."""
    spent: int
    """Other free slices of GPUs without free compute slices: the eighth next to seven 1g."""
    blocked: int
    """All other free slices: compute is left, but no window is open."""


@dataclass
class PodTracker:
    """Creates and deletes pods, and tracks their state."""

    link: ApiClient
    space: str
    geometry: Geometry
    nodes: Sequence[str]
    gpus: int
    lives: dict[str, PodHistory] = field(default_factory=dict)
    overlaps: list[str] = field(default_factory=list)
    on_running: Callable[[PodHistory], None] = lambda life: None
    cpus: int = 0
    """CPUs requested per memory slice, with `GIB_PER_CPU`; 0 for almost none."""
    follow_places: bool = False
    """Whether to record which pods take placements that were open for others."""

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: dict[str, PodHistory] = {}
        self.opened = range(len(self.nodes) * self.gpus)
        """The GPUs of schedulable nodes."""
        self.steps = 0
        """Incremented whenever a pod gets devices or starts to run."""
        self.running = 0
        self.allocated = 0
        """Number of allocated claims."""
        self.changed = threading.Condition(self.lock)
        self._first = {name: number * self.gpus for number, name in enumerate(self.nodes)}
        self._places = {
            device: (gpu, profile.name, start)
            for gpu in range(self.gpus)
            for profile in self.geometry.profiles
            for start, device in devices_at(self.geometry.model, gpu, profile.name).items()
        }
        self.cluster = Cluster.of(self.geometry, len(self.nodes) * self.gpus, self.gpus)
        self._claims: dict[str, tuple[Instance, str]] = {}
        """Instance and pod of each allocated claim."""
        self._given: set[str] = set()
        """The pods of allocated claims."""
        self._numbers = {
            profile.name: [p.number for p in self.geometry.placements if p.profile is profile]
            for profile in self.geometry.profiles
        }
        self._scores = score_table(self.geometry, Reading.PARTIAL)
        self._pool = ThreadPoolExecutor(_WRITERS, "user")
        self._watches = [Watch(self.link, kind, self._handle_event) for kind in (PODS, CLAIMS)]
        for watch in self._watches:
            watch.start()

    def close(self) -> None:
        """Stop the watches."""
        for watch in self._watches:
            watch.stop()
        self._pool.shutdown(cancel_futures=True)

    # User actions

    def make_templates(self, profiles: Sequence[str], device_class: str, prefix: str = "") -> None:
        """Create a claim template for each profile."""
        for profile in profiles:
            if device_class == OUR_CLASS:
                made = template(
                    prefix + _template(profile),
                    device_request(device_class),
                    config=[wants(profile=profile)],
                )
            else:
                request = device_request(device_class, profile=profile)
                made = template(prefix + _template(profile), request)
            self.link.write("POST", templates_in(self.space), made)

    def create(self, name: str, profile: str, prefix: str = "") -> Future[Any]:
        """Create a pod that requests a profile."""
        size = self.geometry.profile(profile).size
        with self.lock:
            life = PodHistory(name, profile, size, time.monotonic(), self._has_room(profile))
            self.lives[name] = self.waiting[name] = life
        cpus = self.cpus * size
        body = pod(
            name,
            templates=[prefix + _template(profile)],
            cpu=f"{cpus}" if cpus else "100m",
            memory=f"{cpus * GIB_PER_CPU}Gi" if cpus else "64Mi",
        )
        return self._pool.submit(self.link.write, "POST", pods_in(self.space), body)

    def delete(self, name: str) -> Future[Any]:
        """Delete a pod."""
        return self._pool.submit(self._delete, name)

    def _delete(self, name: str) -> None:
        with contextlib.suppress(NotFoundError):
            self.link.write("DELETE", f"{pods_in(self.space)}/{name}", {"gracePeriodSeconds": 0})

    def until(self, what: str, holds: Callable[[], bool], seconds: float) -> bool:
        """Wait until a condition holds; return False on timeout."""
        with self.changed:
            return self.changed.wait_for(holds, seconds)

    # Events

    def _handle_event(self, news: WatchNotification) -> None:
        with self.changed:
            match news:
                case Listed(_, things, _, _):
                    for thing in things:
                        self._update(thing)
                case Changed(_, thing):
                    self._update(thing)
                case Deleted(_, thing):
                    self._remove(thing)
            self.changed.notify_all()

    def _update(self, thing: object) -> None:
        if isinstance(thing, Pod):
            life = self.lives.get(thing.metadata.name)
            if life is not None and life.running is None and thing.status.phase == "Running":
                life.running = time.monotonic()
                self.waiting.pop(life.name, None)
                self.running += 1
                self.steps += 1
                self.on_running(life)
        elif isinstance(thing, ResourceClaim):
            uid = thing.metadata.uid
            if thing.status.allocation is None:
                self._release(uid)
            elif uid not in self._claims:
                self._allocate(uid, thing)

    def _remove(self, thing: object) -> None:
        if isinstance(thing, Pod):
            life = self.lives.get(thing.metadata.name)
            if life is not None and life.gone is None:
                life.gone = time.monotonic()
                self.waiting.pop(life.name, None)
                self.running -= life.running is not None
        elif isinstance(thing, ResourceClaim):
            self._release(thing.metadata.uid)

    def _allocate(self, uid: str, claim: ResourceClaim) -> None:
        assert claim.status.allocation is not None
        [result] = claim.status.allocation.devices.results
        gpu, profile, start = self._places[result.device]
        placement = self.geometry.placement(profile, start)
        assert placement is not None
        [owner] = claim.metadata.owner_references
        try:
            instance = self.cluster.put(self._first[result.pool] + gpu, placement.number)
        except SlicewiseError as error:
            self.overlaps.append(f"{result.pool}/{result.device}: {error}")
            return
        self._claims[uid] = instance, owner.name
        self._given.add(owner.name)
        self.allocated += 1
        self.steps += 1
        if self.follow_places:
            self._record_losses(owner.name)

    def _record_losses(self, taker: str) -> None:
        """Record which waiting pods lost their last open placement to this allocation."""
        room: dict[str, bool] = {}
        for life in self.waiting.values():
            if not life.roomy or life.lost_to or life.name in self._given:
                continue
            if life.profile not in room:
                room[life.profile] = self._has_room(life.profile)
            if not room[life.profile]:
                older = self.lives[taker].created <= life.created
                life.lost_to = "older" if older else "younger"

    def _release(self, uid: str) -> None:
        instance, name = self._claims.pop(uid, (None, ""))
        if instance is not None:
            self._given.discard(name)
            self.cluster.release(instance)

    def _has_room(self, profile: str) -> bool:
        cluster = self.cluster
        return any(
            cluster.after_place[state][number] != ILLEGAL
            for state in {cluster.state_of[gpu] for gpu in self.opened}
            for number in self._numbers[profile]
        )

    # Queries; the caller holds the lock

    def unserved(self) -> list[PodHistory]:
        """Return waiting pods that have an open placement or are already allocated."""
        room: dict[str, bool] = {}
        found = []
        for life in self.waiting.values():
            if life.profile not in room:
                room[life.profile] = self._has_room(life.profile)
            if room[life.profile] or life.name in self._given:
                found.append(life)
        return found

    def lingering(self) -> bool:
        """Return whether a deleted pod still holds devices."""
        return any(self.lives[name].gone is not None for name in self._given)

    def sample(self, profiles: Sequence[str], patience: float = STUCK_SECONDS) -> Sample:
        """Return the current state of the schedulable nodes, for pods of these profiles."""
        now = time.monotonic()
        with self.lock:
            states = [self.cluster.state(gpu) for gpu in self.opened]
            follows = [self.cluster.after_place[self.cluster.state_of[gpu]] for gpu in self.opened]
            waiting = list(self.waiting.values())
            running = self.running
        free = [state.free_slices for state in states]
        stuck = [
            life for life in waiting if now - life.created > patience and life.size <= sum(free)
        ]
        most = max(free)
        usable = spent = 0
        for state, after in zip(states, follows, strict=True):
            windows = 0
            for placement in self.geometry.placements:
                if placement.profile.name in profiles and after[placement.number] != ILLEGAL:
                    windows |= placement.window
            usable += windows.bit_count()
            if state.free_compute == 0:
                spent += state.free_slices - windows.bit_count()
        return Sample(
            at=now,
            running=running,
            slices=self.geometry.slices * len(states) - sum(free),
            pending=len(waiting),
            stuck=len(stuck),
            stranded=sum(life.size <= most for life in stuck),
            fragmentation=sum(self._scores[state.mask] for state in states) / len(states),
            usable=usable,
            spent=spent,
            blocked=sum(free) - usable - spent,
        )


def _template(profile: str) -> str:
    return profile.replace(".", "-").replace("+", "-")


def memory_mib(process: int) -> float:
    """Return the resident memory of a process."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise ValueError(process)


def cpu_seconds(process: int) -> float:
    """Return the CPU time of a process."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
