"""Event handlers: apply what the watches report to the cache, and requeue the affected pods.

ResourceSlices become pools of the cache; nodes and pods are counted in the node resources. All
methods run in the controller's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from slicewise.core.errors import SlicewiseError
from slicewise.kubernetes.allocation_writer import AllocationWriter
from slicewise.kubernetes.api import (
    DeviceClass,
    DeviceTaintRule,
    Job,
    KubeletEvent,
    Namespace,
    Node,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    ResourceClaim,
    StorageClass,
)
from slicewise.kubernetes.api.common import parse_time
from slicewise.kubernetes.cache import ClusterCache
from slicewise.kubernetes.claim_client import FINALIZER
from slicewise.kubernetes.claim_states import ClaimState
from slicewise.kubernetes.conflicts import Conflicts, may_want
from slicewise.kubernetes.cycle import Cycle
from slicewise.kubernetes.devices.pool_reading import Library, SliceCache, SliceObject, read_pool
from slicewise.kubernetes.event_recorder import EventRecorder
from slicewise.kubernetes.informer import (
    CLAIMS,
    CLASSES,
    EVENTS,
    JOBS,
    KINDS,
    KUBELET_STARTS,
    NAMESPACES,
    NODES,
    PODS,
    SLICES,
    STORAGE,
    TAINT_RULES,
    VOLUME_CLAIMS,
    VOLUMES,
    Changed,
    Deleted,
    Kind,
    Listed,
    WatchError,
    WatchNotification,
)
from slicewise.kubernetes.namespace_annotations import Unreadable
from slicewise.kubernetes.namespaces import Namespaces
from slicewise.kubernetes.node_resources import NodeResources
from slicewise.kubernetes.pending_claims import PendingClaims
from slicewise.kubernetes.prepare_failures import PrepareFailures, PrepareMessage
from slicewise.kubernetes.stats import Stats
from slicewise.kubernetes.volumes import Volumes

log = logging.getLogger("slicewise.kubernetes")


class EventHandlers:
    """Handles the notifications of one controller's watches."""

    def __init__(
        self,
        cache: ClusterCache,
        pending: PendingClaims,
        node_resources: NodeResources,
        conflicts: Conflicts,
        cycle: Cycle,
        writer: AllocationWriter,
        recorder: EventRecorder,
        stats: Stats,
        deciding: Callable[[], bool],
        unreadable_quota: Unreadable = "last",
    ) -> None:
        """``deciding`` tells whether this replica allocates devices now."""
        self._cache = cache
        self._pending = pending
        self._node_resources = node_resources
        self._volumes = node_resources.volumes or Volumes()
        self._conflicts = conflicts
        self._cycle = cycle
        self._writer = writer
        self._recorder = recorder
        self._stats = stats
        self._deciding = deciding
        self._namespaces = Namespaces(cache, recorder, stats, unreadable_quota)
        self.prepare_failures = PrepareFailures(
            pending, cache.cool_down, stats, self._report_prepare
        )
        self.watch_errors: dict[str, str] = {}
        """By kind of object: why its watch fails."""
        self.problem = ""
        """Why the cache may be out of date; empty if everything is listed and watched."""
        self._unlisted = {kind.name for kind in KINDS if kind.essential}
        self._listing: dict[str, set[str]] = {}
        """By kind that is being listed: the keys on the pages so far."""
        self._slices = SliceCache()
        self._library = Library()
        self._rival_drivers: set[str] | None = None
        """The drivers for which rivals were determined; None: determine them again."""
        self._claims_version = 0
        """The watch of claims has delivered all changes up to this version."""
        self._update_problem()

    def handle(self, notification: WatchNotification) -> None:
        """Handle a notification of a watch."""
        match notification:
            case Changed(kind, thing):
                self._advance(kind, thing.metadata.resource_version)
                self._changed(thing)
            case Deleted(kind, thing):
                self._advance(kind, thing.metadata.resource_version)
                if kind is PODS:
                    self._pod_deleted(thing.metadata.key, thing)
                elif not (kind is CLAIMS and self._was_replaced(thing)):
                    self._deleted(kind, thing.metadata.key)
            case Listed():
                self._listed(notification)
            case WatchError(kind, ""):
                self.watch_errors.pop(kind.name, None)
                self._update_problem()
            case WatchError(kind, text):
                self._stats.watches += 1
                log.warning("cannot watch %s: %s", kind.name, text)
                self.watch_errors[kind.name] = text
                self._update_problem()

    def read_pools(self) -> None:
        """Read the pools that have changed, and determine the rivals for their devices."""
        for key in list(self._slices.changed):
            try:
                slices = self._slices.pool(key)
            except SlicewiseError as error:  # other pools must stay usable
                log.warning("no devices of driver %s are allocated: %s", key[0], error)
                slices = []
            reading = read_pool(slices, self._library) if slices else None
            homes = {gpu.node_name for gpu in reading.gpus} if reading else set()
            if reading is None or reading.trouble or len(homes) != 1:
                # Deleted, incomplete, or not on one node: allocate nothing from it.
                self._cache.withdraw_pool(key)
            else:
                self._cache.set_pool(key, reading, homes.pop())
        self._slices.changed.clear()
        drivers = self._cache.pools.drivers
        if self._rival_drivers != drivers:
            self._rival_drivers = drivers
            for claim in self._pending.claims.values():
                self._track_rival(claim)

    @property
    def degraded(self) -> str:
        """What is not known although everything essential is; empty if nothing is missing."""
        texts = [
            f"{kind.name} are not known: {text}"
            for kind in KINDS
            if not kind.essential and (text := self.watch_errors.get(kind.name))
        ]
        return "; ".join(texts)

    def _update_problem(self) -> None:
        failing = [
            text for kind in KINDS if kind.essential and (text := self.watch_errors.get(kind.name))
        ]
        if failing:
            self.problem = failing[0]
        else:
            unlisted = ", ".join(sorted(self._unlisted))
            self.problem = f"still reading {unlisted}" if unlisted else ""

    # All kinds

    def _listed(self, page: Listed) -> None:
        kind = page.kind
        if page.first:
            self._listing[kind.name] = set()
        listed = self._listing[kind.name]
        for thing in page.objects:
            listed.add(thing.metadata.key)
            self._changed(thing)
        if not page.last:
            return
        for key in sorted(self._known_keys(kind) - listed):
            if kind is CLAIMS and _newer(self._pending.claims[key], page.version):
                continue  # created after the list: the watch delivers it
            self._deleted(kind, key)
        del self._listing[kind.name]
        self._unlisted.discard(kind.name)
        self._update_problem()
        self._advance(kind, page.version)
        if kind is CLAIMS:
            for claim in list(self._pending.claims.values()):
                self._mark_seen(claim)  # may have been written while the watch was down

    def _advance(self, kind: Kind, version: str) -> None:
        """Note up to which version the watch of claims has delivered changes."""
        if kind is CLAIMS and version.isdecimal():
            self._claims_version = max(self._claims_version, int(version))

    def _was_replaced(self, claim: ResourceClaim) -> bool:
        """Whether another claim of the same name is known by now."""
        known = self._pending.claims.get(claim.metadata.key)
        return known is not None and known.metadata.uid != claim.metadata.uid

    def _known_keys(self, kind: Kind) -> set[str]:
        match kind.name:
            case SLICES.name:
                return set(self._slices.names)
            case CLASSES.name:
                return set(self._pending.classes)
            case NAMESPACES.name:
                return set(self._cache.state.tenants_by_name)
            case NODES.name:
                return set(self._node_resources.nodes)
            case CLAIMS.name:
                return set(self._pending.claims)
            case VOLUMES.name | VOLUME_CLAIMS.name | STORAGE.name:
                return set(self._volumes_of(kind))
            case TAINT_RULES.name:
                return set(self._cache.pools.rules)
            case JOBS.name:
                return set(self._cycle.jobs.known)
            case EVENTS.name | KUBELET_STARTS.name:
                return set()  # what an event said stays true when the API has deleted it
        return set(self._node_resources.pods) | set(self._pending.pods)

    def _changed(self, thing: Any) -> None:
        match thing:
            case SliceObject():
                self._slices.put(thing)
            case DeviceClass():
                self._pending.classes[thing.metadata.name] = thing
                self._classes_changed()
            case Namespace():
                self._namespaces.changed(thing)
            case Node():
                self._node_resources.node_changed(thing)
                self._cache.cool_down.node_changed(thing)
                self._cache.pools.set_open(thing.metadata.name, not thing.spec.unschedulable)
            case ResourceClaim():
                self._claim_changed(thing)
            case Pod():
                self._pod_changed(thing)
            case PersistentVolume() | PersistentVolumeClaim() | StorageClass():
                self._requeue(self._volumes.put(thing))
            case DeviceTaintRule():
                self._cache.pools.set_rule(thing)
            case Job():
                self._lifetimes_changed(self._cycle.jobs.put(thing))
            case KubeletEvent(reason="Starting"):
                self._kubelet_started(thing)
            case KubeletEvent():
                self.prepare_failures.event(thing)

    def _deleted(self, kind: Kind, key: str) -> None:
        match kind.name:
            case SLICES.name:
                self._slices.drop(key)
            case CLASSES.name:
                self._pending.classes.pop(key, None)
                self._classes_changed()
            case NAMESPACES.name:
                self._namespaces.deleted(key)
            case NODES.name:
                self._node_resources.node_deleted(key)
                self._cache.cool_down.node_deleted(key)
                self._cache.pools.set_open(key, False)
            case CLAIMS.name:
                self._claim_deleted(key)
            case VOLUMES.name | VOLUME_CLAIMS.name | STORAGE.name:
                self._requeue(self._volumes.drop(self._volumes_of(kind), key))
            case TAINT_RULES.name:
                self._cache.pools.drop_rule(key)
            case JOBS.name:
                self._lifetimes_changed(self._cycle.jobs.drop(key))
            case PODS.name:
                self._pod_deleted(key)

    def _kubelet_started(self, event: KubeletEvent) -> None:
        now = self._cache.now()
        ago = max(0.0, now - parse_time(event.last_timestamp, now))
        home = event.involved_object.name
        self._cache.cool_down.kubelet_started(home, self._cycle.clock() - ago)

    def _volumes_of(self, kind: Kind) -> dict[str, Any]:
        volumes = self._volumes
        known: dict[str, dict[str, Any]] = {
            VOLUMES.name: volumes.volumes,
            VOLUME_CLAIMS.name: volumes.claims,
            STORAGE.name: volumes.classes,
        }
        return known[kind.name]

    def _requeue(self, pods: Iterable[str]) -> None:
        for pod in pods:
            self._cycle.requeue(pod)

    def _lifetimes_changed(self, pods: Iterable[str]) -> None:
        for key in pods:
            if key in self._pending.pods:
                self._cycle.lifetime_changed(self._pending.pods[key])
                self._cycle.requeue(key)

    def _classes_changed(self) -> None:
        names = (one.spec.extended_resource_name for one in self._pending.classes.values())
        self._node_resources.set_by_devices(frozenset(filter(None, names)))
        self._cycle.requeue_all()
        self._cycle.standby = True  # claims that have become ours are handled on resuming
        self._rival_drivers = None

    # Claims

    def claim_read(self, claim: ResourceClaim) -> None:
        """Handle a claim that was written or read, not watched; it may have been deleted since."""
        known = self._pending.claims.get(claim.metadata.key)
        same = known is not None and known.metadata.uid == claim.metadata.uid
        if same or _newer(claim, str(self._claims_version)):  # else its deletion was delivered
            self._claim_changed(claim)

    def _claim_changed(self, claim: ResourceClaim) -> None:
        """Apply a version of a claim, unless a newer one is known."""
        uid, key = claim.metadata.uid, claim.metadata.key
        before = self._pending.claims.get(key)
        if before is not None and _newer(before, claim.metadata.resource_version):
            return
        if before is not None and before.metadata.uid != uid:
            self._claim_deleted(key)
            before = None
        self._pending.claims[key] = claim
        ours = self._track_rival(claim)
        self._cache.update(claim)
        if ours:
            self._our_claim_changed(claim, before)
        for pod in self._pending.users(key):
            self._cycle.requeue(pod)

    def _track_rival(self, claim: ResourceClaim) -> bool:
        """Track a claim that may compete for our devices; returns whether the claim is ours."""
        if self._pending.is_ours(claim):
            if claim.metadata.uid in self._conflicts.rivals:  # its class has become ours
                self._conflicts.drop(claim.metadata.uid)
            return True
        rival = may_want(claim, self._pending.classes, self._cache.pools.drivers)
        self._conflicts.update(claim, rival, self._cycle.clock())
        for key in self._pending.users(claim.metadata.key):  # its pod may have arrived first
            self._track_nomination(self._pending.pods[key])
        return False

    def _our_claim_changed(self, claim: ResourceClaim, before: ResourceClaim | None) -> None:
        if claim.status.allocation is not None:
            self._reconcile(claim)
            self._mark_seen(claim)
            return
        if (
            before is not None
            and before.status.allocation is not None
            and self._cache.records[claim.metadata.uid].state is not ClaimState.REVOKING
        ):
            # kube-scheduler deallocated it: the pod does not fit that node.
            self._cycle.unbound.back_off(before)

    def _reconcile(self, claim: ResourceClaim) -> None:
        """Continue with an allocation of ours, now or as soon as this replica decides."""
        if self._deciding():
            self._writer.reconcile(claim)
        else:
            self._cycle.standby = True

    def _mark_seen(self, claim: ResourceClaim) -> None:
        """Mark an allocation as seen once the watch has delivered all claims older than it."""
        if claim.status.allocation is not None and not _newer(claim, str(self._claims_version)):
            self._writer.seen(claim)

    def _claim_deleted(self, key: str) -> None:
        claim = self._pending.claims.pop(key, None)
        if claim is None:
            return
        uid = claim.metadata.uid
        self._conflicts.drop(uid)
        self._cache.forget(uid)
        for pod in self._pending.users(key):
            self._cycle.requeue(pod)

    # Pods

    def _pod_changed(self, pod: Pod) -> None:
        key = pod.metadata.key
        before = self._pending.pods.get(key)
        if before is not None and before.metadata.uid != pod.metadata.uid:
            self._pod_deleted(key)
        self._node_resources.pod_changed(pod)
        if pod.spec.resource_claims:
            self._cache.cool_down.pod_changed(pod)
        if pod.spec.resource_claims and pod.spec.volumes:
            volumes = self._volumes
            (volumes.leave if pod.over or pod.spec.node_name else volumes.use)(pod)
        self._pending.set_pod(pod)
        self._track_nomination(pod)
        self.prepare_failures.pod_changed(pod)
        if pod.over:
            self._cycle.remove(key)
            self._recorder.forget(key)  # a new pod of the same name gets its own messages
            self._cycle.jobs.pod_deleted(pod)
            self._release_claims(pod)
            return
        if pod.spec.resource_claims:
            self._cycle.jobs.pod_changed(pod)
            self._cycle.lifetime_changed(pod)
        self._cycle.requeue(key)
        if self._deciding():
            if unrecorded := self._pending.unrecorded_claims(pod):
                self._writer.record_claims(pod, unrecorded)
            self._writer.templates.pod_changed(pod)

    def _report_prepare(self, pod: Pod, message: PrepareMessage) -> None:
        if self._deciding():
            self._recorder.report_prepare(pod, message)

    def _track_nomination(self, pod: Pod) -> None:
        """Track for which rivals kube-scheduler is writing an allocation."""
        claims = list(self._pending.claims_of(pod))
        nominated = bool(pod.status.nominated_node_name) and not pod.spec.node_name
        allocated = any(claim.status.allocation is not None for claim in claims)
        for claim in claims:
            uid = claim.metadata.uid
            rival = uid in self._conflicts.rivals
            begun = allocated or FINALIZER in claim.metadata.finalizers
            for tracked, holds in (
                (self._conflicts.nominated, nominated),
                (self._conflicts.begun, begun),
            ):
                (tracked.add if rival and holds else tracked.discard)(uid)

    def _pod_deleted(self, key: str, last: Pod | None = None) -> None:
        """Handle the deletion of a pod; ``last`` is its last version, if the watch delivered it."""
        self._node_resources.pod_deleted(key)
        pod = self._pending.drop_pod(key)
        known = last or pod
        if known is not None and known.spec.resource_claims:
            self._volumes.leave(known)
            self._cycle.jobs.pod_deleted(known)
            self.prepare_failures.pod_deleted(known.metadata.uid)
            self._cache.cool_down.pod_deleted(known, last is not None)
        self._cycle.remove(key)
        self._recorder.forget(key)
        if pod is not None:
            self._release_claims(pod)

    def _release_claims(self, pod: Pod) -> None:
        """Handle the claims that a pod no longer needs: other pods use them, or none does."""
        for claim in self._pending.claims_of(pod):
            if claim.status.allocation is not None and self._pending.is_ours(claim):
                self._reconcile(claim)
            for user in self._pending.users(claim.metadata.key):
                self._cycle.requeue(user)


def _newer(claim: ResourceClaim, version: str) -> bool:
    """Whether a claim is newer than a version; versions are numbers since Kubernetes 1.35."""
    mine = claim.metadata.resource_version
    return mine.isdecimal() and version.isdecimal() and int(mine) > int(version)
