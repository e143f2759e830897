"""When pods end, if they set ``activeDeadlineSeconds``.

The kubelet ends such a pod this long after it started it. Only claims that were
created for one pod count: another pod may use any other claim afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator

from slicewise.core.cluster import Instance
from slicewise.journal.entries import Seconds
from slicewise.kubernetes.api import Pod
from slicewise.kubernetes.api.common import parse_time
from slicewise.kubernetes.cache import ClusterCache
from slicewise.kubernetes.pending_claims import PendingClaims, PendingPod, owning_pod

START_SECONDS = 60.0
"""The usual upper limit on the time until a pod with devices is started."""
OVERDUE_SECONDS = 60.0
"""How long after its end a pod that still exists counts as ending at an unknown time."""
_GRACE_SECONDS = 30
"""Kubernetes' default of ``terminationGracePeriodSeconds``."""


class PodLifetimes:
    """Finds the pods that use an instance, and when they end."""

    def __init__(self, cache: ClusterCache, pending: PendingClaims) -> None:
        self._cache = cache
        self._pending = pending

    def users(self, instance: Instance) -> Iterator[str]:
        """The uids of the pods that use an instance."""
        owner = self._cache.state.owner.get(instance.id, "")
        record = self._cache.records.get(owner)
        if record is not None:
            for key in self._pending.users(record.claim.metadata.key):
                yield self._pending.pods[key].metadata.uid

    def of(self, instance: Instance) -> Seconds | None:
        """When an instance ends; None if that is unknown."""
        owner = self._cache.state.owner.get(instance.id, "")
        record = self._cache.records.get(owner)
        if record is None:
            return None
        uid = owning_pod(record.claim)
        for key in self._pending.users(record.claim.metadata.key):
            pod = self._pending.pods[key]
            lifetime = _lifetime(pod)
            if pod.metadata.uid != uid or lifetime is None:
                continue
            placed = self._cache.state.allocations[owner].placed or 0.0
            ends = parse_time(pod.status.start_time, placed + START_SECONDS) + lifetime
            return ends if self._cache.now() < ends + OVERDUE_SECONDS else None
        return None

    def lease(self, pending_pod: PendingPod) -> Seconds | None:
        """How long a waiting pod keeps its devices, from now on; None if that is unknown."""
        lifetime = _lifetime(pending_pod.pod)
        uid = pending_pod.pod.metadata.uid
        if lifetime is None or any(owning_pod(claim) != uid for claim, _ in pending_pod.claims):
            return None
        return START_SECONDS + lifetime


def _lifetime(pod: Pod) -> Seconds | None:
    """How long a pod exists at most, from its start."""
    deadline, grace = pod.spec.active_deadline_seconds, pod.spec.termination_grace_period_seconds
    if deadline is None:
        return None
    return float(deadline + (_GRACE_SECONDS if grace is None else grace))
