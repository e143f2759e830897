"""Until when Jobs may run, if they set ``activeDeadlineSeconds``.

Kubernetes ends all pods of such a Job this long after it started the Job, so the time that it has
already run counts. Only pods with claims are of interest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import NamedTuple

from slicewise.journal.entries import Seconds
from slicewise.kubernetes.api import Job, Pod
from slicewise.kubernetes.api.common import parse_time


class JobDeadline(NamedTuple):
    """Until when a Job may run."""

    seconds: Seconds
    """From its start."""
    ends: Seconds | None
    """None if it has not started, or is suspended."""


class JobDeadlines:
    """The Jobs with a deadline, and the pods of Jobs."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}
        """By namespace and name: the uids of the Jobs with a deadline."""
        self._deadlines: dict[str, JobDeadline] = {}
        self._pods: defaultdict[str, set[str]] = defaultdict(set)
        """By uid of a Job, with a deadline or not: its pods."""

    def put(self, job: Job) -> Collection[str]:
        """Add or update a Job; returns its pods if their end has changed."""
        uid, seconds = job.metadata.uid, job.spec.active_deadline_seconds
        if seconds is None:
            return self.drop(job.metadata.key)
        replaced = self.known.get(job.metadata.key, uid)
        if replaced != uid:
            self.drop(job.metadata.key)
        started = job.status.start_time
        ends = None if started is None else parse_time(started, 0.0) + seconds
        before = self._deadlines.get(uid)
        self.known[job.metadata.key] = uid
        self._deadlines[uid] = deadline = JobDeadline(float(seconds), ends)
        return () if deadline == before else tuple(self._pods.get(uid, ()))

    def drop(self, key: str) -> Collection[str]:
        """Forget a Job; returns its pods if it had a deadline."""
        uid = self.known.pop(key, None)
        if uid is None:
            return ()
        del self._deadlines[uid]
        return tuple(self._pods.get(uid, ()))

    def of(self, pod: Pod) -> JobDeadline | None:
        """The deadline of the Job that owns a pod."""
        uid = owning_job(pod)
        return None if uid is None else self._deadlines.get(uid)

    def pod_changed(self, pod: Pod) -> None:
        """Add a pod that may have an owner."""
        uid = owning_job(pod)
        if uid is not None:
            self._pods[uid].add(pod.metadata.key)

    def pod_deleted(self, pod: Pod) -> None:
        """Forget a pod that was deleted or has ended."""
        uid = owning_job(pod)
        if uid is not None and uid in self._pods:
            self._pods[uid].discard(pod.metadata.key)
            if not self._pods[uid]:
                del self._pods[uid]


def owning_job(pod: Pod) -> str | None:
    """The uid of the Job that a pod belongs to."""
    owners = [one for one in pod.metadata.owner_references if one.controller]
    return owners[0].uid if owners and owners[0].kind == "Job" else None
