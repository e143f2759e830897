"""Claim states: one record for each known ResourceClaim, and the legal transitions between states.

The cluster cache holds the records. Every change of state goes through `ClaimRecords.move`, which
refuses transitions that are not listed in `TRANSITIONS`. `allocation_writer` makes most of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from slicewise.kubernetes.api import ResourceClaim


class ClaimState(Enum):
    """What the controller is doing about a claim."""

    PENDING = "pending"
    """The claim has no devices, and no write is in flight."""
    WRITING = "writing"
    """Devices are assumed in the cache, and the allocation is being written."""
    STALE = "stale"
    """A write failed, and the known version may be outdated: wait for a newer one."""
    QUARANTINED = "quarantined"
    """The API refuses to change the claim: see `quarantine`."""
    COOLING = "cooling"
    """The claim has lost its devices, which may still be in use on the node: see `cool_down`."""
    WRITTEN = "written"
    """The allocation was written without binding conditions; the watch has not delivered it yet."""
    TENTATIVE = "tentative"
    """Binding conditions hold the pod back until no other claim can conflict."""
    CONFIRMING = "confirming"
    """The confirmation, or the conflict, is being written."""
    ALLOCATED = "allocated"
    """The claim has devices, and the controller has nothing left to do."""
    REVOKING = "revoking"
    """The allocation is being removed."""


_S = ClaimState
TRANSITIONS: Mapping[ClaimState, frozenset[ClaimState]] = {
    # Assumed by a scheduling cycle; failed write; refused; its pod vanished; another writer.
    _S.PENDING: frozenset({_S.WRITING, _S.STALE, _S.QUARANTINED, _S.COOLING, _S.ALLOCATED}),
    # The outcome is read from the claim.
    _S.WRITING: frozenset({_S.PENDING, _S.ALLOCATED}),
    # A newer version arrived, or the known one is the newest; fencing was refused.
    _S.STALE: frozenset({_S.PENDING, _S.QUARANTINED, _S.ALLOCATED}),
    # A newer version arrived; fenced after all; an earlier write has arrived.
    _S.QUARANTINED: frozenset({_S.PENDING, _S.ALLOCATED}),
    # Its former slices are free; fencing was refused; allocated by another writer.
    _S.COOLING: frozenset({_S.PENDING, _S.QUARANTINED, _S.ALLOCATED}),
    # Seen by the watch; deallocated; rewritten by another leader; in conflict.
    _S.WRITTEN: frozenset({_S.ALLOCATED, _S.PENDING, _S.TENTATIVE, _S.CONFIRMING, _S.REVOKING}),
    # No conflict, or one; deallocated; abandoned; another leader took over.
    _S.TENTATIVE: frozenset({_S.CONFIRMING, _S.PENDING, _S.REVOKING, _S.ALLOCATED}),
    # The outcome is read from the claim; revoked meanwhile, because the pod cannot use it.
    _S.CONFIRMING: frozenset({_S.ALLOCATED, _S.PENDING, _S.REVOKING}),
    # Deallocated; our own write; must be confirmed; in conflict; abandoned.
    _S.ALLOCATED: frozenset(
        {_S.PENDING, _S.WRITTEN, _S.TENTATIVE, _S.CONFIRMING, _S.REVOKING},
    ),
    # Removed; the API refused.
    _S.REVOKING: frozenset({_S.PENDING, _S.ALLOCATED, _S.WRITTEN}),
}
IN_FLIGHT = frozenset({_S.WRITING, _S.CONFIRMING, _S.REVOKING})
"""A write to the claim has not returned: nothing else is started until it has."""

WAITS_FOR_NEWER = frozenset({_S.STALE, _S.QUARANTINED})
"""The known version of the claim must not be allocated."""


class IllegalTransitionError(RuntimeError):
    """A claim cannot change from one state to the other: a bug in the controller."""


@dataclass(slots=True)
class Settling:
    """What a tentative claim waits for."""

    until: float | None = None
    """When the rivals have had enough time; None until the scheduler has reserved the claim."""
    rivals: set[str] | None = None
    """The claims that may still conflict; None until the watch has delivered our write."""


@dataclass(slots=True, eq=False)
class ClaimRecord:
    """A claim as last known, and its state."""

    claim: ResourceClaim
    state: ClaimState = ClaimState.PENDING
    gave_way: str = ""
    """The version at which giving way was tried last."""

    @property
    def allocated(self) -> bool:
        """Whether the known version of the claim has an allocation."""
        return self.claim.status.allocation is not None

    @property
    def version(self) -> str:
        """The resource version of the claim."""
        return self.claim.metadata.resource_version


class ClaimRecords:
    """All records by the uid of their claim."""

    def __init__(self) -> None:
        self._records: dict[str, ClaimRecord] = {}
        self.tentative: dict[str, Settling] = {}
        """By uid: what each tentative claim waits for."""

    def __getitem__(self, uid: str) -> ClaimRecord:
        """The record of a known claim."""
        return self._records[uid]

    def get(self, uid: str) -> ClaimRecord | None:
        """The record of a claim; None for an unknown claim."""
        return self._records.get(uid)

    def all(self) -> list[ClaimRecord]:
        """Every record."""
        return list(self._records.values())

    def add(self, claim: ResourceClaim) -> ClaimRecord:
        """The record of a claim; created if missing."""
        uid = claim.metadata.uid
        record = self._records.get(uid)
        if record is None:
            record = self._records[uid] = ClaimRecord(claim)
        return record

    def drop(self, uid: str) -> None:
        """Remove the record of a deleted claim."""
        self._records.pop(uid, None)
        self.tentative.pop(uid, None)

    def move(self, record: ClaimRecord, state: ClaimState) -> None:
        """Change the state of a claim."""
        if state not in TRANSITIONS[record.state]:
            key = record.claim.metadata.key
            raise IllegalTransitionError(f"claim {key}: {record.state.value} to {state.value}")
        record.state = state
        self.tentative.pop(record.claim.metadata.uid, None)
        if state is ClaimState.TENTATIVE:
            self.tentative[record.claim.metadata.uid] = Settling()

    def conclude(self, record: ClaimRecord) -> None:
        """Derive the state from the known claim after a write has returned."""
        self.move(record, ClaimState.ALLOCATED if record.allocated else ClaimState.PENDING)

    def update(self, claim: ResourceClaim) -> ClaimRecord:
        """Apply a version of a claim; the state does not change during a write."""
        record = self.add(claim)
        newer = record.version != claim.metadata.resource_version
        record.claim = claim
        if record.state in IN_FLIGHT:
            return record
        if record.allocated:
            if record.state in (ClaimState.PENDING, ClaimState.COOLING, *WAITS_FOR_NEWER):
                self.move(record, ClaimState.ALLOCATED)
        elif record.state not in (ClaimState.PENDING, ClaimState.COOLING) and (
            newer or record.state not in WAITS_FOR_NEWER
        ):
            self.move(record, ClaimState.PENDING)
        return record
