"""Fencing: a new leader makes the writes of former leaders impossible before it decides.

A former leader may be paused with a decision and resume at any time. Only few claims can be
affected: those that wait although they have the finalizer, see `ClaimClient.fence`. They are fenced
side by side, by the writer threads. A claim that the API refuses to change is quarantined, and the
others are fenced nevertheless.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from slicewise.core.errors import SlicewiseError
from slicewise.kubernetes.api import ResourceClaim
from slicewise.kubernetes.claim_client import ClaimClient, is_refusal, needs_fence
from slicewise.kubernetes.claim_parameters import read_parameters
from slicewise.kubernetes.claim_states import (
    IN_FLIGHT,
    WAITS_FOR_NEWER,
    ClaimRecord,
    ClaimRecords,
    ClaimState,
)
from slicewise.kubernetes.quarantine import Quarantine

log = logging.getLogger("slicewise.kubernetes")

InBackground = Callable[[Callable[[], Any], Callable[[Any, SlicewiseError | None], None]], None]
"""Runs a call in a writer thread, and its outcome in the controller's thread."""


class Fencing:
    """Fences former leaders, and single claims whose version is uncertain."""

    def __init__(
        self,
        claim_client: ClaimClient,
        records: ClaimRecords,
        quarantine: Quarantine,
        in_background: InBackground,
        claim_read: Callable[[ResourceClaim], None],
    ) -> None:
        """``claim_read`` handles a claim as it was read or written."""
        self._claim_client = claim_client
        self._records = records
        self._quarantine = quarantine
        self._in_background = in_background
        self._claim_read = claim_read
        self._then: Callable[[bool], None] = lambda done: None
        self._left = 0
        """The claims that are still being fenced."""
        self.running = False
        self.problem = ""
        """Why the last attempt has failed; empty if it succeeded."""

    def start(self, then: Callable[[bool], None]) -> None:
        """Fence all claims that need it; ``then`` receives whether that succeeded."""
        self.running = True
        self._then = then
        for record in self._records.all():
            record.gave_way = ""
        self._in_background(self._claim_client.list_claims, self._listed)

    def _listed(self, found: list[ResourceClaim] | None, error: SlicewiseError | None) -> None:
        if found is None:
            self._end(str(error))
            return
        needing = []
        for claim in found:
            # Without classes: a former leader may have known others, or none.
            if needs_fence(claim) and read_parameters(claim, {}) is not None:
                needing.append(claim)
            else:
                self._fenced(claim)
        self._left, self.problem = len(needing), ""
        for claim in needing:
            self._in_background(
                partial(self._claim_client.fence, claim), partial(self._one_done, claim)
            )
        if not needing:
            self._end("")

    def _one_done(
        self, claim: ResourceClaim, there: ResourceClaim | None, error: SlicewiseError | None
    ) -> None:
        self._left -= 1
        if error is None:
            if there is not None:
                self._fenced(there)
        elif is_refusal(error):
            self._refused(claim, error)
        else:
            self.problem = str(error)
        if not self._left:
            self._end(self.problem)

    def _fenced(self, claim: ResourceClaim) -> None:
        """Handle a claim that no earlier write can change any more."""
        record = self._records.get(claim.metadata.uid)
        if (
            record is not None
            and record.state in WAITS_FOR_NEWER
            and record.version == claim.metadata.resource_version
            and not record.allocated
        ):
            self._records.move(record, ClaimState.PENDING)  # the known version is the newest
        self._claim_read(claim)  # the watch may not have delivered it yet

    def _refused(self, claim: ResourceClaim, error: SlicewiseError) -> None:
        self._claim_read(claim)
        record = self._records.get(claim.metadata.uid)
        # A write of this replica's own that is in flight is handled when it returns.
        if record is not None and not record.allocated and record.state not in IN_FLIGHT:
            log.warning("claim %s is quarantined: %s", claim.metadata.key, error)
            self._quarantine.add(record, str(error))
            self._claim_read(record.claim)

    def _end(self, problem: str) -> None:
        self.running = False
        self.problem = problem
        if problem:
            log.warning("cannot lead yet: %s", problem)
        self._then(not problem)

    # Single claims

    def retry(self) -> None:
        """Try the claims again whose time in quarantine is over."""
        for record in self._quarantine.take_due():
            self.refresh(record)

    def refresh(self, record: ClaimRecord) -> None:
        """Find out how a claim is now, and that it stays so; then it may be allocated."""
        claim = record.claim

        def done(there: ResourceClaim | None, error: SlicewiseError | None) -> None:
            record = self._records.get(claim.metadata.uid)
            if record is None or record.state not in WAITS_FOR_NEWER:
                return
            if error is None:
                if there is not None:
                    self._fenced(there)
            elif is_refusal(error) or record.state is ClaimState.QUARANTINED:
                self._quarantine.add(record, str(error))

        self._in_background(lambda: self._claim_client.refresh(claim), done)
