"""The allocation writer: writes, confirms and revokes allocations in background threads.

All methods run in the controller's thread. Only the API calls run in other threads, which post
their outcome to the controller's queue.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from slicewise.core.errors import SlicewiseError
from slicewise.kubernetes.api import Pod, ResourceClaim
from slicewise.kubernetes.backoff import ObjectBackoff
from slicewise.kubernetes.cache import ClusterCache
from slicewise.kubernetes.claim_client import ClaimClient, Decision, NotWrittenError, is_refusal
from slicewise.kubernetes.claim_states import IN_FLIGHT, ClaimRecord, ClaimState
from slicewise.kubernetes.claim_templates import ClaimTemplates
from slicewise.kubernetes.conflicts import Conflicts
from slicewise.kubernetes.cycle import Cycle
from slicewise.kubernetes.fencing import Fencing
from slicewise.kubernetes.informer import RESOURCE
from slicewise.kubernetes.pending_claims import PendingClaims, single_node
from slicewise.kubernetes.quarantine import Quarantine
from slicewise.kubernetes.stats import Stats

WRITERS = 8

_MISSING_RIGHT = re.compile(r"\((403 Forbidden|422 Invalid)\).* cannot \S+ resource ")
"""How the API says that a user lacks a right."""

log = logging.getLogger("slicewise.kubernetes")


@dataclass(frozen=True, slots=True)
class Done:
    """A background call has returned; ``call`` handles its outcome."""

    call: Callable[[Any, SlicewiseError | None], None]
    result: Any
    error: SlicewiseError | None


class AllocationWriter:
    """Writes, confirms and revokes the allocations of one controller."""

    def __init__(
        self,
        claim_client: ClaimClient,
        cache: ClusterCache,
        pending: PendingClaims,
        cycle: Cycle,
        conflicts: Conflicts,
        quarantine: Quarantine,
        stats: Stats,
        post: Callable[[Done], None],
        claim_read: Callable[[ResourceClaim], None],
        tell: Callable[[Pod, str], None] = lambda pod, text: None,
    ) -> None:
        """``post`` queues an outcome for the controller; ``claim_read`` handles a claim.

        ``tell`` tells a pod why it gets no claim.
        """
        self._claim_client = claim_client
        self._cache = cache
        self._pending = pending
        self._cycle = cycle
        self._conflicts = conflicts
        self._quarantine = quarantine
        self._stats = stats
        self._post = post
        self._claim_read = claim_read
        self._writers = ThreadPoolExecutor(WRITERS, "writer")
        self._records = cache.records
        self.fencing = Fencing(
            claim_client,
            cache.records,
            quarantine,
            self.in_background,
            lambda claim: self._claim_read(claim),
        )
        self.templates = ClaimTemplates(
            pending, self._create_template, self.in_background, tell, lambda: cycle.clock()
        )
        self._backoff = ObjectBackoff(lambda: cycle.clock())
        """Of claims that the API refused to confirm or to deallocate."""
        self.missing_right = ""
        """The right that the last write lacked; empty after a write that was accepted."""
        self._recording: set[str] = set()
        """The uids of the pods for which `record_claims` is in flight."""

    def stop(self) -> None:
        """Finish the writes in flight."""
        self._writers.shutdown(cancel_futures=True)

    def in_background(
        self, work: Callable[[], Any], then: Callable[[Any, SlicewiseError | None], None]
    ) -> None:
        """Run a call in a writer thread, and ``then`` with its outcome in the controller's."""

        def call() -> None:
            try:
                result, error = work(), None
            except SlicewiseError as problem:
                result, error = None, problem
            except BaseException as bug:
                self._post(Done(_fail, bug, None))
                raise
            self._post(Done(then, result, error))

        self._writers.submit(call)

    def _update(self, claim: ResourceClaim) -> None:
        """Handle a claim as it was written; it may have been deleted since."""
        if self._known(claim) is None:
            self._cache.forget(claim.metadata.uid)
        else:
            self._claim_read(claim)

    def _known(self, claim: ResourceClaim) -> ResourceClaim | None:
        """The known version of a claim; None if it was deleted."""
        known = self._pending.claims.get(claim.metadata.key)
        return known if known is not None and known.metadata.uid == claim.metadata.uid else None

    # Allocating

    def write(self, decision: Decision) -> None:
        """Start the write of a decision."""
        self.in_background(
            lambda: self._claim_client.allocate(decision),
            lambda result, error: self._written(decision, result, error),
        )

    def _written(
        self, decision: Decision, claims: list[ResourceClaim] | None, error: SlicewiseError | None
    ) -> None:
        self._cycle.finished(decision)
        if error is None:
            self._stats.allocated += len(decision.grants)
            self.missing_right = ""
            for grant in decision.grants:
                self._quarantine.forget(grant.claim.metadata.uid)
        elif isinstance(error, NotWrittenError):
            claims = list(error.claims)
        for claim in claims or ():
            self._update(claim)
        if error is not None:
            self._not_written(decision, error)
        # Changes that arrived during the write were not acted upon: handle the claims again.
        for grant in decision.grants:
            record = self._records.get(grant.claim.metadata.uid)
            if record is None:
                continue
            if not decision.tentative and record.state is ClaimState.ALLOCATED:
                self._records.move(record, ClaimState.WRITTEN)
            self._claim_read(record.claim)

    def _not_written(self, decision: Decision, error: SlicewiseError) -> None:
        """Note a failed write."""
        log.info("not written for pod %s: %s", decision.pod, error)
        self._stats.failed += 1
        for grant in decision.grants:
            uid = grant.claim.metadata.uid
            record = self._records.get(uid)
            if record is None or record.state is not ClaimState.PENDING:
                continue
            if not isinstance(error, NotWrittenError):  # the outcome is unknown
                self._records.move(record, ClaimState.STALE)
                self.fencing.refresh(record)
            elif uid in error.refused:
                self._quarantine.add(record, error.refused[uid])
                self._note_right(error.refused[uid])
            elif uid in error.deleted:
                self._records.move(record, ClaimState.STALE)

    def record_claims(self, pod: Pod, claims: Mapping[str, str]) -> None:
        """Start to name the template claims of a pod in its status."""
        uid = pod.metadata.uid
        if uid in self._recording:
            return
        self._recording.add(uid)

        def done(_: None, error: SlicewiseError | None) -> None:
            self._recording.discard(uid)
            if error is not None:  # repeated at the next change of the pod
                log.info("cannot record the claims of pod %s: %s", pod.metadata.key, error)

        self.in_background(lambda: self._claim_client.record_claims(pod, claims), done)

    def _create_template(self, body: dict[str, Any]) -> None:
        path = f"{RESOURCE}/namespaces/{body['metadata']['namespace']}/resourceclaimtemplates"
        self._claim_client.create(path, body)

    def seen(self, claim: ResourceClaim) -> None:
        """Note that the watch has delivered an allocation, and so all claims older than it."""
        uid = claim.metadata.uid
        self._conflicts.seen(uid)
        if claim.status.reserved_for:
            self._conflicts.reserved(uid, self._cycle.clock())
        record = self._records[uid]
        if record.state is ClaimState.WRITTEN:
            self._records.move(record, ClaimState.ALLOCATED)
            allocation = claim.status.allocation
            node = None if allocation is None else single_node(allocation.node_selector)
            unexpected = (
                self._conflicts.when != "never"
                and node is not None
                and self._conflicts.competes(self._cycle.clock(), node)
            )
            if unexpected and not claim.status.reserved_for:
                # Rivals appeared during the write: allocate again, tentatively.
                self.revoke(claim)

    # Revoking

    def reconcile(self, claim: ResourceClaim) -> None:
        """Start the next write that an allocation needs, unless one is in flight."""
        record = self._records[claim.metadata.uid]
        if record.state in IN_FLIGHT:
            return
        if self._is_abandoned(claim):
            self.revoke(claim)
        elif _is_tentative(claim) and record.state is not ClaimState.TENTATIVE:
            self._records.move(record, ClaimState.TENTATIVE)

    def _is_abandoned(self, claim: ResourceClaim) -> bool:
        """Whether the pod of an allocation was deleted before it was bound.

        Kubernetes itself deallocates the claims of pods that were bound.
        """
        return not claim.status.reserved_for and not self._pending.users(claim.metadata.key)

    def revoke(self, claim: ResourceClaim) -> None:
        """Start to remove an allocation that no pod uses."""
        uid = claim.metadata.uid
        record = self._records.get(uid)
        if (
            record is None
            or record.state in (ClaimState.REVOKING, ClaimState.WRITING)
            or self._backoff.holds(uid)
        ):
            return
        before = record.state
        self._records.move(record, ClaimState.REVOKING)
        self._stats.revoked += 1

        def done(result: ResourceClaim | None, error: SlicewiseError | None) -> None:
            self._note_refusal(claim, "deallocated", error)
            if result is not None:
                self._update(result)
            record = self._records.get(uid)
            if record is not None:
                self._records.conclude(record)
                if record.allocated and before is ClaimState.WRITTEN:
                    self._records.move(record, ClaimState.WRITTEN)
            self._finish(result or claim, again=error is not None)

        self.in_background(lambda: self._claim_client.deallocate(claim), done)

    def _note_refusal(self, claim: ResourceClaim, what: str, error: SlicewiseError | None) -> None:
        """Note the outcome of a write to an allocation: a refused one is repeated later."""
        uid = claim.metadata.uid
        if error is None:
            self._backoff.forget(uid)
            return
        log.warning("claim %s is not %s yet: %s", claim.metadata.key, what, error)
        if is_refusal(error):
            self._backoff.add(uid)
            self._note_right(str(error))

    def _note_right(self, refusal: str) -> None:
        """Tell a refusal of all such writes, for lack of a right, from that of one claim."""
        if _MISSING_RIGHT.search(refusal):
            self.missing_right = refusal

    def retry(self) -> None:
        """Repeat the writes that the API has refused, after a pause."""
        for uid in self._backoff.take_due():
            record = self._records.get(uid)
            if record is None:
                self._backoff.forget(uid)
            else:
                self._claim_read(record.claim)
        self.templates.retry()

    @property
    def next_time(self) -> float | None:
        """When the next refused write is repeated."""
        times = (self._backoff.next_time, self.templates.next_time)
        return min((time for time in times if time is not None), default=None)

    def _finish(self, claim: ResourceClaim, again: bool) -> None:
        """Handle a claim after a write: on ``again``, or if it changed during the write.

        A change that the watch has not delivered yet is handled on arrival.
        """
        record = self._records.get(claim.metadata.uid)
        if again and record is not None:
            record.gave_way = ""
        known = self._known(claim)
        if known is not None and (again or _version(known) != _version(claim)):
            self._claim_read(known)

    # Confirming

    def confirm_settled(self) -> None:
        """Confirm the tentative claims that no other claim can conflict with any more."""
        for uid in self._conflicts.settled(self._cycle.clock()):
            # If it is excluded, the claim has to give way.
            if not self._cache.excluded(uid) and not self._backoff.holds(uid):
                record = self._records[uid]
                if self._cycle.gangs.holds(record.claim):
                    continue
                self._write_verdict(record.claim, True, "no other claim has these slices")

    def resolve_conflicts(self) -> None:
        """Give up allocations of ours that overlap with those of other claims."""
        for uid, clash in list(self._cache.clashes.items()):
            if not self._give_way(uid):
                for other in sorted(clash.against):
                    self._give_way(other)

    def _give_way(self, uid: str) -> bool:
        """Give up an allocation if it is ours and unused; returns whether it is being given up."""
        record = self._records.get(uid)
        if record is not None and record.state in IN_FLIGHT:
            return True  # wait for the outcome of the write
        if record is None or not record.allocated or not self._may_give_way(record):
            return False
        if self._backoff.holds(uid):
            return False  # the API refused it: perhaps the other one can
        claim = record.claim
        record.gave_way = record.version
        self._stats.conflicts += 1
        log.warning("claim %s gives way to another on the same slices", claim.metadata.key)
        if claim.status.reserved_for:
            self._write_verdict(claim, False, "another claim was given these slices as well")
        else:
            self.revoke(claim)
        return True

    def give_up(self, claim: ResourceClaim, why: str) -> None:
        """Give up a tentative allocation that its pod must not use."""
        record = self._records.get(claim.metadata.uid)
        if record is None or record.state in IN_FLIGHT or not _is_tentative(record.claim):
            return
        log.info("claim %s is given up: %s", claim.metadata.key, why)
        if record.claim.status.reserved_for:
            self._write_verdict(record.claim, False, why)
        else:
            self.revoke(record.claim)

    def _may_give_way(self, record: ClaimRecord) -> bool:
        """Whether an allocation is ours, no pod is bound with it, and giving way was not tried."""
        claim = record.claim
        if record.gave_way == record.version or not self._pending.is_ours(claim):
            return False
        # A tentative claim may be reserved: its pod is not bound before it is confirmed.
        return not claim.status.reserved_for or _is_tentative(claim)

    def _write_verdict(self, claim: ResourceClaim, confirmed: bool, why: str) -> None:
        uid = claim.metadata.uid
        self._records.move(self._records[uid], ClaimState.CONFIRMING)

        def done(result: ResourceClaim | None, error: SlicewiseError | None) -> None:
            self._note_refusal(claim, "confirmed", error)
            if result is not None:
                self._update(result)
            record = self._records.get(uid)
            if record is not None and record.state is ClaimState.CONFIRMING:
                self._records.conclude(record)
            self._finish(result or claim, again=error is not None)

        self.in_background(lambda: self._claim_client.confirm(claim, confirmed, why), done)

    # Taking over

    def resume(self) -> None:
        """Continue what another leader, or this one before a pause, left unfinished."""
        for uid in list(self._records.tentative):
            self._records.move(self._records[uid], ClaimState.ALLOCATED)  # find its rivals again
        for record in self._records.all():
            if record.state is ClaimState.STALE:
                self.fencing.refresh(record)
        for pod in list(self._pending.pods.values()):
            self.templates.pod_changed(pod)
        for claim in list(self._pending.claims.values()):
            if claim.status.allocation is not None and self._pending.is_ours(claim):
                self._claim_read(claim)


def _version(claim: ResourceClaim) -> str:
    return claim.metadata.resource_version


def _is_tentative(claim: ResourceClaim) -> bool:
    """Whether binding conditions hold the pod back and no verdict is written yet."""
    allocation = claim.status.allocation
    return (
        allocation is not None
        and not claim.status.devices
        and any(result.binding_conditions for result in allocation.devices.results)
    )


def _fail(bug: BaseException, error: SlicewiseError | None) -> None:
    """End the controller on a bug in a background thread: another replica takes over."""
    raise bug
