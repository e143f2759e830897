"""Evictions: ends the victims of a preemption through the eviction API, in background threads.

The API keeps PodDisruptionBudgets, and pods end with their grace period. All victims are tried
without effect first, so that none is evicted in vain because another must stay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from slicewise.core.errors import SlicewiseError
from slicewise.kubernetes.api import Pod, PodDisruptionBudget
from slicewise.kubernetes.api_client import ApiClient, ConflictError, NotFoundError
from slicewise.kubernetes.claim_client import NotLeadingError, is_refusal
from slicewise.kubernetes.event_recorder import EventRecorder
from slicewise.kubernetes.event_series import Regarding
from slicewise.kubernetes.fencing import InBackground
from slicewise.kubernetes.preemption import Attempt, Preemption
from slicewise.kubernetes.stats import Stats

BUDGETS = "/apis/policy/v1/poddisruptionbudgets"

log = logging.getLogger("slicewise.kubernetes")


class EvictionClient:
    """Evicts pods; its methods block and are thread-safe."""

    def __init__(self, api: ApiClient, valid: Callable[[], bool]) -> None:
        """``valid`` tells whether this replica holds the lease now."""
        self._api = api
        self._valid = valid

    def budgets(self) -> list[PodDisruptionBudget]:
        """All PodDisruptionBudgets as they are now."""
        pages = self._api.pages(BUDGETS, PodDisruptionBudget)
        return [budget for page in pages for budget in page.items]

    @property
    def leads(self) -> bool:
        """Whether this replica may evict pods."""
        return self._valid()

    def evict(self, pods: Sequence[Pod]) -> tuple[list[Pod], SlicewiseError | None]:
        """Evict pods if all of them may be; returns those that are ending or gone now.

        After the first refusal, which is returned too, nothing more is evicted.
        """
        gone: list[Pod] = []
        try:
            for pod in pods:
                self._evict(pod, ["All"])
            for pod in pods:
                self._evict(pod, [])
                gone.append(pod)
        except SlicewiseError as error:
            return gone, error
        return gone, None

    def _evict(self, pod: Pod, dry_run: list[str]) -> None:
        meta = pod.metadata
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": meta.name, "namespace": meta.namespace},
            "deleteOptions": {"preconditions": {"uid": meta.uid}, "dryRun": dry_run},
        }
        if not self._valid():
            raise NotLeadingError("the lease has expired; no pod was evicted")
        path = f"/api/v1/namespaces/{meta.namespace}/pods/{meta.name}/eviction"
        query = {"dryRun": "All"} if dry_run else {}
        with suppress(ConflictError, NotFoundError):  # it is gone, or replaced by another
            self._api.write("POST", path, body, **query)


class Evictions:
    """Carries out what `preemption` decides."""

    def __init__(
        self,
        client: EvictionClient,
        preemption: Preemption,
        in_background: InBackground,
        recorder: EventRecorder,
        stats: Stats,
    ) -> None:
        self._client = client
        self._preemption = preemption
        self._in_background = in_background
        self._recorder = recorder
        self._stats = stats
        self._asking = False
        """Whether the budgets are being read."""
        self.problem = ""
        """Why pods cannot be evicted; empty if the last eviction was accepted."""

    def step(self) -> None:
        """Continue the attempts, and begin another one if a pod needs it."""
        if not self._preemption.enabled:
            return
        self._preemption.check()
        for attempt, victims in self._preemption.to_evict():
            self._in_background(
                partial(self._client.evict, victims), partial(self._evicted, attempt)
            )
        if self._asking:
            return
        pod = self._preemption.next_pod()
        if pod is not None:
            self._asking = True
            self._in_background(self._client.budgets, partial(self._choose, pod))

    def _choose(
        self, pod: Pod, budgets: list[PodDisruptionBudget] | None, error: SlicewiseError | None
    ) -> None:
        self._asking = False
        if not self._client.leads:
            return
        if budgets is None:
            self.problem = f"no pods are evicted for others: {error}"
            log.warning("%s", self.problem)
            self._preemption.rest(pod)
        elif self._preemption.choose(pod, budgets):
            meta = pod.metadata
            names = [one.metadata.key for one in self._preemption.attempts[meta.uid].victims]
            log.info("evicting %s for pod %s", ", ".join(names), meta.key)

    def _evicted(
        self,
        attempt: Attempt,
        outcome: tuple[list[Pod], SlicewiseError | None] | None,
        bug: SlicewiseError | None,
    ) -> None:
        assert outcome is not None, bug  # refusals are a part of the outcome
        gone, error = outcome
        by = attempt.pod
        for pod in gone:
            meta = pod.metadata
            attempt.evicted.add(meta.uid)
            self._stats.evicted += 1
            self._recorder.report_event(
                Regarding("Pod", meta.name, meta.uid, meta.namespace),
                "Preempted",
                "Preempting",
                f"its slices are needed by a pod of priority {by.spec.priority} "
                f"({by.spec.priority_class_name}), uid {by.metadata.uid}",
            )
        if error is None:
            self.problem = ""
            return
        log.info("not evicted for pod %s: %s", by.metadata.key, error)
        if is_refusal(error):  # a budget only asks for patience
            self.problem = f"no pods are evicted for others: {error}"
            self._preemption.abandon(by.metadata.uid)

    def clear(self) -> None:
        """Forget what was refused: another replica leads now."""
        self.problem = ""
