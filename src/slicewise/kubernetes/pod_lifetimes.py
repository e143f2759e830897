"""When pods end: as far as it is certain, and as far as it is expected.

It is certain for a pod with ``activeDeadlineSeconds``, which the kubelet ends this long after it
has started it, and for the pods of a Job with such a deadline. An annotation says how long a pod is
expected to run: a hint, by which nothing ends. Only claims that were created for one pod count:
another pod may use any other claim afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from slicewise.control.pods import read_expected
from slicewise.core.cluster import Instance
from slicewise.journal.entries import Seconds
from slicewise.kubernetes.api import Pod, ResourceClaim
from slicewise.kubernetes.api.common import parse_time
from slicewise.kubernetes.cache import ClusterCache
from slicewise.kubernetes.job_deadlines import JobDeadlines
from slicewise.kubernetes.pending_claims import PendingClaims, PendingPod, owning_pod

START_SECONDS = 60.0
"""The usual upper limit on the time until a pod with devices is started, or ended by its Job."""
OVERDUE_SECONDS = 60.0
"""How long after its end a pod that still exists counts as ending at an unknown time."""
_GRACE_SECONDS = 30
"""Kubernetes' default of ``terminationGracePeriodSeconds``."""


class PodLifetimes:
    """Finds the pods that use an instance, and when they end."""

    def __init__(self, cache: ClusterCache, pending: PendingClaims, jobs: JobDeadlines) -> None:
        self._cache = cache
        self._pending = pending
        self._jobs = jobs
        cache.ends_of = self.ends

    # Placed pods

    def users(self, instance: Instance) -> Iterator[str]:
        """The uids of the pods that use an instance."""
        owner = self._cache.state.owner.get(instance.id, "")
        record = self._cache.records.get(owner)
        if record is not None:
            for key in self._pending.users(record.claim.metadata.key):
                yield self._pending.pods[key].metadata.uid

    def of(self, instance: Instance) -> Seconds | None:
        """When an instance ends at the latest; None if that is unknown."""
        owner = self._cache.state.owner.get(instance.id, "")
        record = self._cache.records.get(owner)
        pod = None if record is None else self._only_user(record.claim)
        if record is None or pod is None:
            return None
        ends = self._certain_end(pod, self._placed(record.claim) + START_SECONDS)
        return ends if ends is not None and self._cache.now() < ends + OVERDUE_SECONDS else None

    def ends(self, claim: ResourceClaim) -> Seconds:
        """When the devices of a claim become free, as far as is known or expected; or infinity."""
        pod = self._only_user(claim)
        if pod is None:
            return math.inf
        placed = self._placed(claim)
        certain = self._certain_end(pod, placed + START_SECONDS)
        expected, _ = read_expected(pod.metadata.annotations)
        ends = math.inf if certain is None else certain
        if expected is None:
            return ends
        return min(ends, parse_time(pod.status.start_time, placed) + expected)

    def set_ends(self, claim: ResourceClaim) -> None:
        """Set when the instances of a claim end, as far as is known by now."""
        state, ends = self._cache.state, self.ends(claim)
        for instance in state.instances.get(claim.metadata.uid, ()):
            if state.cluster.end_of(instance) != ends:
                state.cluster.set_end(instance, ends)

    def _only_user(self, claim: ResourceClaim) -> Pod | None:
        """The pod for which a claim was created."""
        uid = owning_pod(claim)
        pods = (self._pending.pods[key] for key in self._pending.users(claim.metadata.key))
        return next((pod for pod in pods if pod.metadata.uid == uid), None)

    def _placed(self, claim: ResourceClaim) -> Seconds:
        allocation = self._cache.state.allocations.get(claim.metadata.uid)
        if allocation is None or allocation.placed is None:
            return self._cache.now()
        return allocation.placed

    def _certain_end(self, pod: Pod, latest_start: Seconds) -> Seconds | None:
        """When a pod with devices has ended at the latest; None if that is unknown."""
        known = [self._job_end(pod)]
        if pod.spec.active_deadline_seconds is not None:
            started = parse_time(pod.status.start_time, latest_start)
            known.append(started + pod.spec.active_deadline_seconds + _grace(pod))
        return min((end for end in known if end is not None), default=None)

    # Waiting pods

    def lease(self, pending_pod: PendingPod) -> Seconds | None:
        """How long a waiting pod keeps its devices at most; None if that is unknown."""
        pod = pending_pod.pod
        job = self._jobs.of(pod)
        known = [pod.spec.active_deadline_seconds, None if job is None else job.seconds]
        lifetimes = [seconds for seconds in known if seconds is not None]
        if not lifetimes or not _has_claims_of_its_own(pending_pod):
            return None
        return START_SECONDS + min(lifetimes) + _grace(pod)

    def until(self, pending_pod: PendingPod) -> Seconds | None:
        """When a waiting pod has ended, whenever it is placed; None if that is unknown."""
        return self._job_end(pending_pod.pod) if _has_claims_of_its_own(pending_pod) else None

    def hint(self, pending_pod: PendingPod) -> Seconds | None:
        """How long a waiting pod is expected to keep its devices, if it says so."""
        hint, _ = read_expected(pending_pod.pod.metadata.annotations)
        return hint if _has_claims_of_its_own(pending_pod) else None

    def expected(self, pending_pod: PendingPod) -> Seconds | None:
        """How long a waiting pod will keep its devices, as far as is known or expected."""
        known = (self.lease(pending_pod), self.hint(pending_pod))
        return min((seconds for seconds in known if seconds is not None), default=None)

    def _job_end(self, pod: Pod) -> Seconds | None:
        job = self._jobs.of(pod)
        if job is None or job.ends is None:
            return None
        return job.ends + START_SECONDS + _grace(pod)


class UnreadableHints:
    """The waiting pods whose annotation cannot be read; each is told once."""

    def __init__(self) -> None:
        self._texts: dict[str, tuple[str, str]] = {}
        """By pod: its uid, and what is wrong."""
        self._untold: dict[str, str] = {}

    def look(self, pod: Pod) -> None:
        """Read the annotation of a waiting pod."""
        key, uid = pod.metadata.key, pod.metadata.uid
        _, problem = read_expected(pod.metadata.annotations)
        if not problem:
            self.forget(key)
        elif self._texts.get(key) != (uid, problem):
            self._texts[key] = uid, problem
            self._untold[key] = problem

    def forget(self, key: str) -> None:
        """Forget a pod that waits no longer."""
        self._texts.pop(key, None)

    def take(self) -> dict[str, str]:
        """What is wrong, by pod, since the last call."""
        untold, self._untold = self._untold, {}
        return untold


def _has_claims_of_its_own(pending_pod: PendingPod) -> bool:
    uid = pending_pod.pod.metadata.uid
    return all(owning_pod(claim) == uid for claim, _ in pending_pod.claims)


def _grace(pod: Pod) -> Seconds:
    """How long a pod may take to end."""
    grace = pod.spec.termination_grace_period_seconds
    return float(_GRACE_SECONDS if grace is None else grace)
