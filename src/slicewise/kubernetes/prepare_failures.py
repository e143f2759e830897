"""Bound pods that cannot start, because the driver cannot prepare their devices.

The kubelet says so in an event, and tries again every 60 to 90 seconds, for ever. The pod keeps its
slices meanwhile; if it vanishes, they cool down for longer. The pod and the operator are told what
to do.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from slicewise.kubernetes.api import KubeletEvent, Pod
from slicewise.kubernetes.cool_down import CoolDown
from slicewise.kubernetes.pending_claims import PendingClaims
from slicewise.kubernetes.stats import Stats

CONDITION = "slicewise.dev/Prepared"
FAILED, PREPARED = "PrepareFailed", "Prepared"
_NOT_CALLED = re.compile("driver [^ ]+ is not registered")
"""What the kubelet says if it could not call the driver at all, while that is started."""
_WORDS = 500
_NAMED = 3
_REMEDY = (
    "the pod keeps its slices; if it does not recover, see 'A prepare fails' in docs/kubernetes.md"
)


@dataclass(frozen=True, slots=True)
class PrepareMessage:
    """Whether the driver could prepare the devices of a pod, for its condition and an event."""

    prepared: bool
    text: str


class PrepareFailures:
    """Finds these pods."""

    def __init__(
        self,
        pending: PendingClaims,
        cool_down: CoolDown,
        stats: Stats,
        report: Callable[[Pod, PrepareMessage], None],
    ) -> None:
        """``report`` tells a pod, if this replica is the one to do so."""
        self._pending = pending
        self._cool_down = cool_down
        self._stats = stats
        self._report = report
        self._said: dict[str, str] = {}
        """By uid of a pod that fails: what the kubelet said the last time."""
        self._keys: dict[str, str] = {}
        """By uid: namespace and name."""

    def event(self, event: KubeletEvent) -> None:
        """Handle an event of the kubelet."""
        about = event.involved_object
        pod = self._pending.pods.get(f"{about.namespace}/{about.name}")
        if pod is None or pod.metadata.uid != about.uid or not _starts(pod):
            return
        text = event.message if len(event.message) <= _WORDS else f"{event.message[:_WORDS]}..."
        if about.uid not in self._said:
            self._stats.prepare_failures += 1
        self._said[about.uid], self._keys[about.uid] = text, pod.metadata.key
        self._stats.prepares_failing = len(self._said)
        if not _NOT_CALLED.search(event.message):
            self._cool_down.prepare_failed(about.uid)
        self._report(pod, PrepareMessage(False, f"node {pod.spec.node_name}: {text}; {_REMEDY}"))

    def pod_changed(self, pod: Pod) -> None:
        """Note that a pod may have started."""
        if pod.metadata.uid in self._said and not _starts(pod):
            self._forget(pod.metadata.uid)
            self._cool_down.prepared(pod.metadata.uid)
            if not pod.over:
                self._report(pod, PrepareMessage(True, "the driver has prepared the devices"))

    def pod_deleted(self, uid: str) -> None:
        """Note that a pod is gone."""
        self._forget(uid)

    def _forget(self, uid: str) -> None:
        self._said.pop(uid, None)
        self._keys.pop(uid, None)
        self._stats.prepares_failing = len(self._said)

    def summary(self) -> str:
        """The pods that cannot start, for an operator; empty if there are none."""
        if not self._said:
            return ""
        named = [f"{self._keys[uid]}: {text}" for uid, text in list(self._said.items())[:_NAMED]]
        count = len(self._said)
        more = f"; and {count - _NAMED} more" if count > _NAMED else ""
        pods = "1 pod does" if count == 1 else f"{count} pods do"
        return (
            f"{pods} not start, because a driver cannot prepare devices: {'; '.join(named)}{more}"
        )


def _starts(pod: Pod) -> bool:
    """Whether a pod is bound and its sandbox is not there yet."""
    return (
        bool(pod.spec.node_name)
        and pod.status.phase == "Pending"
        and not any(
            one.type == "PodReadyToStartContainers" and one.status == "True"
            for one in pod.status.conditions
        )
    )
